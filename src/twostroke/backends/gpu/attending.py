"""A step's attention: where rows are stored, and which pieces of contexts are computed how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from msgspec.structs import replace

from twostroke.backends.gpu.kernels import attention, latent, norm, rope
from twostroke.backends.gpu.kernels.attention import AttentionItems
from twostroke.backends.gpu.lowered import Attend, StoreKv, StoreLatents, ropes
from twostroke.backends.gpu.step_input import StepInput
from twostroke.backends.gpu.tiles import FEW_ROWS, MOST_PIECES, Tiling
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from twostroke.backends.gpu.cache import DevicePages
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import GpuLowered, QkvSource
    from twostroke.backends.gpu.memory import StepMemory
    from twostroke.backends.gpu.step_input import StepArrayOffsets
    from twostroke.backends.gpu.weights import DeviceWeights

_DECODED_ROWS: Final = 256  # rows for whose pieces of context there is room at once
_MOST_SUMS: Final = 1 << 27  # numbers that pieces take, unless fewer rows have no room then
_LEAST_ROWS: Final = 16


def attentions_of(lowered: GpuLowered) -> list[ops.Attention]:
    """Return the attention of a lowered Program's layers."""
    return [record.op for record in lowered.records if isinstance(record, Attend)]


def num_slots(attentions: Sequence[ops.Attention], max_rows: int) -> int:
    """Return for how many pieces of contexts there is room at once."""
    widest = max((op.width for op in attentions), default=1)
    rows = min(_DECODED_ROWS, max(_LEAST_ROWS, _MOST_SUMS // (widest * MOST_PIECES)))
    return min(max_rows, rows) * MOST_PIECES


def sum_floats(attentions: Sequence[ops.Attention], max_rows: int) -> int:
    """Return how many numbers the sums of pieces take."""
    widest = max((op.width for op in attentions), default=0)
    heads = max((op.num_heads for op in attentions), default=0)
    return num_slots(attentions, max_rows) * (widest + 2 * heads)


def turn_floats(lowered: GpuLowered, num_positions: int) -> int:
    """Return how many numbers tables of rotations take."""
    pairs = {rope.inverse_frequencies for r in lowered.records for rope in ropes(r)}
    return 2 * num_positions * sum(map(len, pairs))


def tiling_of(gpu: Gpu, op: ops.Attention) -> Tiling:
    """Return how an operation's rows and contexts are divided."""
    group = op.group_size
    few, many = (
        attention.rows_of(group, _block(gpu, op, is_few=is_few)) for is_few in (True, False)
    )
    return Tiling(op.window, few, many, same_tokens=gpu.same_tokens)


def _block(gpu: Gpu, op: ops.Attention, *, is_few: bool) -> int:
    """Return how many pairs of row and head tiles have, of slices of few rows or of many."""
    if isinstance(op, ops.LatentAttention):
        return latent.block_of(gpu, op.num_heads, is_few=is_few)
    if gpu.same_tokens:
        return attention.same_block(op.group_size)
    if is_few:
        return attention.small_block(op.group_size)
    return attention.large_block(op.group_size, op.head_dim)


class Attending:
    """The memory and the launches of attention, of steps of up to `max_rows` rows."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a plan has
        self,
        gpu: Gpu,
        lowered: GpuLowered,
        weights: DeviceWeights,
        cache: DevicePages,
        tables: Tensor,
        memory: StepMemory,
        max_rows: int,
        piece: int | None,
    ) -> None:
        self._gpu, self._weights, self._memory = gpu, weights, memory
        self._cache, self._tables = cache, tables
        attentions = attentions_of(lowered)
        given = {} if piece is None else {"piece": piece}
        self._tilings: list[Tiling] = []
        self._tiling_of: dict[str, int] = {}
        for op in attentions:
            tiling = replace(tiling_of(gpu, op), **given)
            if tiling not in self._tilings:
                self._tilings.append(tiling)
            self._tiling_of[op.output] = self._tilings.index(tiling)
        slots = num_slots(attentions, max_rows)
        self.input = StepInput(gpu, self._tilings, max_rows, slots)
        widest = max((op.width for op in attentions), default=0)
        floats = {"dtype": torch.float32, "device": gpu.device}
        sums = sum_floats(attentions, max_rows)
        self._sums = torch.zeros(slots * widest, **floats)
        self._tops = torch.zeros(sums - slots * widest, **floats)
        self._turns: dict[tuple[object, ...], rope.Rotation] = {}
        most = tables.shape[2] * cache.page_size
        for record in lowered.records:
            for turn in ropes(record):
                self._turn_of(turn, most)

    @property
    def num_bytes(self) -> int:
        """Bytes of tables, of sums and of the step's input."""
        own = self._sums, self._tops, self._tables, self.input.device
        return sum(t.nbytes for t in (*own, *(turn.table for turn in self._turns.values())))

    def launch(self, record: StoreKv | StoreLatents | Attend, places: StepArrayOffsets) -> None:
        """Launch what a record says, for a bucket of rows."""
        match record:
            case StoreKv():
                self._store(record, places)
            case StoreLatents():
                self._store_latents(record, places)
            case Attend():
                self._attend(record, places.num_rows)

    def _store(self, record: StoreKv, places: StepArrayOffsets) -> None:
        sources = tuple([self._source(source, places.num_rows) for source in record.sources])
        found = [None if s.rope is None else self._turn_of(s.rope) for s in record.sources[:2]]
        turns = found[0], found[-1]
        output = self._memory.tensor(record.output, places.num_rows)
        given = self._where(places), sources, turns, self._heads(record.op)
        balance = self._weights.balances.get(record.op.layer)
        frame, memory = self.input.device, self._cache.memory
        rope.launch(self._gpu, frame, places.num_rows, *given, memory, output, balance)

    def _store_latents(self, record: StoreLatents, places: StepArrayOffsets) -> None:
        rows, queries, keys = places.num_rows, record.queries, record.keys
        parts = self._memory.parts
        assert keys.rope is not None
        assert keys.rest.norm is not None
        sources = latent.Sources(
            parts(queries.place, rows),
            queries.op.first,
            queries.op.a_head,
            parts(queries.rest.place, rows),
            parts(keys.place, rows),
            parts(keys.rest.place, rows),
            self._norm(keys.rest.norm),
        )
        output = self._memory.tensor(record.output, rows)
        given = self._where(places), sources, self._turn_of(keys.rope), self._heads(record.op)
        balance = self._weights.balances.get(record.op.layer)
        frame, memory = self.input.device, self._cache.memory
        latent.store(self._gpu, frame, rows, *given, memory, output, balance)

    def _attend(self, record: Attend, rows: int) -> None:
        """Compute attention over the pages, in as many passes as the step's input has."""
        op, gpu = record.op, self._gpu
        q, output = (self._memory.tensor(buffer, rows) for buffer in (record.q, record.output))
        number = self._tiling_of[op.output]
        few, many, merges = self.input.items_at(number)
        heads = self._heads(op)
        given = q, self._cache.memory, output, heads
        kernel = latent if heads.rotated else attention
        for header in self.input.headers[number]:
            work = AttentionItems(header, self.input.device, self._tables, self._sums, self._tops)
            kernel.launch(gpu, work, few, _block(gpu, op, is_few=True), *given)
            is_first = header is self.input.headers[number][0]
            if rows > FEW_ROWS and not gpu.same_tokens and is_first:
                kernel.launch(gpu, work, many, _block(gpu, op, is_few=False), *given)
            attention.merge(gpu, work, merges, output, heads)

    def _where(self, places: StepArrayOffsets) -> rope.SlotMapping:
        rows, view = places.num_rows, self.input.view
        return rope.SlotMapping(
            view(places.positions, rows),
            view(places.tables, rows),
            view(places.first_extra, rows + 1),
            self.input.device,
            self._tables,
        )

    def _source(self, source: QkvSource, rows: int) -> rope.HeadSource:
        place = source.place
        bias = None if place.bias is None else self._weights.vector(place.bias)
        found = None if source.norm is None else self._norm(source.norm)
        return rope.HeadSource(self._memory.parts(place, rows), bias, found)

    def _norm(self, op: ops.RMSNorm) -> norm.Norm:
        return norm.Norm(self._weights.norm_weight(op), op.epsilon)

    def _heads(self, op: ops.Attention) -> attention.HeadLayout:
        _, num_groups, width = self._tables.shape
        return self._cache.heads(op, width, num_groups)

    def _turn_of(self, op: ops.Rope, num_positions: int = 0) -> rope.Rotation:
        key = op.inverse_frequencies, op.magnitude
        if key not in self._turns:
            angles = np.arange(num_positions)[:, None] * np.array(op.inverse_frequencies)
            table = np.stack([np.cos(angles), np.sin(angles)], axis=1) * op.magnitude
            values = torch.from_numpy(table.astype(np.float32)).to(self._gpu.device)
            self._turns[key] = rope.Rotation(values, len(op.inverse_frequencies), op.interleaved)
        found = self._turns[key]
        return rope.Rotation(found.table, found.num_pairs, op.interleaved)
