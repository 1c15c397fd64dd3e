"""The attention of a step: stores keys and values, and launches the kernels of all tiles."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from msgspec.structs import replace

from twostroke.backends.gpu.kernels import attention, latent, norm, rope
from twostroke.backends.gpu.kernels.attention import AttentionItems
from twostroke.backends.gpu.lowered import Attend, StoreKv, StoreLatents, ropes
from twostroke.backends.gpu.step_input import StepInput
from twostroke.backends.gpu.tiles import FEW_ROWS, MAX_PIECES, Tiling
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

_DECODED_ROWS: Final = 256  # rows whose pieces of contexts have slots at the same time
_MAX_SUMS: Final = 1 << 27  # numbers in the slots of pieces, but at least for `_MIN_ROWS` rows
_MIN_ROWS: Final = 16


def attentions_of(lowered: GpuLowered) -> list[ops.Attention]:
    """Return the attention operations of a lowered Program."""
    return [record.op for record in lowered.records if isinstance(record, Attend)]


def num_slots(attentions: Sequence[ops.Attention], max_rows: int) -> int:
    """Return the number of slots for partial sums of attention over pieces of contexts."""
    widest = max((op.width for op in attentions), default=1)
    rows = min(_DECODED_ROWS, max(_MIN_ROWS, _MAX_SUMS // (widest * MAX_PIECES)))
    return min(max_rows, rows) * MAX_PIECES


def sum_floats(attentions: Sequence[ops.Attention], max_rows: int) -> int:
    """Return how many float32 numbers the partial sums of attention take."""
    widest = max((op.width for op in attentions), default=0)
    heads = max((op.num_heads for op in attentions), default=0)
    return num_slots(attentions, max_rows) * (widest + 2 * heads)


def rotation_floats(lowered: GpuLowered, num_positions: int) -> int:
    """Return how many float32 numbers the model's tables of cosines and sines for RoPE take."""
    tables = {_rotation_key(rope) for record in lowered.records for rope in ropes(record)}
    return 2 * num_positions * sum(len(frequencies) for frequencies, *_ in tables)


def _rotation_key(op: ops.Rope) -> tuple[tuple[float, ...], float, float, int, int]:
    """Return a key that is equal for rotations with the same table; it begins with the angles."""
    if isinstance(op, ops.QueryRope):
        temperature = op.temperature_scale, op.temperature_length, op.temperature_offset
        return op.inverse_frequencies, op.magnitude, *temperature
    return op.inverse_frequencies, op.magnitude, 0.0, 1, 0


def tiling_of(gpu: Gpu, op: ops.Attention) -> Tiling:
    """Return how the rows and contexts of an attention layer are divided into tiles."""
    group = op.group_size
    few, many = (
        attention.rows_of(group, _block(gpu, op, is_few=is_few)) for is_few in (True, False)
    )
    return Tiling(op.window, few, many, same_tokens=gpu.same_tokens)


def _block(gpu: Gpu, op: ops.Attention, *, is_few: bool) -> int:
    """Return the number of (row, head) pairs of an attention tile.

    `is_few`: for slices of few rows, as in decode.
    """
    if isinstance(op, ops.LatentAttention):
        return latent.block_of(gpu, op.num_heads, is_few=is_few)
    if gpu.same_tokens:
        return attention.same_block(op.group_size)
    if is_few:
        return attention.small_block(op.group_size)
    return attention.large_block(op.group_size, op.head_dim)


