"""Lowers a rank's part of a Program, and lays out the memory that the ranks of a host share.

Each rank lowers the parts of all ranks, so that all compute the same layout without communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.cpu.layout import SharedLayout, SharedPreparation, SharedSlot, tile_bytes
from twostroke.backends.cpu.lower import lower
from twostroke.backends.cpu.records import MAX_CHANNELS, MAX_TEAMS, OpKind
from twostroke.core.errors import BackendError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import DEFAULT_ACTIVATION_BITS
from twostroke.model.program import ops
from twostroke.model.program.sharding import ColumnParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.cpu.buffers import RowMemory
    from twostroke.backends.cpu.layout import Key, Team
    from twostroke.backends.cpu.lowered import CpuLowered
    from twostroke.core.options import Bits
    from twostroke.model.program import Op
    from twostroke.model.program.shard import RankProgram


def lower_rank(
    ranks: Sequence[RankProgram],
    rank: int,
    taps: Sequence[str] = (),
    *,
    activation_bits: Bits = DEFAULT_ACTIVATION_BITS,
) -> CpuLowered:
    """Lower one rank's part of a Program for the native executor; see `lower`.

    `ranks`: the parts of all ranks. `taps`: values that steps return on rank 0; all ranks must pass
    the same names.

    Raises:
        BackendError: a shape that the kernels cannot run, or too many ranks.
    """
    rank_part = ranks[rank]
    has_routers = _have_routers(ranks)
    own_taps = taps if rank == 0 else ()
    lowered = lower(
        rank_part.program, own_taps, activation_bits=activation_bits, has_routers=has_routers
    )
    layout = shared_layout(ranks, taps)
    for record, parts in zip(lowered.records, lowered.parts, strict=True):
        for number, (team, _) in enumerate(lowered.teams):
            if (
                team in layout.prepared_products
                and _weights_of(parts) in layout.prepared_products[team].products
            ):
                record.team = number
    rows = rank_part.row_part, rank_part.num_row_parts
    return replace(lowered, rank=rank, rows=rows, layout=layout)


def shared_bytes(ranks: Sequence[RankProgram], max_rows: int) -> int:
    """Return the bytes of shared memory that the ranks of a machine need for a step.

    `max_rows`: the largest number of rows of a step. The memory must be filled with zeros at first.
    Pages that are not touched take no physical memory.
    """
    return shared_layout(ranks).offsets(max_rows).end


def shared_layout(ranks: Sequence[RankProgram], taps: Sequence[str] = ()) -> SharedLayout:
    """Return the layout of the ranks' shared memory, which is the same on each rank.

    `taps` are values that only rank 0 returns. A tap between two products separates them into two
    records on rank 0, but not on the other ranks, so the ranks cannot quantize the inputs of these
    products together.

    Raises:
        BackendError: too many ranks.
    """
    has_routers = _have_routers(ranks)
    lowered_ranks = [lower(rank.program, has_routers=has_routers) for rank in ranks]
    tapped_ranks = (
        [lower(ranks[0].program, taps, has_routers=has_routers), *lowered_ranks[1:]]
        if taps
        else lowered_ranks
    )
    slots: list[SharedSlot] = []
    slot_of: dict[Key, int] = {}
    # By team and kind of slot: the first interval in which each slot is free.
    free_from: dict[tuple[Team, SharedSlot], dict[int, int]] = {}
    for memory in sorted(_joined(lowered_ranks), key=lambda memory: min(memory.uses)):
        slot = SharedSlot(memory.width, memory.num_rows)
        first_free = free_from.setdefault((memory.team, slot), {})
        first_use = min(memory.uses)
        reusable = (index for index, begin in first_free.items() if begin <= first_use)
        slot_index = next(reusable, len(slots))
        if slot_index == len(slots):
            slots.append(slot)
        first_free[slot_index] = max(memory.uses) + 1
        slot_of |= {(memory.team, gather.output): slot_index for gather in memory.gathers}
    teams = dict.fromkeys(team for lowered in lowered_ranks for team, _ in lowered.teams)
    channels = {
        channel.key(rank): channel.width
        for rank, lowered in enumerate(lowered_ranks)
        for channel in lowered.channels
    }
    if len(teams) > MAX_TEAMS or len(channels) > MAX_CHANNELS:
        ranks_text = counted_noun(len(ranks), "rank is", "ranks are")
        raise BackendError(f"{ranks_text} more than the cpu backend runs; ask for fewer.")
    return SharedLayout(
        slots=tuple(slots),
        slot_of=slot_of,
        barriers={team: number for number, team in enumerate(teams)},
        channels={channel: number for number, channel in enumerate(channels)},
        channel_widths=tuple(channels.values()),
        prepared_products=_shared_preparations(tapped_ranks),
        tile_bytes=tile_bytes(
            op for rank in ranks for op in rank.program.ops if isinstance(op, ops.SplitKvAttention)
        ),
    )


def _shared_preparations(lowered_ranks: Sequence[CpuLowered]) -> dict[Team, SharedPreparation]:
    """Return, by team, the products whose inputs the ranks of the team quantize together.

    All ranks of the team must compute a part of the product. Only teams that divide columns are
    included.
    """
    preparations: dict[Team, SharedPreparation] = {}
    for lowered in lowered_ranks:
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
        earlier = preparations.get(teams[0], SharedPreparation(frozenset(widths), 0))
        width = max(earlier.width, *widths.values(), 0)
        preparations[teams[0]] = SharedPreparation(earlier.products & frozenset(widths), width)
    return preparations


def _weights_of(parts: Sequence[Op]) -> tuple[str, ...]:
    """Return the names of the matrices that a native record multiplies."""
    return tuple(op.weight for op in parts if isinstance(op, ops.Linear))


def _joined(lowered_ranks: Sequence[CpuLowered]) -> list[RowMemory]:
    """Return the memories that ranks share, each with the reads and writes of all ranks.

    If any rank puts two gathered values into one memory, both values share a memory on all ranks.
    """
    memory_of: dict[Key, RowMemory] = {}
    for lowered in lowered_ranks:
        for memory in lowered.memories:
            if not memory.gathers:
                continue
            keys = [(memory.team, gather.output) for gather in memory.gathers]
            overlapping = {id(memory_of[key]): memory_of[key] for key in keys if key in memory_of}
            joined = memory.join(overlapping.values())
            for gather in joined.gathers:
                memory_of[joined.team, gather.output] = joined
    memories = list({id(memory): memory for memory in memory_of.values()}.values())
    for memory in memories:
        # Until the next barrier, other ranks may still read a gathered value.
        clash = memory.reads & memory.writes
        assert not clash, f"{memory.gathers[-1].output} is written while others read it"
    return memories


def _have_routers(ranks: Sequence[RankProgram]) -> bool:
    kinds = (ops.MixtureOfExperts, ops.ExpertTerms)
    return any(isinstance(op, kinds) for rank in ranks for op in rank.program.ops)
