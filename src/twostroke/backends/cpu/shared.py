"""Lowers a rank's part of a Program, and lays out the memory that the ranks of a host share.

Every rank lowers the parts of all, so that they find the same places by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.cpu.layout import SharedLayout, SharedSlot, Together, tile_bytes
from twostroke.backends.cpu.lower import lower
from twostroke.backends.cpu.records import MOST_CHANNELS, MOST_TEAMS, OpKind
from twostroke.core.errors import BackendError
from twostroke.core.options import DEFAULT_ACTIVATION_BITS
from twostroke.model.program import ops
from twostroke.model.program.sharding import ColumnParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.cpu.buffers import RowMemory
    from twostroke.backends.cpu.layout import Key, Team
    from twostroke.backends.cpu.lowered import CpuLowered
    from twostroke.core.activation_bits import Bits
    from twostroke.model.program import Op
    from twostroke.model.program.shard import RankProgram


def lower_rank(
    ranks: Sequence[RankProgram],
    rank: int,
    taps: Sequence[str] = (),
    *,
    activation_bits: Bits = DEFAULT_ACTIVATION_BITS,
) -> CpuLowered:
    """Lower the part of one rank; see `lower`. `ranks` are the parts of all.

    The values `taps` leave the step on rank 0; the other ranks must know of them.

    Raises:
        BackendError: a shape that the kernels cannot run, or more ranks than they can.
    """
    own = ranks[rank]
    has_routers = _have_routers(ranks)
    own_taps = taps if rank == 0 else ()
    lowered = lower(own.program, own_taps, activation_bits=activation_bits, has_routers=has_routers)
    layout = shared_layout(ranks, taps)
    for record, parts in zip(lowered.records, lowered.parts, strict=True):
        for number, (team, _) in enumerate(lowered.teams):
            if team in layout.together and _weights_of(parts) in layout.together[team].products:
                record.team = number
    rows = own.row_part, own.num_row_parts
    return replace(lowered, rank=rank, rows=rows, layout=layout)


def shared_bytes(ranks: Sequence[RankProgram], max_rows: int) -> int:
    """Return how much memory ranks of one host share, for steps of up to `max_rows` rows.

    It must be zero at first, and takes room only where it is touched.
    """
    return shared_layout(ranks).offsets(max_rows).end


def shared_layout(ranks: Sequence[RankProgram], taps: Sequence[str] = ()) -> SharedLayout:
    """Lay out what ranks share: the same on each of them.

    Values that rank 0 taps change nothing but which rows are prepared together: a product that is
    cut off from another one by a tap is not the same operation on all ranks.

    Raises:
        BackendError: too many ranks.
    """
    has_routers = _have_routers(ranks)
    every = [lower(rank.program, has_routers=has_routers) for rank in ranks]
    tapped = [lower(ranks[0].program, taps, has_routers=has_routers), *every[1:]] if taps else every
    slots: list[SharedSlot] = []
    slot_of: dict[Key, int] = {}
    free_from: dict[
        tuple[Team, SharedSlot], dict[int, int]
    ] = {}  # slots of a team: their first interval
    for memory in sorted(_joined(every), key=lambda memory: min(memory.uses)):
        slot = SharedSlot(memory.width, memory.num_rows)
        known = free_from.setdefault((memory.team, slot), {})
        place = next((p for p, begin in known.items() if begin <= min(memory.uses)), len(slots))
        if place == len(slots):
            slots.append(slot)
        known[place] = max(memory.uses) + 1
        slot_of |= {(memory.team, gather.output): place for gather in memory.gathers}
    teams = dict.fromkeys(team for lowered in every for team, _ in lowered.teams)
    channels = {
        channel.key(rank): channel.width
        for rank, lowered in enumerate(every)
        for channel in lowered.channels
    }
    if len(teams) > MOST_TEAMS or len(channels) > MOST_CHANNELS:
        raise BackendError(f"{len(ranks)} ranks are more than the cpu backend runs; ask for fewer.")
    return SharedLayout(
        tuple(slots),
        slot_of,
        {team: number for number, team in enumerate(teams)},
        {channel: number for number, channel in enumerate(channels)},
        tuple(channels.values()),
        _prepared_together(tapped),
        tile_bytes(
            op for rank in ranks for op in rank.program.ops if isinstance(op, ops.SplitKvAttention)
        ),
    )


def _prepared_together(every: Sequence[CpuLowered]) -> dict[Team, Together]:
    """Return the products that all ranks of a team which divides columns compute a part of."""
    found: dict[Team, Together] = {}
    for lowered in every:
        teams = [
            gather.team
            for memory in lowered.memories
            for gather in memory.gathers
            if isinstance(gather.parts, ColumnParts) and gather.root is None
        ]
        if not teams:
            continue
        widths = {
            _weights_of(parts): record.width
            for record, parts in zip(lowered.records, lowered.parts, strict=True)
            if record.kind in {OpKind.LINEAR, OpKind.GATED}
        }
        known = found.get(teams[0], Together(frozenset(widths), 0))
        width = max(known.width, *widths.values(), 0)
        found[teams[0]] = Together(known.products & frozenset(widths), width)
    return found


def _weights_of(parts: Sequence[Op]) -> tuple[str, ...]:
    """Return the matrices of an operation's products."""
    return tuple(op.weight for op in parts if isinstance(op, ops.Linear))


def _joined(every: Sequence[CpuLowered]) -> list[RowMemory]:
    """Return the shared memories of all ranks, each once, as all of them together use it.

    Where a rank lets a value take another's place, the two are one memory for all.
    """
    found: dict[Key, RowMemory] = {}
    for lowered in every:
        for memory in lowered.memories:
            if not memory.gathers:
                continue
            keys = [(memory.team, gather.output) for gather in memory.gathers]
            alike = {id(found[key]): found[key] for key in keys if key in found}
            joined = memory.join(alike.values())
            for gather in joined.gathers:
                found[joined.team, gather.output] = joined
    memories = list({id(memory): memory for memory in found.values()}.values())
    for memory in memories:
        # Others may still read what they gathered until the next barrier.
        clash = memory.reads & memory.writes
        assert not clash, f"{memory.gathers[-1].output} is written while others read it"
    return memories


def _have_routers(ranks: Sequence[RankProgram]) -> bool:
    kinds = (ops.MixtureOfExperts, ops.ExpertTerms)
    return any(isinstance(op, kinds) for rank in ranks for op in rank.program.ops)
