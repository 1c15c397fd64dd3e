"""The native matrix products through their C interface, and slow NumPy twins of them."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from twostroke.core import env

ROOT = Path(__file__).parents[2]
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
NAMES = {F32: "F32", F16: "F16", Q4_0: "Q4_0", Q4_1: "Q4_1", Q8_0: "Q8_0", BF16: "BF16"}
BLOCK_TYPES = (Q4_0, Q4_1, Q8_0)
TYPES = tuple(NAMES)
GENERATED, PROMPT = 0, 1
NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"},
    "amx_emulated": {"avx512_vnni", "avx512_bf16"},
    "amx": {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}


# The libraries


def build_dir() -> Path:
    """The folder of native libraries; builds them if none is given and none is there."""
    if (folder := env.native_dir()) is not None:
        return folder
    folder = ROOT / "build" / "native"
    if not list(folder.glob("libtwostroke_*.so")):
        search = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        cmake, ninja = (shutil.which(tool, path=search) for tool in ("cmake", "ninja"))
        if cmake is None or ninja is None:
            pytest.skip("cmake and ninja are needed to build the native libraries")
        make = [cmake, "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja"]
        subprocess.run([*make, f"-DCMAKE_MAKE_PROGRAM={ninja}"], check=True)
        subprocess.run([ninja, "-C", str(folder)], check=True)
    return folder


def processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def aligned(num_bytes: int) -> np.ndarray:
    """Zeroed bytes (num_bytes) that begin on a 64-byte line."""
    buffer = np.zeros(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in GGUF's layout: `source` bytes, and the exact weights (outputs, inputs)."""

    type: int
    source: np.ndarray
    exact: np.ndarray
    scales: np.ndarray  # (outputs, blocks) float32; empty for float formats
    mins: np.ndarray
    quants: np.ndarray  # (outputs, blocks, 32) int64: what the integer dot products multiply


