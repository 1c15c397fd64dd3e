"""`NativePlan`: a lowered Program and its KV pages, in the native executor."""

from __future__ import annotations

import ctypes
from contextlib import closing
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from twostroke.backends.cpu.records import (
    BufferRecord,
    CacheFormatCode,
    ChannelRecord,
    ExpertRecord,
    LayerRecord,
    LinkRecord,
    MemoryRecord,
    OpRecord,
    PlanRecord,
    RopeRecord,
    StepRecord,
    TeamRecord,
    WeightRecord,
)
from twostroke.backends.interface import MappedPages
from twostroke.core.errors import BackendError, MemoryLimitError, RanksLostError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.request import NO_STATE
from twostroke.model.program.ops import QueryRope, SplitKvAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.cpu.lowered import CpuLowered
    from twostroke.backends.cpu.weights import PackedWeights
    from twostroke.model.program import Program, ops

    Array = NDArray[np.float32]

_EVALUATED_ROWS = 512  # rows of a step in which a sequence is evaluated
# Results of `ts_step`.
_INVALID_ID = 2  # a token, page or slot of a recurrent state does not exist
_RANK_LOST = 3


class PlanPages(Frozen):
    """The KV pages of a native plan: their number, the tokens of each, and the KV format.

    `balances`: by layer, how keys are balanced before they are quantized (`keys.balances`).
    `num_states`: slots for the recurrent states of requests.
    """

    num_pages: int
    page_size: int
    kv_format: str
    balances: Mapping[int, Array]
    num_states: int = 0


class PlanLink(Frozen):
    """A rank's link to the other ranks, and the largest number of rows of a step."""

    record: LinkRecord
    max_rows: int


class MeasuredOpTime(Frozen):
    """Seconds that an operation group took, and mean seconds that its threads waited."""

    elapsed_s: float
    waiting_s: float


