"""Packs quantized matrices for the GPU's products: the codes of the file, in another order.

A matrix is divided into tiles of 64 outputs by 256 inputs. The 16-bit words of a tile are
consecutive, so that a Triton program reads a tile as one stream of 16-byte loads.

A plane is a run of consecutive inputs, which share a scale. A word has one code of each of several
planes: in a nibble (4 planes) or byte (2 planes). Word (step, output, column) has the inputs `step
* planes * columns + plane * columns + column`. The upper bits of 5-bit and 6-bit codes are in
separate words.

Scales are copied from the file; for k-quants, the 16-byte header of eight scales is copied instead.
They are stored as 32-bit words, with all outputs of a group side by side, because asynchronous
copies need at least 32 bits. 16-bit scales of two neighbouring groups share a word. Scales of E4M3
are multiplied by 256, because kernels divide its numbers by 256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.functional import pad

from twostroke.backends.gpu.weight_layout import (
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

    CodesAndScales = tuple[Tensor, Tensor, Tensor | None]

_CODES_AT_ONCE: Final = 1 << 25


class PackedMatrix(Frozen, eq=False):
    """A quantized weight matrix (width, depth) packed for the GPU, or a stack of such matrices.

    - `codes`: int16 (matrices, tiles of outputs, tiles of inputs, steps, 64, columns).
    - `high`: the upper bits of 5-bit codes, uint8 without the dimension of steps, or of 6-bit
      codes, int16 with half of the steps.
    - `scales`, `offsets`: int32 or float32 (matrices, groups or pairs of groups, words, outputs),
      padded with 0 where codes are padded.
    """

    layout: PackedLayout
    width: int
    depth: int
    codes: Tensor
    scales: Tensor
    high: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def pointers(self) -> dict[str, Tensor]:
        """Return the matrix's arrays as arguments of a kernel.

        In place of a missing array, which the kernel never reads, it gets `codes`.
        """
        return {
            "codes": self.codes,
            "high": self.codes if self.high is None else self.high,
            "scales": self.scales,
            "offsets": self.codes if self.offsets is None else self.offsets,
        }

    @property
    def num_bytes(self) -> int:
        """Return the bytes of GPU memory of the matrix."""
        arrays = (self.codes, self.scales, self.high, self.offsets)
        return sum(x.numel() * x.element_size() for x in arrays if x is not None)


def pack(tensor: QuantTensor, device: torch.device) -> PackedMatrix:
    """Copy a quantized matrix (width, depth) to the GPU, and pack its codes there.

    A large matrix is packed in parts, because unpacked codes take a byte each.
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
    return concatenate([PackedMatrix(layout, width, depth, *part) for part in parts], width)


def concatenate(matrices: Sequence[PackedMatrix], width: int) -> PackedMatrix:
    """Concatenate packed matrices of the same layout and depth to a matrix of `width` outputs.

    All matrices except the last must have a multiple of 64 outputs.
    """
    if len(matrices) == 1:
        return matrices[0]

    def join_arrays(name: str, dim: int) -> Tensor | None:
        arrays = [array for matrix in matrices if (array := getattr(matrix, name)) is not None]
        return torch.cat(arrays, dim) if arrays else None

    first, codes, scales = matrices[0], join_arrays("codes", 1), join_arrays("scales", -1)
    assert codes is not None
    assert scales is not None
    return PackedMatrix(
        first.layout,
        width,
        depth=first.depth,
        codes=codes,
        scales=scales,
        high=join_arrays("high", 1),
        offsets=join_arrays("offsets", -1),
    )


