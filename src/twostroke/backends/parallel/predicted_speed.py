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

from twostroke.backends.interface import CollectiveTest
from twostroke.backends.parallel.backend import ParallelBackend
from twostroke.backends.parallel.rank_group import on_cores
from twostroke.core.errors import RanksLostError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
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

_CONTEXT_TOKENS = 256  # tokens before each stream's next one
_SHAPES: Mapping[str, BatchShape] = {
    "decode": BatchShape.decode((_CONTEXT_TOKENS,)),
    "decode of 16 streams": BatchShape.decode((_CONTEXT_TOKENS,) * 16),
    "prefill": BatchShape.prefill(
        _CONTEXT_TOKENS, start=_CONTEXT_TOKENS // 2
    ),  # a chunk of a prompt
}


_LINK_NAMES = {"shared": "shared memory", "ucx": "UCX", "gloo": "Gloo"}


class PredictedStep(Frozen):
    """The predicted times of a step, for each rank; rank 0 is first.

    `computing_s`: time of computing. `waiting_s`: time in collectives until slower ranks arrive.
    `moving_s`: time of the collectives themselves. `bytes`: received in collectives. `step_s`: time
    from the start of the first rank to the end of the last rank.
    """

    computing_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    moving_s: tuple[float, ...]
    bytes: tuple[int, ...]
    step_s: float

    @property
    def each_s(self) -> float:
        """Return the seconds between the ends of two steps while all pipeline stages are busy."""
        return max(map(sum, zip(self.computing_s, self.moving_s, strict=True)))


class CollectiveShares(Frozen):
    """The shares of rank 0's time that it waits for slower ranks and moves data, from 0 to 1."""

    waiting: float
    moving: float


class LinkSpeed(Frozen):
    """The speed of collectives over the link between ranks.

    - `latency_s`: seconds of a collective without data. `bandwidth`: bytes/s.
    - `start_s`: seconds that rank 0 waits until other ranks have read a step and start.
    - `noise`: seconds of waiting for each second of equal computing, because other programs and the
      machine delay different ranks at different times.
    """

    latency_s: float
    bandwidth: float
    start_s: float = 0.0
    noise: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a collective of `num_bytes`, after all ranks have arrived."""
        return self.latency_s + num_bytes / self.bandwidth


class Rates(Frozen):
    """How many times longer each kind of operation takes than the hardware limits allow.

    The minimal time is the time to move an operation's bytes, plus the time of its arithmetic, at
    the limits of one rank. `factors`: measured time / minimal time, by kind of operation.
    """

    factors: Mapping[str, float]

    def seconds(self, op: Op, cost: Cost, limits: Hardware) -> float:
        """Predict the seconds that a rank takes to compute an operation of the given cost."""
        return self.factors.get(_op_kind(op), 1.0) * _min_time_s(cost, limits)


AT_LIMITS = Rates({})


class Divided(Frozen):
    """A model that is divided over ranks, for predictions of its speed.

    It has each rank's part and hardware limits, and the speed of the link.
    """

    cost: CostModel
    parts: tuple[RankProgram, ...]
    limits: tuple[Hardware, ...]
    link: LinkSpeed
    rates: Rates = AT_LIMITS

    def step(self, batch: BatchShape) -> PredictedStep:
        """Predict the times of a step of this batch, for each rank."""
        return _StepSimulation(self, batch).run()

    def step_s_on_one(self, batch: BatchShape, limits: Hardware) -> float:
        """Predict the seconds of a step if one process with these limits ran the whole model."""
        rates, cost = self.rates, self.cost
        return sum(rates.seconds(op, cost.operation(op, batch), limits) for op in cost.program.ops)

    def gain(self, batch: BatchShape, limits: Hardware, num_in_flight: int = 1) -> float:
        """Predict how many times faster the ranks are than a single process with these limits.

        The sequences of the batch are divided over `num_in_flight` steps.
        """
        return self.step_s_on_one(batch, limits) / self._seconds(batch, num_in_flight)[0]

    def collective_shares(self, batch: BatchShape, num_in_flight: int = 1) -> CollectiveShares:
        """Predict how much of rank 0's time is spent in collectives; arguments as for `gain`."""
        total_s, computing_s, moving_s = self._seconds(batch, num_in_flight)
        return CollectiveShares(1 - (computing_s + moving_s) / total_s, moving_s / total_s)

    def _seconds(self, batch: BatchShape, num_in_flight: int) -> tuple[float, float, float]:
        """Predict the seconds of a batch whose sequences are divided over `num_in_flight` steps.

        Also returns rank 0's seconds of computing, and of moving data in collectives.
        """
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
    """Return a model divided over ranks, for predictions of its speed.

    All machines are assumed to equal this one.
    """
    on_host = Counter(rank.host for rank in ranks)
    rank_limits = tuple([part_of_machine(limits, on_host[rank.host]) for rank in ranks])
    return Divided(cost, shard(cost.program, mesh), rank_limits, link)


