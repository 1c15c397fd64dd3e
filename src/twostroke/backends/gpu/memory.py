"""The memory of a step: plans the offsets of buffers, which reuse memory, and allocates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.gpu.graphs import buckets_up_to
from twostroke.backends.gpu.kernels import products_tiles
from twostroke.backends.gpu.kernels.common import Parts
from twostroke.backends.gpu.kernels.product import FEW_ROWS, num_parts
from twostroke.backends.gpu.lowered import BufferType, Products, touched_buffers
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Container

    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import BufferColumns, DeviceBuffer, GpuLowered

_LINE_BYTES = 256  # buffers start at multiples of it


class StepMemoryLayout(Frozen):
    """The byte offset of each buffer of a step in GPU memory, and the bytes of all together."""

    offsets: tuple[int, ...]
    num_bytes: int


def lay_out(
    gpu: Gpu, lowered: GpuLowered, in_parts: Container[int], max_rows: int
) -> StepMemoryLayout:
    """Assign GPU memory to a step's buffers, for `max_rows` rows.

    Buffers that are not used at the same time share memory. A buffer takes the smallest free region
    that is large enough, else a new one. `in_parts`: the buffers that hold partial sums of products
    even in steps with many rows (`products.in_parts`).
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, record in enumerate(lowered.records):
        for buffer in touched_buffers(record):
            first.setdefault(buffer, time)
            last[buffer] = time
    depths = {r.output: lowered.buffers[r.x].width for r in lowered.records if type(r) is Products}
    regions: list[tuple[int, int]] = []  # offset and bytes
    free: list[int] = []
    region_of: dict[int, int] = {}
    end = 0
    for time in range(len(lowered.records)):
        for buffer in (b for b in first if first[b] == time):
            size = _num_bytes(
                gpu,
                lowered.buffers[buffer],
                max_rows,
                depth=depths.get(buffer, 0),
                in_parts=buffer in in_parts,
            )
            fitting = [region for region in free if regions[region][1] >= size]
            if fitting:
                region_of[buffer] = min(fitting, key=lambda region: regions[region][1])
                free.remove(region_of[buffer])
            else:
                region_of[buffer] = len(regions)
                regions.append((end, size))
                end += size
        free += [region_of[b] for b in last if last[b] == time and not lowered.buffers[b].is_kept]
    offsets = [
        regions[region_of[b]][0] if b in region_of else 0 for b in range(len(lowered.buffers))
    ]
    return StepMemoryLayout(tuple(offsets), end)


def _num_bytes(gpu: Gpu, buffer: DeviceBuffer, max_rows: int, depth: int, *, in_parts: bool) -> int:
    width, size = buffer.width, gpu.element.itemsize
    if buffer.kind is BufferType.STREAM:
        num_bytes = 4 * max_rows * width
    elif buffer.kind is BufferType.LINES:
        few = max_rows if gpu.same_tokens else min(max_rows, FEW_ROWS)
        num_bytes = width * buffer.lines * max(4 * few, size * max_rows)
    elif buffer.kind is BufferType.ELEMENT:
        num_bytes = size * max_rows * width
    else:
        few = max_rows if gpu.same_tokens else min(max_rows, FEW_ROWS)
        many = buckets_up_to(min(max_rows, products_tiles.max_rows(gpu))) if in_parts else ()
        counts = {rows: _num_parts(gpu, rows, width, depth) for rows in (*range(1, few + 1), *many)}
        parts = max(rows * count for rows, count in counts.items() if rows <= few or count > 1)
        size = 4 if buffer.kind is BufferType.SCORES else size
        num_bytes = max(4 * parts * width, size * max_rows * width)
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def _num_parts(gpu: Gpu, num_rows: int, width: int, depth: int) -> int:
    """Return into how many partial sums a product of `num_rows` rows is written."""
    if num_rows <= FEW_ROWS or gpu.same_tokens:
        return num_parts(gpu, num_rows, width, depth)
    is_tiled = num_rows <= products_tiles.max_rows(gpu)
    return products_tiles.num_parts(gpu, num_rows, width, depth) if is_tiled else 1


class StepMemory:
    """The GPU memory of a step's buffers, and views of it as tensors.

    `in_parts`: the buffers that hold partial sums of products even in steps with many rows
    (`products.in_parts`).
    """

    def __init__(
        self, gpu: Gpu, lowered: GpuLowered, in_parts: Container[int], max_rows: int
    ) -> None:
        self._gpu, self._buffers, self._in_parts = gpu, lowered.buffers, in_parts
        self._layout = lay_out(gpu, lowered, in_parts, max_rows)
        self._depths = {
            r.output: lowered.buffers[r.x].width for r in lowered.records if type(r) is Products
        }
        self.memory = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=gpu.device)

    def tensor(self, buffer: int, num_rows: int) -> Tensor:
        """Return a step's buffer of type STREAM or ELEMENT as a tensor (rows, width)."""
        device_buffer = self._buffers[buffer]
        dtype = torch.float32 if device_buffer.kind is BufferType.STREAM else self._gpu.element
        return self._view(buffer, num_rows * device_buffer.width, dtype).view(
            num_rows, device_buffer.width
        )

    def all_columns(self, buffer: int, num_rows: int) -> Parts:
        """Return a whole buffer as the partial sums of a product in a step of `num_rows` rows."""
        device_buffer = self._buffers[buffer]
        width, stride = device_buffer.width, num_rows * device_buffer.width
        if device_buffer.kind in {BufferType.STREAM, BufferType.ELEMENT}:
            return Parts(self.tensor(buffer, num_rows), width, width)
        is_few = (
            num_rows <= FEW_ROWS or device_buffer.kind is BufferType.SCORES or self._gpu.same_tokens
        )
        dtype = torch.float32 if is_few else self._gpu.element
        if device_buffer.kind is BufferType.LINES:
            values = self._view(buffer, device_buffer.lines * stride, dtype)
            return Parts(values, width, device_buffer.lines * width, device_buffer.lines, width)
        count = 1
        if buffer in self._in_parts or num_rows <= FEW_ROWS or self._gpu.same_tokens:
            count = _num_parts(self._gpu, num_rows, width, self._depths[buffer])
        if count == 1 and not is_few:
            return Parts(self._view(buffer, stride, dtype), width, width)
        return Parts(self._view(buffer, count * stride, torch.float32), width, width, count, stride)

    def lines(self, buffer: int, num_rows: int) -> Parts:
        """Return a step's buffer of type LINES with each line as a separate row."""
        partial_sums = self.all_columns(buffer, num_rows)
        return Parts(partial_sums.values, partial_sums.width, partial_sums.width)

    def parts(self, columns: BufferColumns, num_rows: int) -> Parts:
        """Return columns of a buffer, with the partial sums of a step of `num_rows` rows."""
        return self.all_columns(columns.buffer, num_rows).columns(columns.first, columns.width)

    def _view(self, buffer: int, count: int, dtype: torch.dtype) -> Tensor:
        start = self._layout.offsets[buffer]
        return self.memory[start : start + count * dtype.itemsize].view(dtype)
