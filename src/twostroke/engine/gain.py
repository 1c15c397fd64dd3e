"""What dividing a model over ranks should gain: the time of a step, predicted from its cost.

Each rank walks through its own operations at the speed of its part of the machine; at a collective
all of its team wait for the last one, then for the link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.errors import BackendError
from twostroke.core.frozen import Frozen
from twostroke.program import BatchShape
from twostroke.program.collectives import AllGather, AllReduce, Receive, Send
from twostroke.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.core.hardware import Hardware
    from twostroke.engine.build import Engine
    from twostroke.program.cost import CostModel
    from twostroke.program.ops import Op
    from twostroke.program.shard import RankProgram

_CONTEXT = 256  # tokens before each stream's next one
_SHAPES: Mapping[str, BatchShape] = {
    "decode": BatchShape.decode((_CONTEXT,)),
    "decode of 16 streams": BatchShape.decode((_CONTEXT,) * 16),
    "prefill": BatchShape.prefill(_CONTEXT, start=_CONTEXT // 2),  # a chunk of a prompt
}


class LinkSpeed(Frozen):
    """Seconds of a collective without data, and the bytes/s at which data follow."""

    latency_s: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        """Return how long a collective takes from the moment when all are there."""
        return self.latency_s + num_bytes / self.bandwidth


# By kind of link, as benchmarks/links.py measures them: memory of one machine, and sockets on one.
_SPEEDS: Mapping[str, LinkSpeed] = {
    "shared": LinkSpeed(1.5e-6, 10e9),
    "ucx": LinkSpeed(24e-6, 2.3e9),
}
_NAMES = {"shared": "shared memory", "ucx": "UCX", "gloo": "Gloo"}
_ANY_SPEED = LinkSpeed(400e-6, 1e9)


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


class Divided(Frozen):
    """A Program divided over ranks, each with its own limits, and the link between them."""

    cost: CostModel
    parts: tuple[RankProgram, ...]
    limits: tuple[Hardware, ...]
    link: LinkSpeed

    def step(self, batch: BatchShape) -> Step:
        """Predict a step."""
        return _Walk(self, batch).run()

    def step_s_on_one(self, batch: BatchShape, limits: Hardware) -> float:
        """Predict the seconds of one process with these limits."""
        cost = self.cost.per_step().of(batch)
        return cost.bytes / limits.bandwidth + cost.flops / limits.peak

    def gain(self, batch: BatchShape, limits: Hardware, num_in_flight: int = 1) -> float:
        """Return how many times faster than one process with these limits a step is.

        The streams of a batch are divided over `num_in_flight` steps.
        """
        return self.step_s_on_one(batch, limits) / self._seconds(batch, num_in_flight)[0]

    def collective_share(self, batch: BatchShape, num_in_flight: int = 1) -> float:
        """Return the share of its time that rank 0 spends in collectives; arguments as `gain`."""
        whole_s, computing_s = self._seconds(batch, num_in_flight)
        return 1 - computing_s / whole_s

    def _seconds(self, batch: BatchShape, num_in_flight: int) -> tuple[float, float]:
        """Return how long a batch takes, and how much of that rank 0 computes."""
        count = min(num_in_flight, len(batch.starts))
        if count == 1:
            step = self.step(batch)
            return step.step_s, step.computing_s[0]
        starts, counts = batch.starts, batch.counts
        steps = [
            self.step(BatchShape(starts[i::count], counts[i::count], len(starts[i::count])))
            for i in range(count)
        ]
        return sum(step.each_s for step in steps), sum(step.computing_s[0] for step in steps)


def expect(engine: Engine) -> Divided:
    """Return the division of a running engine's model; its ranks' machines are taken as equal.

    Raises:
        BackendError: this machine's speed cannot be measured.
    """
    limits, ranks, cost = engine.limits.hardware(), engine.facts.ranks, engine.card.cost
    if limits is None:
        raise BackendError("This machine's speed is unknown.")
    on_host = Counter(rank.host for rank in ranks)
    return Divided(
        cost,
        shard(cost.program, engine.mesh),
        tuple([part_of_machine(limits, on_host[rank.host]) for rank in ranks]),
        _SPEEDS.get(engine.facts.link, _ANY_SPEED),
    )


def describe_gain(engine: Engine) -> str:
    """Return in a sentence what several ranks should gain over one process on this machine."""
    hosts = {rank.host for rank in engine.facts.ranks}
    where = f"on {len(hosts)} machines" if len(hosts) > 1 else "on this machine"
    link = _NAMES.get(engine.facts.link, engine.facts.link)
    ranks = f"{len(engine.facts.ranks)} ranks {where}, connected by {link}."
    limits = engine.limits.hardware()
    if limits is None:  # they could not be measured
        return ranks
    divided, num_steps = expect(engine), engine.facts.steps_ahead + 1
    figures = ", ".join(
        f"{name} {divided.gain(batch, limits, num_steps):.2f}x" for name, batch in _SHAPES.items()
    )
    return f"{ranks} Expected speed against one process here: {figures}."


def part_of_machine(limits: Hardware, count: int) -> Hardware:
    """Return the limits of each of `count` ranks that share a machine's cores."""
    return replace(
        limits,
        num_threads=max(1, limits.num_threads // count),
        bandwidth=limits.bandwidth / count,
        peak=limits.peak / count,
    )


@dataclass(slots=True)
class _Rank:
    """A rank on its way: its next operation, and its clock."""

    ops: Sequence[Op]
    cost: CostModel
    next: int = 0
    now_s: float = 0.0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    moving_s: float = 0.0
    bytes: int = 0

    def arrive(self, at_s: float, moving_s: float, num_bytes: int) -> None:
        """Go on after a collective for which all are there at `at_s`."""
        self.waiting_s += max(0.0, at_s - self.now_s)
        self.moving_s += moving_s
        self.now_s = max(self.now_s, at_s) + moving_s
        self.bytes += num_bytes
        self.next += 1


@dataclass
class _Walk:
    """Goes through the operations of all ranks, as far as they do not wait for each other."""

    divided: Divided
    batch: BatchShape
    _ranks: list[_Rank] = field(default_factory=list)
    _sent: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> Step:
        """Return the step's figures."""
        cost = self.divided.cost
        self._ranks = [_Rank(part.program.ops, cost.part(part)) for part in self.divided.parts]
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
            case _:
                cost, limits = rank.cost.operation(op, self.batch), self.divided.limits[number]
                seconds = cost.bytes / limits.bandwidth + cost.flops / limits.peak
                rank.computing_s += seconds
                rank.now_s += seconds
                rank.next += 1
        return True

    def _meet(self, op: AllGather | AllReduce) -> bool:
        """Bring a team over its collective, once all are there."""
        team = [self._ranks[member] for member in op.team]
        next_ops = [rank.ops[rank.next : rank.next + 1] for rank in team]
        if any(not ops or ops[0].output != op.output for ops in next_ops):
            return False
        all_there_s = max(rank.now_s for rank in team)
        for rank, ops in zip(team, next_ops, strict=True):
            num_bytes = rank.cost.operation(ops[0], self.batch).received_bytes
            rank.arrive(all_there_s, self.divided.link.seconds(num_bytes), num_bytes)
        return True
