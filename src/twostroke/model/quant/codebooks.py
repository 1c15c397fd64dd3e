"""IQ1, IQ2 and IQ3 of GGUF files: a code names eight or four magnitudes at once, in a codebook.

The layouts are those of ggml (`block_iq2_xxs` and its kin), 256 values to a block. An index names
an entry of the format's codebook; signs are bytes, value i of eight in bit i, or seven bits of
them, where the eighth sign makes the number of minus signs even. A value of IQ2 and IQ3 is a
magnitude with its sign; one of IQ1 is -1, 0 or 1, plus or minus an eighth. All values of a group
are multiplied by `scale * (2 * step + 1)`, where the scale is a float16, and a power of two.

Kernels look up no codebook: `to_kernel` writes each value's own code, of three or four bits, as
docs/kernels/packing.md says. Their block has the scale; for each group `2 * step + 1`; and a byte
for each code, of which the highest bit is the sign, or IQ1's minus an eighth.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant.codebook_grids import GRIDS, codebook
from twostroke.model.quant.format import Bytes, Floats, Format, half_column
from twostroke.model.quant.planes import unpack_planes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    # The scales as bytes (n, 2), the steps (n, groups), eight codes each as uint64 (n, 32).
    Parts = tuple[Bytes, Bytes, NDArray[np.uint64]]

_SIZE: Final = 256
_EIGHTH: Final = np.uint64(0x0101010101010101)


class Codebook(Frozen, eq=False):
    """How a kernel's codes become values: `levels` of each code, times the scale and `unit`."""

    name: str
    kernel_id: int
    group: int
    unit: float
    levels: Floats

    @property
    def num_groups(self) -> int:
        """Groups of a block."""
        return _SIZE // self.group

    @property
    def format(self) -> Format:
        """The format of the kernels' blocks."""
        return Format(
            self.name,
            self.kernel_id,
            self.group,
            _SIZE,
            2 + self.num_groups + _SIZE,
            partial(_decode, self),
        )

    def parts(self, blocks: Bytes) -> tuple[Floats, Bytes]:
        """Return the groups' scales, float32 (n, groups), and the codes, uint8 (n, 256)."""
        end = 2 + self.num_groups
        scales = half_column(blocks, 0) * np.float32(self.unit)
        return scales * blocks[:, 2:end].astype(np.float32), blocks[:, end:]


def _decode(book: Codebook, blocks: Bytes) -> Floats:
    scales, codes = book.parts(blocks)
    values = book.levels[codes].reshape(-1, book.num_groups, book.group)
    values *= scales[:, :, None]
    return values.reshape(-1, _SIZE)


def _signed(magnitudes: tuple[int, ...]) -> Floats:
    positive = np.array(magnitudes, np.float32)
    return np.concatenate([positive, -positive])


_IQ1_LEVELS: Final = np.array([-7, 1, 9, 0, -9, -1, 7, 0], np.float32)  # eighths
_IQ2_LEVELS: Final = _signed((8, 25, 43, 0))
_IQ3_XXS_LEVELS: Final = _signed((2, 6, 10, 14, 18, 22, 26, 31))  # ggml's, halved
_IQ3_S_LEVELS: Final = _signed((1, 3, 5, 7, 9, 11, 13, 15))

# The numbers are those of `WeightType` in native/linear/linear.h.
CODEBOOKS: Final = (
    Codebook("IQ1_G16", 264, 16, 1 / 8, _IQ1_LEVELS),
    Codebook("IQ2_G16", 265, 16, 1 / 8, _IQ2_LEVELS),
    Codebook("IQ2_G32", 266, 32, 1 / 8, _IQ2_LEVELS),
    Codebook("IQ3_XXS_G32", 267, 32, 1 / 2, _IQ3_XXS_LEVELS),
    Codebook("IQ3_S_G32", 268, 32, 1, _IQ3_S_LEVELS),
)
_IQ1, _IQ2, _IQ2_XXS, _IQ3_XXS, _IQ3_S = CODEBOOKS