def describe_gain(
    *, facts: BackendFacts, cost: CostModel, mesh: Mesh, limits: Hardware | None, backend: Runner
) -> str:
    """Return a text for the log about the expected speed-up of ranks over one process here."""
    hosts = {rank.host for rank in facts.ranks}
    where = f"on {counted_noun(len(hosts), 'machine')}" if len(hosts) > 1 else "on this machine"
    link = _LINK_NAMES.get(facts.link, facts.link)
    ranks = f"{counted_noun(len(facts.ranks), 'rank')} {where}, connected by {link}."
    if limits is None or not isinstance(backend, ParallelBackend):  # the link cannot be measured
        return ranks
    try:
        speed = measure_link(backend)
    except RanksLostError:  # the first step recovers the ranks
        return ranks
    divided = divide(cost, mesh, limits, facts.ranks, speed)
    num_steps = facts.steps_ahead + 1
    figures = ", ".join(
        f"{name} {divided.gain(batch, limits, num_steps):.2f}x" for name, batch in _SHAPES.items()
    )
    link_text = f"A collective takes {speed.latency_s * 1e6:.1f} µs"
    if speed.bandwidth < math.inf:
        link_text += f" and {speed.bandwidth / 1e9:.2g} GB/s"
    return f"{ranks} {link_text}. Expected speed against one process here: {figures}."


