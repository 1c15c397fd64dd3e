"""Quantized matrices as the GPU's products read them: the codes of the file, in another order.

A matrix is cut into tiles of 64 outputs by 256 inputs; a tile's words of 16 bits lie together, so
that a program reads it as one stream of 16-byte loads. A word holds codes of neighbouring planes:
word (step, output, column) has the inputs `step * planes * columns + plane * columns + column`, a
plane in each nibble (4 planes) or byte (2). A plane's inputs are neighbours and share a scale.
Upper bits of codes of 5 or 6 bits lie in words of their own. Scales are those of the file, or its
16 bytes for eight of them, for all outputs of a group side by side, in words of 32 bits: GPUs copy
no less ahead, so those of 16 bits are in pairs, of neighbouring groups. Scales of E4M3 are 256
times as large, for its numbers are made 256 times too small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.functional import pad

from twostroke.backends.gpu.stored import (
    TILE_INPUTS,
    TILE_OUTPUTS,
    PackedLayout,
    grouped_of,
    layout_of,
)
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from twostroke.model.quant import Bytes, Format, QuantTensor

    Parts = tuple[Tensor, Tensor, Tensor | None]

_CODES_AT_ONCE: Final = 1 << 25


class PackedMatrix(Frozen, eq=False):
    """A matrix (width, depth), or a stack of them, on a device.

    `codes` are int16 (matrices, tiles of outputs, tiles of inputs, steps, 64, columns); `high`
    the upper bits of 5-bit codes, uint8 without the steps, or of 6-bit codes, int16 with half of
    them. `scales` (matrices, groups or pairs, words, outputs) and `offsets`, likewise, int32 or
    float32, are padded as the codes are: with scales of 0.
    """

    layout: PackedLayout
    width: int
    depth: int
    codes: Tensor
    scales: Tensor
    high: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes, high bits, scales and offsets for a kernel, which reads no array that is missing.

        The codes stand for such an array.
        """
        high = self.codes if self.high is None else self.high
        return self.codes, high, self.scales, self.codes if self.offsets is None else self.offsets

    @property
    def num_bytes(self) -> int:
        """Bytes that all its arrays take."""
        arrays = (self.codes, self.scales, self.high, self.offsets)
        return sum(x.numel() * x.element_size() for x in arrays if x is not None)