class NativePlan:
    """A lowered Program with its own KV pages in the native executor, which runs its steps."""

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: int,
        program: Program,
        lowered: CpuLowered,
        weights: PackedWeights,
        pages: PlanPages,
        *,
        link: PlanLink | None = None,
    ) -> None:
        """Create the native plan and its KV pages; `pool`, `weights` and `link` must outlive it.

        `link`: only if this process is one of several ranks.

        Raises:
            MemoryLimitError: there is no room for the pages.
        """
        self._library, self._pool = library, pool
        self._program, self._weights, self._pages = program, weights, pages
        self._num_ops = len(lowered.records)
        self._link = link
        if link is not None and lowered.layout is not None and link.record.shared:
            num_bytes = lowered.layout.offsets(link.max_rows).end
            if num_bytes > link.record.shared_bytes:
                message = (
                    f"Ranks share {counted_noun(link.record.shared_bytes, 'byte')}, and need "
                    f"{num_bytes}"
                )
                raise MemoryLimitError(f"{message} for the values that are wanted; ask for fewer.")
        record = PlanRecord(
            num_groups=len(program.cache_groups),
            link=None if link is None else ctypes.pointer(link.record),
            cache_format=CacheFormatCode[pages.kv_format.upper()],
            num_pages=pages.num_pages,
            page_size=pages.page_size,
            num_states=pages.num_states,
            max_rows=0 if link is None else link.max_rows,
            row_part=lowered.rows[0],
            num_row_parts=lowered.rows[1],
        )
        vectors = [weights.vectors[vector].ctypes.data for vector in lowered.vectors]
        arrays: tuple[tuple[str, Any, Sequence[Any]], ...] = (
            ("ops", OpRecord, lowered.records),
            ("weights", WeightRecord, [weights.records[name] for name in lowered.matrices]),
            ("vectors", c_void_p, vectors),
            ("ropes", RopeRecord, [_rope_record(rope) for rope in lowered.ropes]),
            ("layers", LayerRecord, _layer_records(program, pages.balances)),
            ("experts", ExpertRecord, lowered.experts),
            ("state_layers", c_int64, _state_layers(program)),
            ("buffers", BufferRecord, [(b.memory, b.first_column) for b in lowered.buffers]),
            *_shared_arrays(lowered, 0 if link is None else link.max_rows),
        )
        for name, kind, items in arrays:
            setattr(record, name, (kind * len(items))(*items))
            setattr(record, f"num_{name}", len(items))
        self._plan: int | None = library.ts_plan_create(pool, byref(record))
        if self._plan is None:
            message = (
                f"No memory for {counted_noun(pages.num_pages, 'key-value page')} of "
                f"{counted_noun(pages.page_size, 'token')}"
            )
            raise MemoryLimitError(f"{message}; lower --context-length or --kv-memory.")

    def run(self, step: StepRecord) -> None:
        """Compute one step; its results are written to the arrays of `step`.

        Raises:
            MemoryLimitError: no memory for the rows of the step.
            BackendError: a token, page or slot does not exist; nothing was computed.
            RanksLostError: another rank ended, or the link to it broke.
        """
        outcome = self._library.ts_step(self._open_plan(), byref(step))
        if outcome == _RANK_LOST:
            raise RanksLostError("Another rank of the model has ended, or does not answer.")
        if outcome == _INVALID_ID:
            raise BackendError(
                "The step names a token, page or recurrent state that the model does not have."
            )
        if outcome:
            message = (
                f"No memory for a step of {counted_noun(step.num_rows, 'token')}; lower the token "
                "budget."
            )
            raise MemoryLimitError(message)

    def evaluate(
        self,
        lowered: CpuLowered,
        tokens: Sequence[int],
        logits: Array | None,
        taps: Sequence[Array],
        *,
        generated: bool,
        has_logits: bool | None = None,
    ) -> None:
        """Compute a token sequence on separate pages, to evaluate the model.

        `lowered` is a lowering of the same Program. The rows are computed as prompt rows, or as
        generated rows if `generated`. Writes `logits` (len(tokens), vocab_size), and the values of
        `lowered`'s taps to `taps`, (len(tokens), width) each. All ranks must call it. On ranks
        without `logits`, `has_logits` tells whether rank 0 needs logits.
        """
        has_logits = logits is not None if has_logits is None else has_logits
        self._open_plan()
        num_groups = len(self._program.cache_groups)
        pages_per_group = -(-len(tokens) // self._pages.page_size)
        table = np.arange(num_groups * pages_per_group, dtype=np.int32)
        num_states = 1 if self._program.state_layers else 0
        pages = replace(self._pages, num_pages=len(table), num_states=num_states)
        plan = NativePlan(
            self._library,
            self._pool,
            program=self._program,
            lowered=lowered,
            weights=self._weights,
            pages=pages,
            link=self._link,
        )
        with closing(plan):
            max_rows = min(_EVALUATED_ROWS, self._link.max_rows) if self._link else _EVALUATED_ROWS
            for start in range(0, len(tokens), max_rows):
                chunk = np.array(tokens[start : start + max_rows], np.int32)
                count = len(chunk)
                rows = np.arange(count, dtype=np.int32)
                slices = np.array([0, count, start, 0], np.int32)
                states = np.array([0 if start else NO_STATE, 0], np.int32)
                plan.run(
                    StepRecord(
                        tokens=chunk.ctypes.data,
                        slices=slices.ctypes.data,
                        page_tables=table.ctypes.data,
                        sampled_rows=rows.ctypes.data,
                        logits=None if logits is None else logits[start:].ctypes.data,
                        taps=(c_void_p * len(taps))(*(tap[start:].ctypes.data for tap in taps)),
                        states=states.ctypes.data,
                        table_stride=pages_per_group,
                        num_rows=count,
                        num_generated=count if generated else 0,
                        num_slices=1,
                        num_sampled=count if has_logits else 0,
                    )
                )

    def times(self) -> list[MeasuredOpTime]:
        """Return the time of each operation record since the last call, summed over steps."""
        pairs = (c_double * (2 * self._num_ops))()
        self._library.ts_plan_times(self._open_plan(), pairs)
        return [MeasuredOpTime(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def copy_page(self, source: int, target: int) -> None:
        """Copy the bytes of KV page `source` to page `target`."""
        assert 0 <= source < self._pages.num_pages
        assert 0 <= target < self._pages.num_pages
        self._library.ts_plan_copy_page(self._open_plan(), source, target)

    def page_memory(self) -> MappedPages:
        """Return access to the bytes of all KV pages, which must not be used after `close`."""
        return self._memory(self._library.ts_plan_pages, self._pages.num_pages)

    def state_memory(self) -> MappedPages | None:
        """Return access to the bytes of all slots for recurrent states; None without such states.

        It must not be used after `close`.
        """
        if not self._program.state_layers:
            return None
        return self._memory(self._library.ts_plan_states, self._pages.num_states)

    def _memory(self, locate: Callable[[int, Any], int | None], count: int) -> MappedPages:
        """Return access to `count` pages or slots in native memory.

        `locate` returns their address, and writes the bytes of each.
        """
        num_bytes = c_int64()
        address = locate(self._open_plan(), byref(num_bytes))
        memory = memoryview((ctypes.c_ubyte * num_bytes.value).from_address(address or 0))
        return MappedPages(memory.cast("B"), count)

    def close(self) -> None:
        """Free the plan's KV pages and buffers."""
        if self._plan is not None:
            self._library.ts_plan_destroy(self._plan)
            self._plan = None

    def _open_plan(self) -> int:
        if self._plan is None:
            raise BackendError("The cpu backend was closed.")
        return self._plan


def _layer_records(program: Program, balances: Mapping[int, Array]) -> list[LayerRecord]:
    group_of = {
        layer: number for number, group in enumerate(program.cache_groups) for layer in group.layers
    }
    rank_index_of = {
        op.layer: op.team_index for op in program.ops if isinstance(op, SplitKvAttention)
    }
    return [
        LayerRecord(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            group=group_of[index],
            num_places=layer.num_kv_ranks,
            place=rank_index_of.get(index, 0),
            balance=balances[index].ctypes.data if index in balances else None,
            values_are_keys=int(layer.values_are_keys),
        )
        for index, layer in enumerate(program.cache_layers)
    ]


def _state_layers(program: Program) -> list[int]:
    """Return how many numbers each recurrent state has, by state layer; 0 on other ranks."""
    layers = program.state_layers
    values = {number: layer.num_values for number, layer in layers.items()}
    return [values.get(number, 0) for number in range(max(layers, default=-1) + 1)]


def _shared_arrays(
    lowered: CpuLowered, max_rows: int
) -> tuple[tuple[str, Any, Sequence[Any]], ...]:
    """Return the arrays of a `PlanRecord` for memories, teams and channels that ranks share."""
    layout = lowered.layout
    memories = [(-1, memory.width, memory.num_rows) for memory in lowered.memories]
    if layout is None:
        return (("memories", MemoryRecord, memories),)
    offsets = layout.offsets(max_rows)
    for i, memory in enumerate(lowered.memories):
        if memory.gathers:
            slot = layout.slot_of[memory.team, memory.gathers[0].output]
            memories[i] = (offsets.slots[slot], memory.width, memory.num_rows)
    team_ranks: list[int] = []
    teams: list[tuple[int, ...]] = []
    for team, rank_index in lowered.teams:
        offset_pairs = [
            offsets_by_team.get(team, (0, 0))
            for offsets_by_team in (offsets.prepared, offsets.tiles)
        ]
        sizes = [number for pair in offset_pairs for number in pair]
        teams.append((len(team_ranks), len(team), rank_index, layout.barriers[team], *sizes))
        team_ranks += team
    numbers = [layout.channels[channel.key(lowered.rank)] for channel in lowered.channels]
    channels = [
        (offsets.channels[number], channel.peer, number)
        for number, channel in zip(numbers, lowered.channels, strict=True)
    ]
    return (
        ("memories", MemoryRecord, memories),
        ("teams", TeamRecord, teams),
        ("team_ranks", c_int32, team_ranks),
        ("cuts", c_int32, lowered.cuts),
        ("channels", ChannelRecord, channels),
    )


def _rope_record(rope: ops.Rope) -> RopeRecord:
    num_pairs = len(rope.inverse_frequencies)
    frequencies = (c_double * num_pairs)(*rope.inverse_frequencies)
    record = RopeRecord(
        inverse_frequencies=frequencies,
        magnitude=rope.magnitude,
        temperature_length=1,
        num_pairs=num_pairs,
        is_interleaved=int(rope.interleaved),
        head_dim=rope.head_dim,
    )
    if isinstance(rope, QueryRope):
        record.temperature_scale = rope.temperature_scale
        record.temperature_length = rope.temperature_length
        record.temperature_offset = rope.temperature_offset
    return record
