"""A number format: values and bytes of a block, the functions between them, and bit packing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"

_FLOAT_KERNELS = (0, 1, 30)  # F32, F16 and BF16


class Format(Frozen):
    """A number format of weights: blocks of `block_size` values in `block_bytes` bytes.

    `kernel_id` is the number of the native kernels that multiply the format (`WeightType` in
    native/linear/linear.h), -1 if there are none. `to_kernel` converts rows of bytes to the layout
    that these kernels read, if it differs. `packed_bits` is the size of a value in the kernels'
    layout, if it is larger than `bits_per_value` rounded up to whole bytes.

    `group_size` values share a scale. `gguf_id` is the type's number in GGUF files, None if it has
    none. `decode` maps bytes (blocks, block_bytes) to float32 (blocks, block_size), exactly.
    `encode` rounds float32 to bytes; None if the format is only read.
    """

    name: str
    kernel_id: int
    group_size: int
    block_size: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]
    encode: Callable[[Floats], Bytes] | None = None
    gguf_id: int | None = None
    to_kernel: Callable[[Bytes], Bytes] | None = None
    packed_bits: float | None = None

    @property
    def bits_per_value(self) -> float:
        """The number of bits of one value, including its share of the block's scales."""
        return 8 * self.block_bytes / self.block_size

    @property
    def multiplies_floats(self) -> bool:
        """Whether the format's kernels multiply float activations instead of quantized ones."""
        return self.kernel_id in _FLOAT_KERNELS

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes that `num_values` values take; the values must fill whole blocks."""
        blocks, rest = divmod(num_values, self.block_size)
        if rest:
            values_do = counted_noun(num_values, "value does", "values do")
            raise ValueError(f"{values_do} not fill {self.name} blocks of {self.block_size}")
        return blocks * self.block_bytes

    def dequantize(self, data: Bytes) -> Floats:
        """Decode bytes (..., row_bytes) of this format to float32 (..., row_values)."""
        blocks = np.ascontiguousarray(data).reshape(-1, self.block_bytes)
        return self.decode(blocks).reshape(*data.shape[:-1], -1)

    def quantize(self, values: Floats) -> Bytes:
        """Encode float32 (..., row_values) as bytes (..., row_bytes) of this format.

        Raises:
            ValueError: a row does not fill whole blocks, or the format is only read.
        """
        if self.encode is None:
            raise ValueError(f"{self.name} is read, not written")
        row_bytes = self.num_bytes(values.shape[-1])
        blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, self.block_size)
        return self.encode(blocks).reshape(*values.shape[:-1], row_bytes)


def ggml_format(
    name: str,
    number: int,
    sizes: tuple[int, int, int],
    decode: Callable[[Bytes], Floats],
    encode: Callable[[Floats], Bytes],
) -> Format:
    """Return a number format of ggml; `number` is its type in GGUF files, and its kernel id.

    `sizes` are the number of values in a group, of values in a block, and of bytes in a block.
    """
    return Format(name, number, *sizes, decode, encode, gguf_id=number)


def half_column(blocks: Bytes, start: int) -> Floats:
    """Read a float16 number, such as a scale, at byte `start` of blocks: float32 (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def half_bytes(values: Floats) -> Bytes:
    """Return scales, float32 (blocks, 1), as float16 numbers in bytes, (blocks, 2)."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint8)


def unpack_planes(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack quantized codes that are stored in bit planes of their blocks.

    Bytes (blocks, bytes) become codes below 2**bits, uint8 (blocks, bytes * 8 / bits). Every block
    format of ggml packs this way. `run` is a number of bytes; these bytes hold `run` codes in each
    of their bit planes. With 2-bit codes, a run of 32 bytes holds values 0 to 31 in bits 0 and 1,
    values 32 to 63 in bits 2 and 3, and so on. In a run of 1 byte neighbouring codes share a byte.
    """
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = runs >> shifts[:, None]  # (blocks, runs, planes, run)
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(packed.shape[0], -1)


def pack_planes(codes: Bytes, bits: int, run: int) -> Bytes:
    """Pack quantized codes into bit planes of their blocks; the inverse of `unpack_planes`.

    Codes are below 2**bits, uint8 (blocks, codes); the result is (blocks, codes * bits / 8).
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    planes = codes.reshape(codes.shape[0], -1, len(shifts), run) << shifts[:, None]
    packed: Bytes = np.bitwise_or.reduce(planes, axis=2)
    return packed.reshape(codes.shape[0], -1)