def pack(tensor: QuantTensor, device: torch.device) -> PackedMatrix:
    """Bring a matrix (width, depth) into its layout, on the device: its bytes go there as they are.

    A large one goes in parts, so that their codes, a byte each, need little memory.
    """
    width, depth = tensor.shape
    layout = layout_of(tensor.format, depth)
    assert layout is not None, f"{tensor.format.name} has no kernels"
    data = tensor.data.reshape(width, -1)
    grain = max(TILE_OUTPUTS, _CODES_AT_ONCE // depth // TILE_OUTPUTS * TILE_OUTPUTS)
    parts = [
        _pack_rows(tensor.format, data[start : start + grain], depth, device)
        for start in range(0, width, grain)
    ]
    return joined([PackedMatrix(layout, width, depth, *part) for part in parts], width)


def joined(parts: Sequence[PackedMatrix], width: int) -> PackedMatrix:
    """Return matrices of one layout and depth as one with `width` outputs in all.

    All but the last end with a whole tile.
    """
    if len(parts) == 1:
        return parts[0]

    def whole(name: str, dim: int) -> Tensor | None:
        arrays = [array for part in parts if (array := getattr(part, name)) is not None]
        return torch.cat(arrays, dim) if arrays else None

    first, codes, scales = parts[0], whole("codes", 1), whole("scales", -1)
    assert codes is not None
    assert scales is not None
    given = first.layout, width, first.depth, codes, scales
    return PackedMatrix(*given, whole("high", 1), whole("offsets", -1))


def _pack_rows(
    fmt: Format, rows: Bytes, depth: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return codes, scales, upper bits and offsets of some rows, which begin a tile."""
    layout = layout_of(fmt, depth)
    assert layout is not None
    copied = np.array(rows, order="C")  # a file's pages are read-only
    given = torch.from_numpy(copied).to(device)
    blocks = given.view(-1, fmt.block_bytes)
    reader = _READERS.get(fmt.name, _read_e4m3 if layout.table else _read_grouped)
    codes, scales, offsets = reader(fmt, blocks)
    words, high = _words(_tiles(codes.reshape(1, len(rows), depth), layout), layout)
    shape = len(rows), depth
    found = None if offsets is None else _groups(offsets, shape, layout)
    return words, _groups(scales, shape, layout), high, found


def pack_stack(matrices: Iterable[QuantTensor], count: int, device: torch.device) -> PackedMatrix:
    """Bring `count` matrices of one format and shape into one stack, each by itself."""
    whole: PackedMatrix | None = None
    for index, matrix in enumerate(matrices):
        own = pack(matrix, device)
        if whole is None:
            names = ("codes", "scales", "high", "offsets")
            arrays = {name: x for name in names if (x := getattr(own, name)) is not None}
            room = {name: x.new_empty((count, *x.shape[1:])) for name, x in arrays.items()}
            whole = PackedMatrix(own.layout, own.width, own.depth, **room)
        for name in room:
            getattr(whole, name)[index] = getattr(own, name)[0]
    assert whole is not None
    return whole


def _tiles(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Return codes (stack, width, depth) as (stack, tiles, tiles, steps, 64, planes, columns)."""
    stack, width, depth = codes.shape
    rows, inputs = -(-width // TILE_OUTPUTS), -(-depth // TILE_INPUTS)
    padding = rows * TILE_OUTPUTS - width, inputs * TILE_INPUTS - depth
    if any(padding):
        codes = pad(codes, (0, padding[1], 0, padding[0]))
    shape = stack, rows, TILE_OUTPUTS, inputs, layout.steps, layout.planes, layout.columns
    return codes.reshape(shape).permute(0, 1, 3, 4, 2, 5, 6)


def _words(tiles: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor | None]:
    """Return the words of codes, and those of their upper bits."""
    if layout.planes == 2:
        return _in_words(tiles[..., 0, :], tiles[..., 1, :]), None
    low = tiles & 0xF
    first, second = (low[..., plane, :] | low[..., plane + 1, :] << 4 for plane in (0, 2))
    words, num_high = _in_words(first, second), layout.bits - 4
    if not num_high:
        return words, None
    upper = tiles >> 4
    own = upper[..., 0, :]
    for plane in range(1, layout.planes):
        own = own | upper[..., plane, :] << num_high * plane
    even, odd = own[:, :, :, 0::2], own[:, :, :, 1::2]  # steps
    return words, (even | odd << 4).contiguous() if num_high == 1 else _in_words(even, odd)


def _in_words(low: Tensor, high: Tensor) -> Tensor:
    """Return words of 16 bits of their two bytes."""
    return torch.stack([low, high], -1).view(torch.int16).squeeze(-1)


def _groups(values: Tensor, shape: tuple[int, int], layout: PackedLayout) -> Tensor:
    """Return values of blocks (rows * blocks, words) as (1, groups, words, outputs)."""
    width, depth = shape
    size = TILE_INPUTS if layout.scales in {"k", "q6_k"} else layout.group
    rows, groups = -(-width // TILE_OUTPUTS) * TILE_OUTPUTS, -(-depth // TILE_INPUTS) * TILE_INPUTS
    values = values.reshape(width, -1, values.shape[-1])
    values = values.repeat_interleave(-(-depth // values.shape[1] // size), 1)
    values = pad(values, (0, 0, 0, groups // size - values.shape[1], 0, rows - width))
    values = values.permute(1, 2, 0)
    if values.element_size() == 2:
        pairs = values.reshape(-1, 2, rows).transpose(1, 2).contiguous()
        values = pairs.view(torch.int32).transpose(1, 2)
    return values[None].contiguous()


def _unpacked(packed: Tensor, bits: int, run: int) -> Tensor:
    """Unpack (blocks, bytes) as `quant.planes.unpack_planes` does."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (runs >> shifts[:, None] & (1 << bits) - 1).reshape(len(packed), -1)


def _numbers(blocks: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    return blocks[:, first:last].contiguous().view(dtype)


def _halves(blocks: Tensor, first: int) -> Tensor:
    return _numbers(blocks, first, first + 2, torch.float16)


def _read_q4_0(_: Format, blocks: Tensor) -> Parts:
    return _unpacked(blocks[:, 2:], 4, run=16), _halves(blocks, 0), None


def _read_q4_1(_: Format, blocks: Tensor) -> Parts:
    return _unpacked(blocks[:, 4:], 4, run=16), _halves(blocks, 0), _halves(blocks, 2)


def _read_q8_0(_: Format, blocks: Tensor) -> Parts:
    return blocks[:, 2:], _halves(blocks, 0), None


def _read_q4_k(_: Format, blocks: Tensor) -> Parts:
    return _unpacked(blocks[:, 16:], 4, run=32), _numbers(blocks, 0, 16, torch.int32), None


def _read_q5_k(_: Format, blocks: Tensor) -> Parts:
    codes = _unpacked(blocks[:, 48:], 4, run=32)
    codes |= _unpacked(blocks[:, 16:48], 1, run=32) << 4
    return codes, _numbers(blocks, 0, 16, torch.int32), None


def _read_q6_k(_: Format, blocks: Tensor) -> Parts:
    codes = _unpacked(blocks[:, :128], 4, run=64)
    codes |= _unpacked(blocks[:, 128:192], 2, run=32) << 4
    return codes, _numbers(blocks, 192, 208, torch.int32), _halves(blocks, 208).float()


def _read_grouped(fmt: Format, blocks: Tensor) -> Parts:
    """Read the blocks of `quant.grouped`: the scale, perhaps a zero point, codes."""
    bits, has_zero = grouped_of(fmt) or (0, False)
    code_bytes = fmt.block_size * bits // 8
    head = fmt.block_bytes - code_bytes
    scales = _numbers(blocks, 0, head - has_zero, _SCALES[fmt.name.split("_")[2]])
    codes = blocks[:, head:]
    codes = _unpacked(codes, 4, run=1) if bits == 4 else codes ^ 0x80
    return codes, scales, blocks[:, head - 1 : head].half() if has_zero else None


def _read_e4m3(fmt: Format, blocks: Tensor) -> Parts:
    head = fmt.block_bytes - fmt.block_size
    scales = _numbers(blocks, 0, head, torch.float32 if head == 4 else torch.bfloat16)
    return blocks[:, head:], scales.float() * 256, None


_SCALES: Final = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_READERS: Final[dict[str, Callable[[Format, Tensor], Parts]]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