@cache
def _entries(name: str) -> NDArray[Any]:
    """Return a codebook's entries, each as one number of a byte for each code."""
    codes = codebook(name)
    entries: NDArray[Any] = codes.view(f"u{GRIDS[name].width}")[:, 0]
    return entries


@cache
def _sign_bytes(bit: int) -> NDArray[np.uint64]:
    """Return (256,) numbers that set `bit` in the bytes of values with a minus sign."""
    signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (signs << np.uint8(bit)).view(np.uint64)[:, 0]


def _even_signs() -> Bytes:
    """Return the signs of eight values for seven bits of them."""
    seven = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(seven[:, None], axis=1).sum(axis=1) & 1
    signs: Bytes = seven | (odd << 7).astype(np.uint8)
    return signs


_EVEN_SIGNS: Final = _even_signs()


def _words(data: Bytes, kind: type[np.unsignedinteger]) -> NDArray[np.uint32]:
    """Return little-endian numbers of each block."""
    return np.ascontiguousarray(data).view(kind).astype(np.uint32)


def _shifted(words: NDArray[np.uint32], shifts: tuple[int, ...], mask: int) -> NDArray[np.uint32]:
    """Return fields of words (n, k), (n, k * shifts)."""
    fields = words[:, :, None] >> np.array(shifts, np.uint32) & np.uint32(mask)
    return fields.reshape(len(words), -1)


def _steps(nibbles: NDArray[Any]) -> Bytes:
    return (2 * nibbles + 1).astype(np.uint8)


def _iq2_xxs(blocks: Bytes) -> Parts:
    """66 bytes: the scale; for each 32 values four indices, then four signs and a step."""
    words = _words(blocks[:, 2:], np.uint32)
    signs = _EVEN_SIGNS[_shifted(words[:, 1::2], (0, 7, 14, 21), 127)]
    entries = _entries("IQ2_XXS")[_shifted(words[:, ::2], (0, 8, 16, 24), 255)]
    return blocks[:, :2], _steps(words[:, 1::2] >> 28), entries | _sign_bytes(2)[signs]


def _iq2_xs(blocks: Bytes) -> Parts:
    """74 bytes: the scale; for each 8 values an index and signs; nibbles of the steps."""
    words = _words(blocks[:, 2:66], np.uint16)
    codes = _entries("IQ2_XS")[words & 511] | _sign_bytes(2)[_EVEN_SIGNS[words >> 9]]
    return blocks[:, :2], _steps(unpack_planes(blocks[:, 66:], 4, run=1)), codes


def _iq2_s(blocks: Bytes) -> Parts:
    """82 bytes: the scale, 32 indices, 32 signs, the indices' high bits, nibbles of the steps."""
    high = unpack_planes(blocks[:, 66:74], 2, run=1).astype(np.uint32)
    entries = _entries("IQ2_S")[blocks[:, 2:34] | high << 8]
    steps = _steps(unpack_planes(blocks[:, 74:], 4, run=1))
    return blocks[:, :2], steps, entries | _sign_bytes(2)[blocks[:, 34:66]]


def _iq3_xxs(blocks: Bytes) -> Parts:
    """98 bytes: the scale; 64 indices; for each 32 values four signs and a step."""
    words = _words(blocks[:, 66:], np.uint32)
    signs = _EVEN_SIGNS[_shifted(words, (0, 7, 14, 21), 127)]
    entries = _entries("IQ3_XXS")[blocks[:, 2:66]].view(np.uint64)
    return blocks[:, :2], _steps(words >> 28), entries | _sign_bytes(3)[signs]


