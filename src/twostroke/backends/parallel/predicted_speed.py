"""Predicts the time of a step over several ranks from its cost, and so the gain of dividing.

The model: each rank computes its operations at the speed of its part of the machine. At a
collective, all ranks of a team wait for the slowest one, then for the link. Two delays are added:
the noise of the machine, and uneven numbers of tokens for the experts of each rank.

The speeds come from measurements: `measure_link` times collectives between ranks, and `rates_of`
compares the time of operations with the machine's limits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.interface import Meetings
from twostroke.backends.parallel.backend import ParallelBackend
from twostroke.backends.parallel.rank_group import on_cores
from twostroke.core.errors import RanksLostError
from twostroke.core.frozen import Frozen
from twostroke.model.program import BatchShape
from twostroke.model.program.collectives import AllGather, AllReduce, Receive, Send
from twostroke.model.program.experts import ExpertTerms, MixtureOfExperts
from twostroke.model.program.shard import shard
from twostroke.model.program.split_kv import SplitKvAttention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from twostroke.backends.interface import BackendFacts, RankFacts, Runner
    from twostroke.core.hardware import Hardware
    from twostroke.model.program.cost import Cost, CostModel
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.program.ops import Op
    from twostroke.model.program.shard import RankProgram

_CONTEXT = 256  # tokens before each stream's next one
_SHAPES: Mapping[str, BatchShape] = {
    "decode": BatchShape.decode((_CONTEXT,)),
    "decode of 16 streams": BatchShape.decode((_CONTEXT,) * 16),
    "prefill": BatchShape.prefill(_CONTEXT, start=_CONTEXT // 2),  # a chunk of a prompt
}


_NAMES = {"shared": "shared memory", "ucx": "UCX", "gloo": "Gloo"}


class Step(Frozen):
    """A step as predicted; figures are those of each rank, rank 0 first.

    `waiting_s` is in collectives for slower ranks, `moving_s` is what collectives themselves take,
    and `bytes` is what they bring to the rank. With several stages, `step_s` is the time from the
    first rank's start to the last one's end; `each_s` is that from one step to the next if so many
    are in flight that no stage waits.
    """

    computing_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    moving_s: tuple[float, ...]
    bytes: tuple[int, ...]
    step_s: float

    @property
    def each_s(self) -> float:
        """Seconds from one step to the next of many."""
        return max(map(sum, zip(self.computing_s, self.moving_s, strict=True)))


class TimeShares(Frozen):
    """Of a rank's time, what it waits in collectives for others, and what these themselves take."""

    waiting: float
    moving: float


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


class Divided(Frozen):
    """A Program divided over ranks, each with its own limits, and the link between them."""

    cost: CostModel
    parts: tuple[RankProgram, ...]
    limits: tuple[Hardware, ...]
    link: LinkSpeed
    rates: Rates = AT_LIMITS

    def step(self, batch: BatchShape) -> Step:
        """Predict a step."""
        return _Walk(self, batch).run()

    def step_s_on_one(self, batch: BatchShape, limits: Hardware) -> float:
        """Predict the seconds of one process with these limits."""
        rates, cost = self.rates, self.cost
        return sum(rates.seconds(op, cost.operation(op, batch), limits) for op in cost.program.ops)

    def gain(self, batch: BatchShape, limits: Hardware, num_in_flight: int = 1) -> float:
        """Return how many times faster than one process with these limits a step is.

        The streams of a batch are divided over `num_in_flight` steps.
        """
        return self.step_s_on_one(batch, limits) / self._seconds(batch, num_in_flight)[0]

    def collective_shares(self, batch: BatchShape, num_in_flight: int = 1) -> TimeShares:
        """Return what of its time rank 0 spends in collectives; arguments as `gain`."""
        whole_s, computing_s, moving_s = self._seconds(batch, num_in_flight)
        return TimeShares(1 - (computing_s + moving_s) / whole_s, moving_s / whole_s)

    def _seconds(self, batch: BatchShape, num_in_flight: int) -> tuple[float, float, float]:
        """Return how long a batch takes, and how much of that rank 0 computes and moves."""
        count = min(num_in_flight, len(batch.starts))
        if count == 1:
            step = self.step(batch)
            return step.step_s, step.computing_s[0], step.moving_s[0]
        starts, counts = batch.starts, batch.counts
        steps = [
            self.step(BatchShape(starts[i::count], counts[i::count], len(starts[i::count])))
            for i in range(count)
        ]
        return (
            sum(step.each_s for step in steps),
            sum(step.computing_s[0] for step in steps),
            sum(step.moving_s[0] for step in steps),
        )


