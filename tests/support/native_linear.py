"""The native matrix products through their C interface, and their slow NumPy twins."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from support.block_formats import Parts, random_source, take_apart
from support.native import address, load_level
from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS_BY_KERNEL_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

F32, F16, Q4_0, Q4_1, Q8_0, Q6_K, BF16 = 0, 1, 2, 3, 8, 14, 30
NAMES = {kind: fmt.name for kind, fmt in FORMATS_BY_KERNEL_ID.items()}
TYPES = tuple(NAMES)
FLOAT_TYPES = (F32, F16, BF16)
BLOCK_TYPES = tuple(kind for kind in TYPES if kind not in FLOAT_TYPES)
GENERATED, PROMPT, PRECISE_PROMPT, COARSE, MIXED = ROW_KINDS = 0, 1, 2, 3, 4
MOST_15_BITS, MOST_8_BITS = 16256, 127  # magnitudes of quantized activations
MIXED_FORMATS = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "TQ2_0"}
MIXED_FORMATS |= {f"INT4_G{group}_F32{zero}" for group in (32, 128) for zero in ("", "_Z")}
MIXED_SHARE, MIXED_STRETCH = 8, 1024  # one block of so many has 15 bits, in each stretch


def aligned(num_bytes: int) -> np.ndarray:
    """Return zeroed bytes (num_bytes) that begin on a 64-byte line."""
    buffer = np.zeros(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes]


class Matrix(Frozen):
    """A matrix in its source's layout: `source` bytes, and the exact weights (outputs, inputs).

    Those of a block format have parts.
    """

    type: int
    source: np.ndarray
    exact: np.ndarray
    parts: Parts | None = None


class Library:
    """One level's C interface."""

    def __init__(self, level: str) -> None:
        self.c = load_level(level)
        self.c.ts_linear_level.restype = ctypes.c_char_p
        for name in ("packed_bytes", "prepared_bytes"):
            getattr(self.c, f"ts_linear_{name}").restype = ctypes.c_int64
        assert self.c.ts_linear_request_tiles() == 1
        self.name: str = self.c.ts_linear_level().decode()

    @contextmanager
    def ports_of_another(self) -> Iterator[None]:
        """Compute as on a processor whose 512-bit ports are of the other kind, halves or whole."""
        half = self.c.ts_linear_has_half_ports()
        self.c.ts_linear_assume_half_ports(1 - half)
        try:
            assert self.c.ts_linear_has_half_ports() == 1 - half
            yield
        finally:
            self.c.ts_linear_assume_half_ports(half)

    def packed_bytes(self, kind: int, num_outputs: int, num_inputs: int) -> int:
        sizes = ctypes.c_int64(num_outputs), ctypes.c_int64(num_inputs)
        return int(self.c.ts_linear_packed_bytes(kind, *sizes))

    def pack(self, matrix: Matrix, cuts: tuple[int, ...] = ()) -> np.ndarray:
        num_outputs, num_inputs = matrix.exact.shape
        packed = aligned(self.packed_bytes(matrix.type, num_outputs, num_inputs))
        packed[:] = 0xAB  # what is not written must not be relied upon
        for begin, end in ranges(num_outputs, cuts):
            self.c.ts_linear_pack(
                matrix.type, *longs(num_outputs, num_inputs), address(matrix.source),
                address(packed), *longs(begin, end),
            )  # fmt: skip
        return packed

    def unpack(self, matrix: Matrix, packed: np.ndarray) -> np.ndarray:
        num_outputs, num_inputs = matrix.exact.shape
        out = np.full((num_outputs, num_inputs), np.nan, np.float32)
        for row in range(num_outputs):
            self.c.ts_linear_unpack_row(
                matrix.type, *longs(num_outputs, num_inputs), address(packed), *longs(row),
                address(out[row]),
            )  # fmt: skip
        return out

    def multiply(
        self,
        matrix: Matrix,
        x: np.ndarray,
        kind: int = GENERATED,
        cuts: tuple[int, ...] = (),
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return x W^T (rows, outputs), or add it to `out`; group ranges split at `cuts`."""
        num_outputs, num_inputs = matrix.exact.shape
        packed = self.pack(matrix, cuts)
        rows = len(x)
        size = self.c.ts_linear_prepared_bytes(matrix.type, kind, *longs(num_inputs, rows))
        prepared = aligned(size)
        prepared[:] = 0xCD
        stride = x.strides[0] // 4
        for begin, end in ((0, rows // 2), (rows // 2, rows)):
            self.c.ts_linear_prepare(
                matrix.type, kind, address(x), *longs(stride, num_inputs, begin, end),
                address(prepared),
            )  # fmt: skip
        accumulate = out is not None
        if out is None:
            out = np.full((rows, num_outputs), np.nan, np.float32)
        for begin, end in ranges(num_outputs, cuts):
            self.c.ts_linear_multiply(
                matrix.type, *longs(num_outputs, num_inputs), address(packed), kind,
                address(prepared), *longs(rows, begin, end), address(out),
                *longs(out.strides[0] // 4), int(accumulate),
            )  # fmt: skip
        return out


def longs(*values: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(value) for value in values)


def ranges(num_outputs: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return group ranges of all outputs, cut at the given group numbers."""
    ends = [*(cut for cut in cuts if cut < -(-num_outputs // 16)), -(-num_outputs // 16)]
    return list(zip([0, *ends], ends, strict=False))


@cache
def library(level: str) -> Library:
    """Return one level's interface; skip the test if the machine cannot run it."""
    return Library(level)


# Matrices and rows


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even bfloat16; return the uint16 bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_matrix(kind: int, shape: tuple[int, int], rng: np.random.Generator) -> Matrix:
    if kind in BLOCK_TYPES:
        return block_matrix(kind, random_source(NAMES[kind], shape, rng))
    exact = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    if kind == F16:
        source: np.ndarray = exact.astype(np.float16)
        exact = source.astype(np.float32)
    elif kind == BF16:
        source = bfloat16(exact)
        exact = from_bfloat16(source)
    else:
        source = exact.copy()
    return Matrix(kind, source, exact)


def block_matrix(kind: int, source: np.ndarray) -> Matrix:
    """Take blocks (outputs, bytes) apart, and check that their parts make the exact weights."""
    exact = FORMATS_BY_KERNEL_ID[kind].dequantize(source)
    parts = take_apart(NAMES[kind], source)
    assert same_bits(parts.weights(), exact)
    return Matrix(kind, source, exact, parts)


def whole_blocks(kind: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Widen a shape until its rows fill the blocks of the type."""
    size = FORMATS_BY_KERNEL_ID[kind].block_size
    return shape[0], -(-shape[1] // size) * size


def random_rows(num_rows: int, num_inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows with outliers, zero blocks, and whole rows of other magnitudes."""
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 100
    x *= (10.0 ** rng.integers(-6, 7, (num_rows, 1))).astype(np.float32)
    x[:, : num_inputs // 64 * 32] *= rng.random((num_rows, 1)) < 0.8
    return x


# The twins


def quantize_rows(x: np.ndarray, max_code: int) -> tuple[np.ndarray, np.ndarray]:
    """Round activations to at most `max_code`.

    Returns scales (rows, blocks) float32 and q (rows, blocks, 32) int64.
    """
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    usable = amax >= np.float32(2.0**-100)
    scales = np.where(usable, amax / np.float32(max_code), np.float32(0)).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(usable, np.float32(1) / scales, np.float32(0)).astype(np.float32)
    q = np.rint(blocks * inverse[..., None]).astype(np.int64)
    assert np.abs(q).max(initial=0) <= max_code
    return scales, q


def rest_of_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What 8 bits lack to 15 in a row's fine blocks: as `quantize_rows` returns it.

    Fine is, in each stretch, the eighth of blocks with the largest activations.
    """
    scales, fine = quantize_rows(x, MOST_15_BITS)
    _, coarse = quantize_rows(x, MOST_8_BITS)
    amax = np.abs(x.reshape(len(x), -1, 32)).max(axis=-1)
    is_fine = np.zeros(amax.shape, bool)
    for begin in range(0, amax.shape[1], MIXED_STRETCH):
        order = np.argsort(-amax[:, begin : begin + MIXED_STRETCH], axis=1, kind="stable")
        fine_columns = begin + order[:, : -(-order.shape[1] // MIXED_SHARE)]
        np.put_along_axis(is_fine, fine_columns, values=True, axis=1)
    return scales, np.where(is_fine[..., None], fine - 128 * coarse, 0)


def multiply_blocks(
    matrix: Matrix, x: np.ndarray, fused: bool, row_kind: int = GENERATED
) -> np.ndarray:
    """Compute the products of block formats step by step: (rows, outputs) float32."""
    if row_kind == COARSE:
        return _sum_blocks(matrix, *quantize_rows(x, MOST_8_BITS), fused)
    if row_kind == MIXED and NAMES[matrix.type] in MIXED_FORMATS:
        coarse = _sum_blocks(matrix, *quantize_rows(x, MOST_8_BITS), fused)
        return np.asarray(coarse + multiply_rest(matrix, x, fused))
    return _sum_blocks(matrix, *quantize_rows(x, MOST_15_BITS), fused)


def multiply_rest(matrix: Matrix, x: np.ndarray, fused: bool) -> np.ndarray:
    """What mixed rows add to coarse ones: (rows, outputs) float32."""
    return _sum_blocks(matrix, *rest_of_rows(x), fused)


def _sum_blocks(matrix: Matrix, scales: np.ndarray, q: np.ndarray, fused: bool) -> np.ndarray:
    """`fused` multiply-adds round once: 64 bits of mantissa hold the product exactly, and the sum
    closely enough that a second rounding could only show in one case of 2^40.
    """
    parts = matrix.parts
    assert parts is not None
    num_subs, size = parts.quants.shape[1:]
    q = q.reshape(len(q), num_subs, size)
    scales = np.repeat(scales, 32 // size, axis=1)
    sums = q.sum(axis=-1).astype(np.float32) * scales
    total = np.zeros((len(q), len(matrix.exact)), np.float32)
    wide: type[np.floating] = np.longdouble if fused else np.float32

    def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        wider = a.astype(wide) * b.astype(wide) + c.astype(wide)
        return np.asarray(wider, np.float32)

    # Exact in float64, whose products are fast: at most 2^8 * 2^14 * 2^5.
    dots = np.einsum("rsi,osi->sro", q.astype(np.float64), parts.quants.astype(np.float64))
    for sub in range(num_subs):
        factor = scales[:, sub, None] * parts.scales[None, :, sub]
        total = multiply_add(dots[sub].astype(np.float32), factor, total)
        if parts.minimums.size:
            minimums = np.broadcast_to(parts.minimums[:, sub], total.shape)
            total = multiply_add(minimums, sums[:, sub, None], total)
    return total


def multiply_floats(matrix: Matrix, x: np.ndarray, fused: bool) -> np.ndarray:
    """Compute the products of float formats: even and odd inputs summed apart, then added."""
    wide: type[np.floating] = np.longdouble if fused else np.float32
    sums: np.ndarray = np.zeros((2, len(x), len(matrix.exact)), np.float32)
    for i in range(x.shape[1]):
        product = x[:, i, None].astype(wide) * matrix.exact[None, :, i].astype(wide)
        sums[i % 2] = (product + sums[i % 2].astype(wide)).astype(np.float32)
    return np.asarray(sums[0] + sums[1])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def close(actual: np.ndarray, matrix: Matrix, x: np.ndarray, tolerance: float) -> bool:
    """Whether every output is near the exact product, relative to its terms' magnitudes."""
    exact = x.astype(np.float64) @ matrix.exact.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(matrix.exact).T.astype(np.float64)
    if (parts := matrix.parts) is not None:  # an error of q meets the weight and its parts
        amax = np.repeat(np.abs(x.reshape(len(x), -1, 32)).max(axis=-1), 32, axis=-1)
        largest = np.abs(parts.scales)[..., None] * (np.abs(parts.quants) + 1)
        if parts.minimums.size:
            largest = largest + np.abs(parts.minimums)[..., None]
        size += amax.astype(np.float64) @ largest.reshape(matrix.exact.shape).T
    return bool(np.all(np.abs(actual - exact) <= tolerance * size + 1e-30))