class Library:
    """One level's C interface."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.ts_linear_level.restype = ctypes.c_char_p
        for name in ("packed_bytes", "prepared_bytes"):
            getattr(self.c, f"ts_linear_{name}").restype = ctypes.c_int64
        assert self.c.ts_linear_request_tiles() == 1
        self.name: str = self.c.ts_linear_level().decode()

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


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def ranges(num_outputs: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Group ranges of all outputs, cut at the given group numbers."""
    ends = [*(cut for cut in cuts if cut < -(-num_outputs // 16)), -(-num_outputs // 16)]
    return list(zip([0, *ends], ends, strict=False))


LIBRARIES: dict[str, Library] = {}


def library(level: str) -> Library:
    if level not in LIBRARIES:
        if level != "portable" and platform.machine() not in {"x86_64", "AMD64"}:
            pytest.skip(f"{level} is for x86-64")
        if missing := NEEDS[level] - processor_flags():
            pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
        path = build_dir() / f"libtwostroke_{level}.so"
        if not path.exists():
            pytest.skip(f"{path.name} was not built")
        LIBRARIES[level] = Library(path)
    return LIBRARIES[level]


# Matrices and rows


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even bfloat16; return the uint16 bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_matrix(
    kind: int, shape: tuple[int, int], rng: np.random.Generator, scale: float = 0.02
) -> Matrix:
    if kind in BLOCK_TYPES:
        return random_blocks(kind, shape, rng, scale)
    exact = (rng.standard_normal(shape) * scale).astype(np.float32)
    empty = np.zeros(0, np.float32)
    if kind == F16:
        source: np.ndarray = exact.astype(np.float16)
        exact = source.astype(np.float32)
    elif kind == BF16:
        source = bfloat16(exact)
        exact = from_bfloat16(source)
    else:
        source = exact.copy()
    return Matrix(kind, source, exact, empty, empty, empty)


def random_blocks(
    kind: int, shape: tuple[int, int], rng: np.random.Generator, scale: float
) -> Matrix:
    """Random quants with the extremes among them, scales of both signs, some blocks zero."""
    num_outputs, num_inputs = shape
    blocks = (num_outputs, num_inputs // 32)
    d = (rng.standard_normal(blocks) * scale).astype(np.float16)
    m = (rng.standard_normal(blocks) * scale).astype(np.float16)
    d[rng.random(blocks) < 0.05] = 0
    d[rng.random(blocks) < 0.05] = np.float16(6e-8)  # the smallest subnormal
    if kind == Q8_0:
        quants = rng.integers(-128, 128, (*blocks, 32))
        quants[rng.random(blocks) < 0.1] = -128
        body = quants.astype(np.int8).view(np.uint8)
        used = quants
    else:
        quants = rng.integers(0, 16, (*blocks, 32))
        quants[rng.random(blocks) < 0.1] = 15
        body = (quants[..., :16] | quants[..., 16:] << 4).astype(np.uint8)
        used = quants - 8 if kind == Q4_0 else quants
    head = [d[..., None].view(np.uint8)]
    exact = used.astype(np.float32) * d.astype(np.float32)[..., None]
    if kind == Q4_1:
        head.append(m[..., None].view(np.uint8))
        exact = exact + m.astype(np.float32)[..., None]
    source = np.ascontiguousarray(np.concatenate([*head, body], axis=-1))
    return Matrix(
        kind, source, exact.reshape(shape), d.astype(np.float32), m.astype(np.float32),
        used.astype(np.int64),
    )  # fmt: skip


def random_rows(num_rows: int, num_inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Rows with outliers, zero blocks, and whole rows of other magnitudes."""
    x = rng.standard_normal((num_rows, num_inputs)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 100
    x *= (10.0 ** rng.integers(-6, 7, (num_rows, 1))).astype(np.float32)
    x[:, : num_inputs // 64 * 32] *= rng.random((num_rows, 1)) < 0.8
    return x


# The twins


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """15-bit activations: scales (rows, blocks) float32 and q (rows, blocks, 32) int64."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    usable = amax >= np.float32(2.0**-100)
    scales = np.where(usable, amax / np.float32(16256), np.float32(0)).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(usable, np.float32(1) / scales, np.float32(0)).astype(np.float32)
    q = np.rint(blocks * inverse[..., None]).astype(np.int64)
    assert np.abs(q).max(initial=0) <= 16256
    return scales, q


def multiply_blocks(matrix: Matrix, x: np.ndarray, fused: bool) -> np.ndarray:
    """The block formats' arithmetic, step by step: (rows, outputs) float32.

    `fused` multiply-adds round once: 64 bits of mantissa hold the product exactly, and the sum
    closely enough that a second rounding could only show in one case of 2^40.
    """
    scales, q = quantize_rows(x)
    sums = q.sum(axis=-1).astype(np.float32) * scales
    total = np.zeros((len(x), len(matrix.exact)), np.float32)
    wide: type[np.floating] = np.longdouble if fused else np.float32

    def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        wider = a.astype(wide) * b.astype(wide) + c.astype(wide)
        return np.asarray(wider, np.float32)

    for block in range(scales.shape[1]):
        dots = (q[:, block] @ matrix.quants[:, block].T).astype(np.float32)
        factor = scales[:, block, None] * matrix.scales[None, :, block]
        total = multiply_add(dots, factor, total)
        if matrix.type == Q4_1:
            total = multiply_add(
                np.broadcast_to(matrix.mins[:, block], total.shape), sums[:, block, None], total
            )
    return total


def multiply_floats(matrix: Matrix, x: np.ndarray, fused: bool) -> np.ndarray:
    """The float formats' arithmetic: even and odd inputs summed apart, then added."""
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
    if matrix.type in BLOCK_TYPES:  # an error of q meets the whole weight, never its parts
        amax = np.repeat(np.abs(x.reshape(len(x), -1, 32)).max(axis=-1), 32, axis=-1)
        largest = np.abs(matrix.exact) + 16 * np.repeat(np.abs(matrix.scales), 32, axis=-1)
        size += amax.astype(np.float64) @ largest.T
    return bool(np.all(np.abs(actual - exact) <= tolerance * size + 1e-30))
