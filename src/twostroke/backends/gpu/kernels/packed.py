"""Quantized matrices as the GPU's products read them: the codes of the file, in another order.

A matrix is cut into tiles of 64 outputs by 256 inputs; a tile's words of 16 bits lie together, so
that a program reads it as one stream of 16-byte loads. A word holds codes of neighbouring planes:
word (step, output, column) has the inputs `step * planes * columns + plane * columns + column`, a
plane in each nibble (4 planes) or byte (2). A plane's inputs are neighbours and share a scale.
Upper bits of codes of 5 or 6 bits lie in words of their own. Scales are those of the file, or its
16 bytes for eight of them, for all outputs of a group side by side; those of E4M3 are 256 times as
large, for its numbers are made 256 times too small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from twostroke.backends.gpu.stored import TILE_INPUTS, TILE_OUTPUTS, Layout, grouped_of, layout_of
from twostroke.core.frozen import Frozen
from twostroke.quant.floats import decode_bfloat
from twostroke.quant.planes import unpack_planes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.quant import Bytes, Format, QuantTensor

    Parts = tuple[Bytes, NDArray[Any], NDArray[Any] | None]


class Packed(Frozen, eq=False):
    """A matrix (width, depth), or a stack of them, on a device.

    `codes` are int16 (matrices, tiles of outputs, tiles of inputs, steps, 64, columns); `high`
    the upper bits of 5-bit codes, uint8 without the steps, or of 6-bit codes, int16 with half of
    them. `scales` (matrices, groups, words, outputs) and `offsets`, likewise, are padded as the
    codes are: with scales of 0.
    """

    layout: Layout
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


def pack(tensor: QuantTensor, device: torch.device) -> Packed:
    """Bring a matrix (width, depth), or a stack (matrices, width, depth), into its layout."""
    width, depth = tensor.shape[-2:]
    layout = layout_of(tensor.format, depth)
    assert layout is not None, f"{tensor.format.name} has no kernels"
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, tensor.format.block_bytes)
    reader = _READERS.get(tensor.format.name, _read_e4m3 if layout.table else _read_grouped)
    codes, scales, offsets = reader(tensor.format, blocks)
    stack = tensor.num_rows // width
    tiles = _tiles(codes.reshape(stack, width, depth), layout)
    words, high = _words(tiles, layout)

    def put(array: NDArray[Any] | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def groups(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if array is None else _groups(array, (stack, width, depth), layout)

    own = groups(scales)
    device_scales = torch.from_numpy(np.ascontiguousarray(own)).to(device)
    if scales.dtype == np.uint16:  # bfloat16, which NumPy does not have
        device_scales = device_scales.view(torch.bfloat16)
    codes_on, high_on, offsets_on = put(words), put(high), put(groups(offsets))
    assert codes_on is not None
    return Packed(layout, width, depth, codes_on, device_scales, high_on, offsets_on)


def pack_stack(matrices: Iterable[QuantTensor], count: int, device: torch.device) -> Packed:
    """Bring `count` matrices of one format and shape into one stack, each by itself."""
    whole: Packed | None = None
    for index, matrix in enumerate(matrices):
        own = pack(matrix, device)
        if whole is None:
            names = ("codes", "scales", "high", "offsets")
            arrays = {name: x for name in names if (x := getattr(own, name)) is not None}
            room = {name: x.new_empty((count, *x.shape[1:])) for name, x in arrays.items()}
            whole = Packed(own.layout, own.width, own.depth, **room)
        for name in room:
            getattr(whole, name)[index] = getattr(own, name)[0]
    assert whole is not None
    return whole


def _tiles(codes: Bytes, layout: Layout) -> Bytes:
    """Return codes (stack, width, depth) as (stack, tiles, tiles, steps, 64, planes, columns)."""
    stack, width, depth = codes.shape
    rows, inputs = -(-width // TILE_OUTPUTS), -(-depth // TILE_INPUTS)
    padding = rows * TILE_OUTPUTS - width, inputs * TILE_INPUTS - depth
    if any(padding):
        codes = np.pad(codes, ((0, 0), (0, padding[0]), (0, padding[1])))
    shape = stack, rows, TILE_OUTPUTS, inputs, layout.steps, layout.planes, layout.columns
    return codes.reshape(shape).transpose(0, 1, 3, 4, 2, 5, 6)


def _words(tiles: Bytes, layout: Layout) -> tuple[NDArray[np.int16], NDArray[Any] | None]:
    """Return the words of codes, and those of their upper bits."""
    bits = 16 // layout.planes
    words = np.zeros((*tiles.shape[:-2], layout.columns), np.uint16)
    for plane in range(layout.planes):
        low = tiles[..., plane, :] & np.uint8((1 << bits) - 1)
        words |= low.astype(np.uint16) << np.uint16(bits * plane)
    if layout.bits in (4, 8):
        return words.view(np.int16), None
    num_high = layout.bits - 4
    kind: Any = np.uint8 if num_high == 1 else np.uint16
    steps = 8 * kind().itemsize // (num_high * layout.planes)  # of a word
    high = np.zeros((*tiles.shape[:3], layout.steps // steps, TILE_OUTPUTS, layout.columns), kind)
    for step in range(layout.steps):
        for plane in range(layout.planes):
            shift = num_high * (step % steps * layout.planes + plane)
            own = (tiles[:, :, :, step, :, plane] >> np.uint8(4)).astype(kind)
            high[:, :, :, step // steps] |= own << kind(shift)
    return words.view(np.int16), high if kind is np.uint8 else high.view(np.int16)


def _groups(values: NDArray[Any], shape: tuple[int, int, int], layout: Layout) -> NDArray[Any]:
    """Return values of blocks (rows * blocks, words) as (stack, groups, words, outputs)."""
    stack, width, depth = shape
    size = TILE_INPUTS if layout.scales != "plain" else layout.group
    rows, groups = -(-width // TILE_OUTPUTS) * TILE_OUTPUTS, -(-depth // TILE_INPUTS) * TILE_INPUTS
    values = values.reshape(stack, width, -1, values.shape[-1])
    values = np.repeat(values, -(-depth // values.shape[2] // size), axis=2)
    padding = rows - width, groups // size - values.shape[2]
    values = np.pad(values, ((0, 0), (0, padding[0]), (0, padding[1]), (0, 0)))
    return values.transpose(0, 2, 3, 1)


def _halves(blocks: Bytes, first: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16)


def _read_q4_0(_: Format, blocks: Bytes) -> Parts:
    return unpack_planes(blocks[:, 2:], 4, run=16), _halves(blocks, 0), None


def _read_q4_1(_: Format, blocks: Bytes) -> Parts:
    return unpack_planes(blocks[:, 4:], 4, run=16), _halves(blocks, 0), _halves(blocks, 2)


def _read_q8_0(_: Format, blocks: Bytes) -> Parts:
    return blocks[:, 2:], _halves(blocks, 0), None


def _header_words(header: Bytes) -> NDArray[np.int32]:
    return np.ascontiguousarray(header).view("<i4")


def _read_q4_k(_: Format, blocks: Bytes) -> Parts:
    return unpack_planes(blocks[:, 16:], 4, run=32), _header_words(blocks[:, :16]), None


def _read_q5_k(_: Format, blocks: Bytes) -> Parts:
    codes = unpack_planes(blocks[:, 48:], 4, run=32)
    codes |= unpack_planes(blocks[:, 16:48], 1, run=32) << np.uint8(4)
    return codes, _header_words(blocks[:, :16]), None


def _read_q6_k(_: Format, blocks: Bytes) -> Parts:
    codes = unpack_planes(blocks[:, :128], 4, run=64)
    codes |= unpack_planes(blocks[:, 128:192], 2, run=32) << np.uint8(4)
    return codes, _header_words(blocks[:, 192:208]), _halves(blocks, 208)


def _read_grouped(fmt: Format, blocks: Bytes) -> Parts:
    """Read the blocks of `quant.grouped`: the scale, perhaps a zero point, codes."""
    bits, has_zero = grouped_of(fmt) or (0, False)
    code_bytes = fmt.block_size * bits // 8
    head = fmt.block_bytes - code_bytes
    size = head - has_zero
    raw = np.ascontiguousarray(blocks[:, :size])
    scales = raw.view(_SCALES[fmt.name.split("_")[2]])
    codes = blocks[:, head:]
    codes = unpack_planes(codes, 4, run=1) if bits == 4 else codes ^ np.uint8(0x80)
    return codes, scales, blocks[:, head - 1 : head] if has_zero else None


def _read_e4m3(fmt: Format, blocks: Bytes) -> Parts:
    raw = np.ascontiguousarray(blocks[:, : fmt.block_bytes - fmt.block_size])
    scales = raw.view(np.float32) if raw.shape[1] == 4 else decode_bfloat(raw)
    return blocks[:, raw.shape[1] :], scales * np.float32(256), None


_SCALES: Final = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32}
_READERS: Final[dict[str, Callable[[Format, Bytes], Parts]]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
