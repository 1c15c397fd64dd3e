"""What a prediction of ranks is made from: the speed of their link, and that of operations."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from twostroke.backends import Meetings
from twostroke.backends.parallel.rank_group import on_cores
from twostroke.core.frozen import Frozen
from twostroke.model.program.experts import ExpertTerms, MixtureOfExperts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from twostroke.backends.parallel.backend import ParallelBackend
    from twostroke.core.hardware import Hardware
    from twostroke.model.program import BatchShape
    from twostroke.model.program.cost import Cost, CostModel
    from twostroke.model.program.ops import Op

_MEETINGS, _REPEATS = 40, 5
_LARGE_BYTES = 1 << 20
_WORK = 20_000  # between two meetings: some ten microseconds, and
_LONGER = 10  # times as long as a meeting takes at least


class LinkSpeed(Frozen):
    """Seconds of a collective without data, and the bytes/s at which data follow.

    Rank 0 waits `start_s` until the others have read a step and begin, too. For each second in
    which ranks compute alike, each loses `noise` seconds to waiting: other programs and the machine
    itself delay now one of them, now another.
    """

    latency_s: float
    bandwidth: float
    start_s: float = 0.0
    noise: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return how long a collective takes from the moment when all are there."""
        return self.latency_s + num_bytes / self.bandwidth


def measure_link(backend: ParallelBackend, noise_s: float = 0.03) -> LinkSpeed:
    """Measure the link of ranks that are at rest, and for about `noise_s` seconds their noise.

    The rest takes some milliseconds, or the time of a few hundred messages.

    Raises:
        RanksLostError: a rank ended, or the link broke.
    """
    with own_cores(backend):
        return _measure_link(backend, noise_s)


def own_cores(backend: ParallelBackend) -> AbstractContextManager[None]:
    """Keep to the cores of rank 0, as its steps do: two ranks on one core would take turns."""
    ranks = backend.facts.ranks
    return on_cores(0, sum(rank.host == ranks[0].host for rank in ranks))


def _measure_link(backend: ParallelBackend, noise_s: float) -> LinkSpeed:
    tries = [backend.meet(Meetings(_MEETINGS))[1] for _ in range(_REPEATS)]
    start_s = median(meeting[0] for meeting in tries)
    latency_s = min(median(meeting[1:]) for meeting in tries)  # the least disturbed
    bandwidth = math.inf  # shared values are written in place
    if backend.facts.link != "shared":
        _, (_, *large) = backend.meet(Meetings(_REPEATS, num_bytes=_LARGE_BYTES))
        count = len(backend.facts.ranks) - 1
        bandwidth = count * _LARGE_BYTES / max(median(large) - latency_s, 1e-9)
    computing, _ = backend.meet(Meetings(_REPEATS, _WORK))
    longer = math.ceil(_LONGER * latency_s / median(computing))  # than what moves
    rounds = max(2, int(noise_s / (longer * median(computing))))
    computing, meeting = backend.meet(Meetings(rounds, longer * _WORK))
    waited_s = sum(meeting[1:]) - latency_s * len(meeting[1:])
    noise = max(0.0, waited_s) / sum(computing)
    return LinkSpeed(latency_s, bandwidth, max(0.0, start_s - latency_s), noise)


class Rates(Frozen):
    """How many times longer than the machine's limits allow each kind of operation takes.

    The limits are those of one rank: the bytes and the arithmetic of an operation take their time
    one after the other.
    """

    factors: Mapping[str, float]

    def seconds(self, op: Op, cost: Cost, limits: Hardware) -> float:
        """Return how long a rank computes an operation."""
        return self.factors.get(_kind(op), 1.0) * _least_s(cost, limits)


AT_LIMITS = Rates({})


def rates_of(
    timed: Sequence[tuple[tuple[Op, ...], float]],
    cost: CostModel,
    limits: Hardware,
    batch: BatchShape,
) -> Rates:
    """Return the rates of a rank's fused operations, which took these seconds in a step.

    Waiting must not be a part of them. `cost` and `limits` are those of the rank's part.
    """
    measured_s: dict[str, float] = defaultdict(float)
    least_s: dict[str, float] = defaultdict(float)
    for parts, seconds in timed:
        own_s = {op: _least_s(cost.operation(op, batch), limits) for op in parts}
        if sum(own_s.values()) > 0:
            kind = _kind(max(own_s, key=own_s.__getitem__))
            measured_s[kind] += seconds
            least_s[kind] += sum(own_s.values())
    return Rates({kind: measured_s[kind] / least_s[kind] for kind in measured_s})


def _kind(op: Op) -> str:
    return (ExpertTerms if isinstance(op, MixtureOfExperts) else type(op)).__name__


def _least_s(cost: Cost, limits: Hardware) -> float:
    return cost.bytes / limits.bandwidth + cost.flops / limits.peak