def _pack_rows(
    fmt: Format, rows: Bytes, depth: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Pack rows of a quantized matrix; return (codes, scales, upper bits, offsets).

    Upper bits and offsets are None if the format has none. `depth` is the number of values in a
    row. `rows` may be a slice of a matrix whose start is a multiple of the layout's tile of rows.
    """
    layout = layout_of(fmt, depth)
    assert layout is not None
    copied = np.array(rows, order="C")  # a file's pages are read-only
    bytes_on_device = torch.from_numpy(copied).to(device)
    blocks = bytes_on_device.view(-1, fmt.block_bytes)
    reader = _READERS.get(fmt.name, _read_e4m3 if layout.table else _read_grouped)
    codes, scales, offsets = reader(fmt, blocks)
    words, high = _pack_words(_tiles(codes.reshape(1, len(rows), depth), layout), layout)
    shape = len(rows), depth
    grouped_offsets = None if offsets is None else _groups(offsets, shape, layout)
    return words, _groups(scales, shape, layout), high, grouped_offsets


def pack_stack(matrices: Iterable[QuantTensor], count: int, device: torch.device) -> PackedMatrix:
    """Pack `count` quantized matrices of the same format and shape into one stack on the GPU."""
    stack: PackedMatrix | None = None
    for index, matrix in enumerate(matrices):
        packed = pack(matrix, device)
        if stack is None:
            names = ("codes", "scales", "high", "offsets")
            arrays = {name: x for name in names if (x := getattr(packed, name)) is not None}
            room = {name: x.new_empty((count, *x.shape[1:])) for name, x in arrays.items()}
            stack = PackedMatrix(packed.layout, packed.width, packed.depth, **room)
        for name in room:
            getattr(stack, name)[index] = getattr(packed, name)[0]
    assert stack is not None
    return stack


def _tiles(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Divide codes (stack, width, depth) into tiles of outputs and inputs.

    Returns (stack, tiles, tiles, steps, 64, planes, columns).
    """
    stack, width, depth = codes.shape
    rows, inputs = -(-width // TILE_OUTPUTS), -(-depth // TILE_INPUTS)
    padding = rows * TILE_OUTPUTS - width, inputs * TILE_INPUTS - depth
    if any(padding):
        codes = pad(codes, (0, padding[1], 0, padding[0]))
    shape = stack, rows, TILE_OUTPUTS, inputs, layout.steps, layout.planes, layout.columns
    order = (0, 1, 3, 4, 2, 5, 6)
    return codes.reshape(shape).permute(order)


def _pack_words(tiles: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor | None]:
    """Pack tiles of codes into words; return them, and words of upper bits for 5 and 6 bits."""
    if layout.planes == 2:
        return _in_words(tiles[..., 0, :], tiles[..., 1, :]), None
    low = tiles & 0xF
    first, second = (low[..., plane, :] | low[..., plane + 1, :] << 4 for plane in (0, 2))
    words, num_high = _in_words(first, second), layout.bits - 4
    if not num_high:
        return words, None
    upper = tiles >> 4
    upper_words = upper[..., 0, :]
    for plane in range(1, layout.planes):
        upper_words = upper_words | upper[..., plane, :] << num_high * plane
    even, odd = upper_words[:, :, :, 0::2], upper_words[:, :, :, 1::2]  # steps
    return words, (even | odd << 4).contiguous() if num_high == 1 else _in_words(even, odd)


def _in_words(low: Tensor, high: Tensor) -> Tensor:
    """Return int16 words made of these low and high bytes."""
    return torch.stack([low, high], -1).view(torch.int16).squeeze(-1)


def _groups(values: Tensor, shape: tuple[int, int], layout: PackedLayout) -> Tensor:
    """Reorder scales or offsets of quantized blocks for the GPU: (1, groups, words, outputs).

    `values`: (rows * blocks, words).
    """
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


def _unpack(packed: Tensor, bits: int, run: int) -> Tensor:
    """Unpack codes of `bits` bits from a file's bytes (blocks, bytes).

    Does the same as `quant.format.unpack_planes`, on the GPU.
    """
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (runs >> shifts[:, None] & (1 << bits) - 1).reshape(len(packed), -1)


def _view_as(blocks: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    return blocks[:, first:last].contiguous().view(dtype)


def _float16_at(blocks: Tensor, first: int) -> Tensor:
    return _view_as(blocks, first, first + 2, torch.float16)


def _read_q4_0(_: Format, blocks: Tensor) -> CodesAndScales:
    return _unpack(blocks[:, 2:], 4, run=16), _float16_at(blocks, 0), None


def _read_q4_1(_: Format, blocks: Tensor) -> CodesAndScales:
    return _unpack(blocks[:, 4:], 4, run=16), _float16_at(blocks, 0), _float16_at(blocks, 2)


def _read_q8_0(_: Format, blocks: Tensor) -> CodesAndScales:
    return blocks[:, 2:], _float16_at(blocks, 0), None


def _read_q4_k(_: Format, blocks: Tensor) -> CodesAndScales:
    return _unpack(blocks[:, 16:], 4, run=32), _view_as(blocks, 0, 16, torch.int32), None


def _read_q5_k(_: Format, blocks: Tensor) -> CodesAndScales:
    codes = _unpack(blocks[:, 48:], 4, run=32)
    codes |= _unpack(blocks[:, 16:48], 1, run=32) << 4
    return codes, _view_as(blocks, 0, 16, torch.int32), None


def _read_q6_k(_: Format, blocks: Tensor) -> CodesAndScales:
    codes = _unpack(blocks[:, :128], 4, run=64)
    codes |= _unpack(blocks[:, 128:192], 2, run=32) << 4
    return codes, _view_as(blocks, 192, 208, torch.int32), _float16_at(blocks, 208).float()


def _read_grouped(fmt: Format, blocks: Tensor) -> CodesAndScales:
    """Read blocks of a `quant.grouped` format: their codes, scales, and zero points if any."""
    bits, has_zero = grouped_of(fmt) or (0, False)
    code_bytes = fmt.block_size * bits // 8
    head = fmt.block_bytes - code_bytes
    scales = _view_as(blocks, 0, head - has_zero, _SCALES[fmt.name.split("_")[2]])
    codes = blocks[:, head:]
    codes = _unpack(codes, 4, run=1) if bits == 4 else codes ^ 0x80
    return codes, scales, blocks[:, head - 1 : head].half() if has_zero else None


def _read_e4m3(fmt: Format, blocks: Tensor) -> CodesAndScales:
    head = fmt.block_bytes - fmt.block_size
    scales = _view_as(blocks, 0, head, torch.float32 if head == 4 else torch.bfloat16)
    return blocks[:, head:], scales.float() * 256, None


_SCALES: Final = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_READERS: Final[dict[str, Callable[[Format, Tensor], CodesAndScales]]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
