"""A number format: values and bytes of a block, the functions between them, and bit packing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"

_FLOAT_KERNELS = (0, 1, 30)  # of F32, F16 and BF16


class Format(Frozen):
    """A way to store float values: blocks of `block_size` values in `block_bytes` bytes.

    `kernel_id` is the number of the native kernels that multiply it (`WeightType` in
    native/linear/linear.h), -1 where there are none; `to_kernel` maps rows of bytes to what these
    kernels pack, where that is something else. `group_size` values share a scale. `gguf_id` is the
    type's number in a GGUF file, None if it is in none. `decode` maps bytes (blocks, block_bytes)
    to float32 (blocks, block_size), exactly; `encode` is its rounding inverse, None where there is
    none. `packed_bits` are those that a value takes in the kernels' form, where these are more than
    rounding to whole bytes explains.
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
        """Bits that one value takes, its share of the block's scales included."""
        return 8 * self.block_bytes / self.block_size

    @property
    def meets_floats(self) -> bool:
        """Whether its kernels multiply activations as they are, and round none to integers."""
        return self.kernel_id in _FLOAT_KERNELS

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of `num_values` values, which must fill whole blocks."""
        blocks, rest = divmod(num_values, self.block_size)
        if rest:
            raise ValueError(
                f"{num_values} values do not fill {self.name} blocks of {self.block_size}"
            )
        return blocks * self.block_bytes

    def dequantize(self, data: Bytes) -> Floats:
        """Map bytes (..., row_bytes) to float32 (..., row_values)."""
        blocks = np.ascontiguousarray(data).reshape(-1, self.block_bytes)
        return self.decode(blocks).reshape(*data.shape[:-1], -1)

    def quantize(self, values: Floats) -> Bytes:
        """Map float32 (..., row_values) to bytes (..., row_bytes).

        A row must fill whole blocks, and the format must have an encoder (ValueError otherwise).
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
    """Return a format whose kernels have its number in GGUF files.

    `sizes` are those of a group and of a block, and the block's bytes.
    """
    return Format(name, number, *sizes, decode, encode, gguf_id=number)


def half_column(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of each block as float32 (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def half_bytes(values: Floats) -> Bytes:
    """Return float32 (blocks, 1) rounded to float16, as bytes (blocks, 2)."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint8)


def unpack_planes(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack (blocks, bytes) into codes below 2**bits, uint8 (blocks, bytes * 8 / bits)."""
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = runs >> shifts[:, None]  # (blocks, runs, planes, run)
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(packed.shape[0], -1)


def pack_planes(codes: Bytes, bits: int, run: int) -> Bytes:
    """Pack codes below 2**bits, uint8 (blocks, codes), into (blocks, codes * bits / 8)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    planes = codes.reshape(codes.shape[0], -1, len(shifts), run) << shifts[:, None]
    packed: Bytes = np.bitwise_or.reduce(planes, axis=2)
    return packed.reshape(codes.shape[0], -1)