def part_of_machine(limits: Hardware, count: int) -> Hardware:
    """Return the hardware limits of each of `count` ranks that share a machine's cores."""
    return replace(
        limits,
        num_threads=max(1, limits.num_threads // count),
        bandwidth=limits.bandwidth / count,
        peak=limits.peak / count,
    )


@dataclass(slots=True)
class _SimulatedRank:
    """A rank in the simulation of a step: its next operation, and its clock in seconds."""

    ops: Sequence[Op]
    cost: CostModel
    next: int = 0
    now_s: float = 0.0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    moving_s: float = 0.0
    bytes: int = 0
    since_collective_s: float = 0.0  # computed
    uneven_s: float = 0.0  # expected extra time of other ranks since then
    has_computed: bool = False  # whether the next operation has computed, and only exchanges

    def compute(self, seconds: float) -> None:
        """Advance the rank's clock by `seconds` of computing."""
        self.computing_s += seconds
        self.since_collective_s += seconds
        self.now_s += seconds

    def arrive(self, at_s: float, moving_s: float, num_bytes: int) -> None:
        """Advance the rank's clock past a collective that the last rank reached at `at_s`.

        From then on the collective takes `moving_s`; this rank receives `num_bytes` in it.
        """
        self.waiting_s += max(0.0, at_s - self.now_s)
        self.moving_s += moving_s
        self.now_s = max(self.now_s, at_s) + moving_s
        self.bytes += num_bytes
        self.since_collective_s = self.uneven_s = 0.0
        self.has_computed = False
        self.next += 1


@dataclass
class _StepSimulation:
    """Simulates a step: all ranks run their operations, and wait for each other in collectives."""

    divided: Divided
    batch: BatchShape
    _ranks: list[_SimulatedRank] = field(default_factory=list)
    _sent: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> PredictedStep:
        """Simulate the step, and return the predicted times of each rank."""
        cost = self.divided.cost
        self._ranks = [
            _SimulatedRank(part.program.ops, cost.part(part)) for part in self.divided.parts
        ]
        start_s = self.divided.link.start_s
        for rank in self._ranks:
            rank.now_s = start_s
        self._ranks[0].waiting_s = start_s
        is_running = True
        while is_running:
            is_running = any(self._advance(rank) for rank in range(len(self._ranks)))
        assert all(rank.next == len(rank.ops) for rank in self._ranks), "ranks wait for each other"
        return PredictedStep(
            computing_s=tuple([rank.computing_s for rank in self._ranks]),
            waiting_s=tuple([rank.waiting_s for rank in self._ranks]),
            moving_s=tuple([rank.moving_s for rank in self._ranks]),
            bytes=tuple([rank.bytes for rank in self._ranks]),
            step_s=max(rank.now_s for rank in self._ranks),
        )

    def _advance(self, number: int) -> bool:
        """Advance rank `number` by one operation; return False if it has finished or must wait."""
        rank, link = self._ranks[number], self.divided.link
        if rank.next == len(rank.ops):
            return False
        op = rank.ops[rank.next]
        match op:
            case AllGather() | AllReduce():
                return self._complete_collective(op)
            case Send():
                self._sent[number, op.to].append(rank.now_s)
                rank.next += 1
            case Receive():
                if not (sent := self._sent[op.sender, number]):
                    return False
                num_bytes = rank.cost.operation(op, self.batch).received_bytes
                rank.arrive(sent.pop(0), link.seconds(num_bytes), num_bytes)
            case SplitKvAttention() if rank.has_computed:
                return self._complete_collective(op)
            case _:
                self._compute(rank, op, self.divided.limits[number])
                rank.has_computed = isinstance(op, SplitKvAttention)
                rank.next += not rank.has_computed
        return True

    def _compute(self, rank: _SimulatedRank, op: Op, limits: Hardware) -> None:
        cost = rank.cost.operation(op, self.batch)
        seconds = self.divided.rates.seconds(op, cost, limits)
        rank.compute(seconds)
        if isinstance(op, ExpertTerms):
            rank.uneven_s += seconds * _unevenness(op, self.batch.num_rows)

    def _complete_collective(self, op: AllGather | AllReduce | SplitKvAttention) -> bool:
        """Simulate a collective if all ranks of its team have arrived; return whether they had."""
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
            all_there_s += self.divided.link.noise * max(rank.since_collective_s for rank in team)
            all_there_s += max(rank.uneven_s for rank in team)
        for rank, ops in zip(team, next_ops, strict=True):
            num_bytes = rank.cost.operation(ops[0], self.batch).received_bytes
            rank.arrive(all_there_s, self.divided.link.seconds(num_bytes), num_bytes)
        return True


def _unevenness(op: ExpertTerms, num_rows: int) -> float:
    """Return how much longer other ranks' experts take than this rank's experts, on average.

    The result is relative to this rank's time; 0 means as long. Model: rows choose `num_used`
    experts independently, with equal chances, and time is proportional to the number of choices.
    `deviation` is the standard deviation of that number on one rank. The number of another rank
    varies about as much, in the opposite direction, and this rank waits only if it is larger.
    """
    share = len(op.experts) / op.num_experts
    if share in {0, 1}:
        return 0.0
    mean = num_rows * op.num_used * share
    left = (op.num_experts - op.num_used) / (op.num_experts - 1)
    deviation = math.sqrt(mean * (1 - share) * left)
    return 2 * deviation / math.sqrt(2 * math.pi) / mean


_NUM_COLLECTIVES, _NUM_REPEATS = 40, 5
_LARGE_BYTES = 1 << 20
_WORK_UNITS = 20_000  # of computing between two collectives, about ten microseconds
_COMPUTING_RATIO = 10  # computing takes at least this many times as long as a collective


def measure_link(backend: ParallelBackend, noise_s: float = 0.03) -> LinkSpeed:
    """Measure the speed of the link between idle ranks, and how irregularly the ranks run.

    The speed takes the time of a few hundred messages, the irregularity about `noise_s` seconds.

    Raises:
        RanksLostError: a rank ended, or the link broke.
    """
    with own_cores(backend):
        return _measure_link(backend, noise_s)


def own_cores(backend: ParallelBackend) -> AbstractContextManager[None]:
    """Return a context in which this thread runs only on the cores of rank 0, as in steps."""
    ranks = backend.facts.ranks
    return on_cores(0, sum(rank.host == ranks[0].host for rank in ranks))


def _measure_link(backend: ParallelBackend, noise_s: float) -> LinkSpeed:
    measurements = [
        backend.measure_collectives(CollectiveTest(_NUM_COLLECTIVES))[1]
        for _ in range(_NUM_REPEATS)
    ]
    start_s = median(collective_s[0] for collective_s in measurements)
    latency_s = min(
        median(collective_s[1:]) for collective_s in measurements
    )  # of the least disturbed measurement
    bandwidth = math.inf  # shared values are written in place
    if backend.facts.link != "shared":
        _, (_, *large_s) = backend.measure_collectives(
            CollectiveTest(_NUM_REPEATS, num_bytes=_LARGE_BYTES)
        )
        count = len(backend.facts.ranks) - 1
        bandwidth = count * _LARGE_BYTES / max(median(large_s) - latency_s, 1e-9)
    computing_s, _ = backend.measure_collectives(CollectiveTest(_NUM_REPEATS, _WORK_UNITS))
    units_per_collective = math.ceil(_COMPUTING_RATIO * latency_s / median(computing_s))
    num_rounds = max(2, int(noise_s / (units_per_collective * median(computing_s))))
    computing_s, collective_s = backend.measure_collectives(
        CollectiveTest(num_rounds, units_per_collective * _WORK_UNITS)
    )
    waited_s = sum(collective_s[1:]) - latency_s * len(collective_s[1:])
    noise = max(0.0, waited_s) / sum(computing_s)
    return LinkSpeed(latency_s, bandwidth, max(0.0, start_s - latency_s), noise)


def rates_of(
    timed: Sequence[tuple[tuple[Op, ...], float]],
    cost: CostModel,
    limits: Hardware,
    batch: BatchShape,
) -> Rates:
    """Return how many times longer kinds of operations take than the limits allow, as measured.

    `timed`: operations that ran as one, and their seconds in a step, without waiting. `cost` and
    `limits`: of the rank's part of the model.
    """
    measured_s: dict[str, float] = defaultdict(float)
    total_min_s: dict[str, float] = defaultdict(float)
    for parts, seconds in timed:
        min_times_s = {op: _min_time_s(cost.operation(op, batch), limits) for op in parts}
        if sum(min_times_s.values()) > 0:
            kind = _op_kind(max(min_times_s, key=min_times_s.__getitem__))
            measured_s[kind] += seconds
            total_min_s[kind] += sum(min_times_s.values())
    return Rates({kind: measured_s[kind] / total_min_s[kind] for kind in measured_s})


def _op_kind(op: Op) -> str:
    return (ExpertTerms if isinstance(op, MixtureOfExperts) else type(op)).__name__


def _min_time_s(cost: Cost, limits: Hardware) -> float:
    return cost.bytes / limits.bandwidth + cost.flops / limits.peak