def _iq3_s(blocks: Bytes) -> Parts:
    """110 bytes: the scale, 64 indices, their high bits, 32 signs, nibbles of the steps."""
    high = unpack_planes(blocks[:, 66:74], 1, run=1).astype(np.uint32)
    entries = _entries("IQ3_S")[blocks[:, 2:66] | high << 8].view(np.uint64)
    steps = _steps(unpack_planes(blocks[:, 106:], 4, run=1))
    return blocks[:, :2], steps, entries | _sign_bytes(3)[blocks[:, 74:106]]


def _iq1_s(blocks: Bytes) -> Parts:
    """50 bytes: the scale; 32 indices; for each 32 values their high bits, a step and a sign."""
    words = _words(blocks[:, 34:], np.uint16)
    entries = _entries("IQ1_S")[blocks[:, 2:34] | _shifted(words, (0, 3, 6, 9), 7) << 8]
    minus = np.repeat(words >> 15, 4, axis=1) * (np.uint64(4) * _EIGHTH)
    return blocks[:, :2], np.repeat(_steps(words >> 12 & 7), 2, axis=1), entries | minus


def _iq1_m(blocks: Bytes) -> Parts:
    """56 bytes: 32 indices; nibbles of a high part and a sign; four words of steps.

    The scale is the upper nibbles of these words.
    """
    nibbles = unpack_planes(blocks[:, 32:48], 4, run=1).astype(np.uint32)
    entries = _entries("IQ1_S")[blocks[:, :32] | (nibbles & 7) << 8]
    words = _words(blocks[:, 48:], np.uint16)
    shifts = np.array([0, 4, 8, 12], np.uint32)
    scale = np.bitwise_or.reduce(words >> 12 << shifts, axis=1).astype(np.uint16)
    minus = (nibbles >> 3) * (np.uint64(4) * _EIGHTH)
    steps = _steps(_shifted(words, (0, 3, 6, 9), 7))
    return scale.view(np.uint8).reshape(-1, 2), steps, entries | minus


class _CodebookFormat(Frozen, eq=False):
    """A format of files: the kernels' codebook, bytes of a block, and the reader of its parts."""

    book: Codebook
    block_bytes: int
    read: Callable[[Bytes], Parts]

    def to_kernel(self, data: Bytes) -> Bytes:
        """Bring rows of blocks, uint8 (rows, row_bytes), into the kernels' blocks."""
        scales, steps, codes = self.read(data.reshape(-1, self.block_bytes))
        parts = [scales, steps, codes.view(np.uint8)]
        return np.concatenate(parts, axis=1).reshape(len(data), -1)

    def decode(self, blocks: Bytes) -> Floats:
        """Return values float32 (n, 256) of blocks (n, block_bytes)."""
        return _decode(self.book, self.to_kernel(blocks))


def _format(name: str, gguf_id: int, kind: _CodebookFormat, packed_bits: float) -> Format:
    return Format(
        name,
        kind.book.kernel_id,
        kind.book.group,
        _SIZE,
        kind.block_bytes,
        kind.decode,
        gguf_id=gguf_id,
        to_kernel=kind.to_kernel,
        packed_bits=packed_bits,
    )


IQ1_S = _format("IQ1_S", 19, _CodebookFormat(_IQ1, 50, _iq1_s), 3.625)
IQ1_M = _format("IQ1_M", 29, _CodebookFormat(_IQ1, 56, _iq1_m), 3.625)
IQ2_XXS = _format("IQ2_XXS", 16, _CodebookFormat(_IQ2_XXS, 66, _iq2_xxs), 3.375)
IQ2_XS = _format("IQ2_XS", 17, _CodebookFormat(_IQ2, 74, _iq2_xs), 3.625)
IQ2_S = _format("IQ2_S", 22, _CodebookFormat(_IQ2, 82, _iq2_s), 3.625)
IQ3_XXS = _format("IQ3_XXS", 18, _CodebookFormat(_IQ3_XXS, 98, _iq3_xxs), 4.375)
IQ3_S = _format("IQ3_S", 21, _CodebookFormat(_IQ3_S, 110, _iq3_s), 4.375)