class StepAttention:
    """The GPU memory and kernel launches of a step's attention, for up to `max_rows` rows."""

    def __init__(  # noqa: PLR0913, PLR0917 - all parts of a plan
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
        options = {} if piece is None else {"piece": piece}
        self._tilings: list[Tiling] = []
        self._tiling_of: dict[str, int] = {}
        for op in attentions:
            tiling = replace(tiling_of(gpu, op), **options)
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
        self._rotations: dict[tuple[object, ...], rope.Rotation] = {}
        num_positions = tables.shape[2] * cache.page_size
        for record in lowered.records:
            for turn in ropes(record):
                self._rotation_of(turn, num_positions)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of page tables, RoPE tables, partial sums and the step's input."""
        tensors = self._sums, self._tops, self._tables, self.input.device
        return sum(t.nbytes for t in (*tensors, *(turn.table for turn in self._rotations.values())))

    def launch(self, record: StoreKv | StoreLatents | Attend, offsets: StepArrayOffsets) -> None:
        """Launch the kernels of an attention record; `offsets`: of the step's input arrays."""
        match record:
            case StoreKv():
                self._store(record, offsets)
            case StoreLatents():
                self._store_latents(record, offsets)
            case Attend():
                self._attend(record, offsets.num_rows)

    def _store(self, record: StoreKv, offsets: StepArrayOffsets) -> None:
        rotations = [
            None if source.rope is None else self._rotation_of(source.rope)
            for source in record.sources[:2]
        ]
        rope.launch(
            self._gpu,
            self.input.device,
            offsets.num_rows,
            slots=self._slot_mapping(offsets),
            sources=tuple([self._source(source, offsets.num_rows) for source in record.sources]),
            rotations=(rotations[0], rotations[-1]),
            heads=self._heads(record.op),
            cache=self._cache.memory,
            output=self._memory.tensor(record.output, offsets.num_rows),
            balance=self._weights.balances.get(record.op.layer),
        )

    def _store_latents(self, record: StoreLatents, offsets: StepArrayOffsets) -> None:
        rows, queries, keys = offsets.num_rows, record.queries, record.keys
        parts = self._memory.parts
        assert keys.rope is not None
        assert keys.rest.norm is not None
        sources = latent.Sources(
            queries=parts(queries.columns, rows),
            first=queries.op.first,
            query_head=queries.op.a_head,
            query_latents=parts(queries.rest.columns, rows),
            keys=parts(keys.columns, rows),
            latents=parts(keys.rest.columns, rows),
            norm=self._norm(keys.rest.norm),
        )
        latent.store(
            self._gpu,
            self.input.device,
            rows,
            slots=self._slot_mapping(offsets),
            sources=sources,
            rotation=self._rotation_of(keys.rope),
            heads=self._heads(record.op),
            cache=self._cache.memory,
            output=self._memory.tensor(record.output, rows),
            balance=self._weights.balances.get(record.op.layer),
        )

    def _attend(self, record: Attend, rows: int) -> None:
        """Launch attention over the KV pages, once for each header of the step's input.

        A step has several headers only if the partial sums do not fit into memory at once.
        """
        op, gpu = record.op, self._gpu
        q, output = (self._memory.tensor(buffer, rows) for buffer in (record.q, record.output))
        number = self._tiling_of[op.output]
        few, many, merges = self.input.items_at(number)
        heads = self._heads(op)
        launch = partial(
            latent.launch if heads.rotated else attention.launch,
            gpu,
            q=q,
            cache=self._cache.memory,
            output=output,
            heads=heads,
        )
        for header in self.input.headers[number]:
            work = AttentionItems(header, self.input.device, self._tables, self._sums, self._tops)
            launch(work=work, header_index=few, block_m=_block(gpu, op, is_few=True))
            is_first = header is self.input.headers[number][0]
            if rows > FEW_ROWS and not gpu.same_tokens and is_first:
                launch(work=work, header_index=many, block_m=_block(gpu, op, is_few=False))
            attention.merge(gpu, work, merges, output, heads)

    def _slot_mapping(self, offsets: StepArrayOffsets) -> rope.SlotMapping:
        rows, view = offsets.num_rows, self.input.view
        return rope.SlotMapping(
            view(offsets.positions, rows),
            view(offsets.tables, rows),
            view(offsets.first_extra, rows + 1),
            self.input.device,
            self._tables,
        )

    def _source(self, source: QkvSource, rows: int) -> rope.HeadSource:
        columns = source.columns
        bias = None if columns.bias is None else self._weights.vector(columns.bias)
        source_norm = None if source.norm is None else self._norm(source.norm)
        return rope.HeadSource(self._memory.parts(columns, rows), bias, source_norm)

    def _norm(self, op: ops.RMSNorm) -> norm.Norm:
        return norm.Norm(self._weights.norm_weight(op), op.epsilon)

    def _heads(self, op: ops.Attention) -> attention.HeadLayout:
        _, num_groups, width = self._tables.shape
        return self._cache.heads(op, width, num_groups)

    def _rotation_of(self, op: ops.Rope, num_positions: int = 0) -> rope.Rotation:
        key = _rotation_key(op)
        if key not in self._rotations:
            positions = np.arange(num_positions)[:, None]
            angles = positions * np.array(op.inverse_frequencies)
            table = np.stack([np.cos(angles), np.sin(angles)], axis=1) * op.magnitude
            if isinstance(op, ops.QueryRope):
                periods = (positions[:, None] + op.temperature_offset) // op.temperature_length
                table *= 1 + op.temperature_scale * np.log1p(periods)
            values = torch.from_numpy(table.astype(np.float32)).to(self._gpu.device)
            self._rotations[key] = rope.Rotation(
                values, len(op.inverse_frequencies), op.interleaved
            )
        cached = self._rotations[key]
        return rope.Rotation(cached.table, cached.num_pairs, op.interleaved)