def divide(
    cost: CostModel, mesh: Mesh, limits: Hardware, ranks: Sequence[RankFacts], link: LinkSpeed
) -> Divided:
    """Return a model's division over ranks; their machines are taken as equal to this one."""
    on_host = Counter(rank.host for rank in ranks)
    own = tuple([part_of_machine(limits, on_host[rank.host]) for rank in ranks])
    return Divided(cost, shard(cost.program, mesh), own, link)


def describe_gain(
    *, facts: BackendFacts, cost: CostModel, mesh: Mesh, limits: Hardware | None, backend: Runner
) -> str:
    """Return in a sentence what several ranks should gain over one process on this machine."""
    hosts = {rank.host for rank in facts.ranks}
    where = f"on {len(hosts)} machines" if len(hosts) > 1 else "on this machine"
    link = _NAMES.get(facts.link, facts.link)
    ranks = f"{len(facts.ranks)} ranks {where}, connected by {link}."
    if limits is None or not isinstance(backend, ParallelBackend):  # cannot be measured
        return ranks
    try:
        speed = measure_link(backend)
    except RanksLostError:  # the first request's step brings them back
        return ranks
    divided = divide(cost, mesh, limits, facts.ranks, speed)
    num_steps = facts.steps_ahead + 1
    figures = ", ".join(
        f"{name} {divided.gain(batch, limits, num_steps):.2f}x" for name, batch in _SHAPES.items()
    )
    found = f"A collective takes {speed.latency_s * 1e6:.1f} µs"
    if speed.bandwidth < math.inf:
        found += f" and {speed.bandwidth / 1e9:.2g} GB/s"
    return f"{ranks} {found}. Expected speed against one process here: {figures}."


