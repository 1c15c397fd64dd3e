"""Memory of a step, planned before there is any: one piece in which buffers take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.gpu.graphs import buckets_up_to
from twostroke.backends.gpu.kernels import products_tiles
from twostroke.backends.gpu.kernels.common import Parts
from twostroke.backends.gpu.kernels.product import FEW_ROWS, num_parts
from twostroke.backends.gpu.lowered import BufferType, Products, touched
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Container

    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import BufferColumns, DeviceBuffer, GpuLowered

_LINE = 256  # bytes; buffers start on one


class StepMemoryLayout(Frozen):
    """Where each buffer lies, in bytes, and how many bytes a step needs in all."""

    offsets: tuple[int, ...]
    num_bytes: int


def lay_out(
    gpu: Gpu, lowered: GpuLowered, in_parts: Container[int], max_rows: int
) -> StepMemoryLayout:
    """Give buffers places for `max_rows` rows; those that are never needed together may share one.

    Each takes the smallest free place that is large enough, else a new one. Buffers `in_parts` are
    those of `products.in_parts`.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, record in enumerate(lowered.records):
        for buffer in touched(record):
            first.setdefault(buffer, time)
            last[buffer] = time
    depths = {r.output: lowered.buffers[r.x].width for r in lowered.records if type(r) is Products}
    places: list[tuple[int, int]] = []  # offset and bytes
    free: list[int] = []
    place_of: dict[int, int] = {}
    end = 0
    for time in range(len(lowered.records)):
        for buffer in (b for b in first if first[b] == time):
            given = lowered.buffers[buffer], max_rows, depths.get(buffer, 0)
            size = _num_bytes(gpu, *given, in_parts=buffer in in_parts)
            fitting = [place for place in free if places[place][1] >= size]
            if fitting:
                place_of[buffer] = min(fitting, key=lambda place: places[place][1])
                free.remove(place_of[buffer])
            else:
                place_of[buffer] = len(places)
                places.append((end, size))
                end += size
        free += [place_of[b] for b in last if last[b] == time and not lowered.buffers[b].kept]
    offsets = [places[place_of[b]][0] if b in place_of else 0 for b in range(len(lowered.buffers))]
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
        many = buckets_up_to(min(max_rows, products_tiles.most_rows(gpu))) if in_parts else ()
        counts = {rows: _num_parts(gpu, rows, width, depth) for rows in (*range(1, few + 1), *many)}
        parts = max(rows * count for rows, count in counts.items() if rows <= few or count > 1)
        size = 4 if buffer.kind is BufferType.SCORES else size
        num_bytes = max(4 * parts * width, size * max_rows * width)
    return -(-num_bytes // _LINE) * _LINE


def _num_parts(gpu: Gpu, num_rows: int, width: int, depth: int) -> int:
    """Return the number of parts of products with `num_rows` rows, if they are written in parts."""
    if num_rows <= FEW_ROWS or gpu.same_tokens:
        return num_parts(gpu, num_rows, width, depth)
    is_tiled = num_rows <= products_tiles.most_rows(gpu)
    return products_tiles.num_parts(gpu, num_rows, width, depth) if is_tiled else 1


class StepMemory:
    """The buffers of a step as tensors; some are `in_parts`, as `lay_out` says."""

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
        """Return a buffer that is no product's, (rows, width)."""
        found = self._buffers[buffer]
        dtype = torch.float32 if found.kind is BufferType.STREAM else self._gpu.element
        return self._view(buffer, num_rows * found.width, dtype).view(num_rows, found.width)

    def whole(self, buffer: int, num_rows: int) -> Parts:
        """Return a buffer in as many parts as a step of so many rows has."""
        found = self._buffers[buffer]
        width, stride = found.width, num_rows * found.width
        if found.kind in {BufferType.STREAM, BufferType.ELEMENT}:
            return Parts(self.tensor(buffer, num_rows), width, width)
        is_few = num_rows <= FEW_ROWS or found.kind is BufferType.SCORES or self._gpu.same_tokens
        dtype = torch.float32 if is_few else self._gpu.element
        if found.kind is BufferType.LINES:
            values = self._view(buffer, found.lines * stride, dtype)
            return Parts(values, width, found.lines * width, found.lines, width)
        count = 1
        if buffer in self._in_parts or num_rows <= FEW_ROWS or self._gpu.same_tokens:
            count = _num_parts(self._gpu, num_rows, width, self._depths[buffer])
        if count == 1 and not is_few:
            return Parts(self._view(buffer, stride, dtype), width, width)
        return Parts(self._view(buffer, count * stride, torch.float32), width, width, count, stride)

    def lines(self, buffer: int, num_rows: int) -> Parts:
        """Return each line of a buffer's rows as a row of its own."""
        whole = self.whole(buffer, num_rows)
        return Parts(whole.values, whole.width, whole.width)

    def parts(self, place: BufferColumns, num_rows: int) -> Parts:
        """Return the columns at a place."""
        return self.whole(place.buffer, num_rows).columns(place.first, place.width)

    def _view(self, buffer: int, count: int, dtype: torch.dtype) -> Tensor:
        start = self._layout.offsets[buffer]
        return self.memory[start : start + count * dtype.itemsize].view(dtype)