def part_of_machine(limits: Hardware, count: int) -> Hardware:
    """Return the limits of each of `count` ranks that share a machine's cores."""
    return replace(
        limits,
        num_threads=max(1, limits.num_threads // count),
        bandwidth=limits.bandwidth / count,
        peak=limits.peak / count,
    )


@dataclass(slots=True)
class _RankClock:
    """A rank on its way: its next operation, and its clock."""

    ops: Sequence[Op]
    cost: CostModel
    next: int = 0
    now_s: float = 0.0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    moving_s: float = 0.0
    bytes: int = 0
    since_meeting_s: float = 0.0  # computed
    uneven_s: float = 0.0  # what of that is expected to be longer elsewhere
    has_computed: bool = False  # the operation that comes next, before its exchange

    def compute(self, seconds: float) -> None:
        """Go on after some computing."""
        self.computing_s += seconds
        self.since_meeting_s += seconds
        self.now_s += seconds

    def arrive(self, at_s: float, moving_s: float, num_bytes: int) -> None:
        """Go on after a collective for which all are there at `at_s`."""
        self.waiting_s += max(0.0, at_s - self.now_s)
        self.moving_s += moving_s
        self.now_s = max(self.now_s, at_s) + moving_s
        self.bytes += num_bytes
        self.since_meeting_s = self.uneven_s = 0.0
        self.has_computed = False
        self.next += 1


@dataclass
class _Walk:
    """Goes through the operations of all ranks, as far as they do not wait for each other."""

    divided: Divided
    batch: BatchShape
    _ranks: list[_RankClock] = field(default_factory=list)
    _sent: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> Step:
        """Return the step's figures."""
        cost = self.divided.cost
        self._ranks = [_RankClock(part.program.ops, cost.part(part)) for part in self.divided.parts]
        start_s = self.divided.link.start_s
        for rank in self._ranks:
            rank.now_s = start_s
        self._ranks[0].waiting_s = start_s
        going = True
        while going:
            going = any(self._advance(rank) for rank in range(len(self._ranks)))
        assert all(rank.next == len(rank.ops) for rank in self._ranks), "ranks wait for each other"
        return Step(
            tuple([rank.computing_s for rank in self._ranks]),
            tuple([rank.waiting_s for rank in self._ranks]),
            tuple([rank.moving_s for rank in self._ranks]),
            tuple([rank.bytes for rank in self._ranks]),
            max(rank.now_s for rank in self._ranks),
        )

    def _advance(self, number: int) -> bool:
        """Let a rank do one thing; return False if it has ended or must wait."""
        rank, link = self._ranks[number], self.divided.link
        if rank.next == len(rank.ops):
            return False
        op = rank.ops[rank.next]
        match op:
            case AllGather() | AllReduce():
                return self._meet(op)
            case Send():
                self._sent[number, op.to].append(rank.now_s)
                rank.next += 1
            case Receive():
                if not (sent := self._sent[op.sender, number]):
                    return False
                num_bytes = rank.cost.operation(op, self.batch).received_bytes
                rank.arrive(sent.pop(0), link.seconds(num_bytes), num_bytes)
            case SplitKvAttention() if rank.has_computed:
                return self._meet(op)
            case _:
                self._compute(rank, op, self.divided.limits[number])
                rank.has_computed = isinstance(op, SplitKvAttention)
                rank.next += not rank.has_computed
        return True

    def _compute(self, rank: _RankClock, op: Op, limits: Hardware) -> None:
        cost = rank.cost.operation(op, self.batch)
        seconds = self.divided.rates.seconds(op, cost, limits)
        rank.compute(seconds)
        if isinstance(op, ExpertTerms):
            rank.uneven_s += seconds * _unevenness(op, self.batch.num_rows)

    def _meet(self, op: AllGather | AllReduce | SplitKvAttention) -> bool:
        """Bring a team over its collective, once all are there."""
        team = [self._ranks[member] for member in op.team]
        next_ops = [rank.ops[rank.next : rank.next + 1] for rank in team]
        if any(
            not ops or getattr(ops[0], "exchange_name", None) != op.exchange_name
            for ops in next_ops
        ):
            return False
        if not all(rank.has_computed for rank in team if isinstance(op, SplitKvAttention)):
            return False
        all_there_s = max(rank.now_s for rank in team)
        if len(team) > 1:
            all_there_s += self.divided.link.noise * max(rank.since_meeting_s for rank in team)
            all_there_s += max(rank.uneven_s for rank in team)
        for rank, ops in zip(team, next_ops, strict=True):
            num_bytes = rank.cost.operation(ops[0], self.batch).received_bytes
            rank.arrive(all_there_s, self.divided.link.seconds(num_bytes), num_bytes)
        return True


def _unevenness(op: ExpertTerms, num_rows: int) -> float:
    """Return how much longer another rank's experts are expected to take, as a share of these.

    Rows choose independently, `num_used` of all experts with equal chances, and time grows with
    the choices. Of their number on one rank, the standard deviation is `deviation`; that of another
    rank varies by about as much the other way, and only a larger one is waited for.
    """
    share = len(op.experts) / op.num_experts
    if share in {0, 1}:
        return 0.0
    mean = num_rows * op.num_used * share
    left = (op.num_experts - op.num_used) / (op.num_experts - 1)
    deviation = math.sqrt(mean * (1 - share) * left)
    return 2 * deviation / math.sqrt(2 * math.pi) / mean


_MEETINGS, _REPEATS = 40, 5
_LARGE_BYTES = 1 << 20
_WORK = 20_000  # between two meetings: some ten microseconds, and
_LONGER = 10  # times as long as a meeting takes at least


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
