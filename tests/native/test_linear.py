"""The native matrix products of every level against slow NumPy twins of the same arithmetic."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.block_formats import set_halves
from support.native import IS_ARM, NEEDS, VECTOR_LEVELS
from support.native_linear import (
    BF16,
    BLOCK_TYPES,
    COARSE,
    F16,
    F32,
    FLOAT_TYPES,
    GENERATED,
    MIXED,
    MIXED_FORMATS,
    NAMES,
    PRECISE_PROMPT,
    PROMPT,
    Q4_0,
    Q4_1,
    Q6_K,
    Q8_0,
    ROW_KINDS,
    TYPES,
    Library,
    Matrix,
    bfloat16,
    block_matrix,
    close,
    from_bfloat16,
    library,
    multiply_blocks,
    multiply_floats,
    multiply_rest,
    random_matrix,
    random_rows,
    same_bits,
    whole_blocks,
)
from twostroke.model.quant import QuantTensor, grouped

if TYPE_CHECKING:
    from collections.abc import Iterator

# (outputs, inputs), widened to whole blocks, and rows
SHAPES = [(16, 32), (1, 64), (40, 96), (33, 288), (55, 672)]
CASES = [
    *zip(SHAPES, (1, 2, 3, 8, 21), strict=True),
    ((100, 96), 37),
    ((56, 96), 23),  # many rows, then a few
    ((50, 160), 70),
    ((40, 288), 7),  # in one kernel for few rows, where that takes eight
    ((40, 1280), 18),  # more inputs than many rows meet at a time
    ((5, 4096), 90),  # more rows than are kept in a cache
]
MANY_BLOCKS = ((3, 33_024), 5)  # more blocks than mixed rows order at once


OTHER_PORTS = "avx512, tuned for other processors than this"


@pytest.fixture(params=[*NEEDS, OTHER_PORTS])
def lib(request: pytest.FixtureRequest) -> Iterator[Library]:
    lib = library(request.param.partition(",")[0])
    if request.param != OTHER_PORTS:
        yield lib
        return
    with lib.ports_of_another():
        yield lib


@pytest.fixture(params=["amx_emulated", "amx"])
def tiles(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


def test_unpacked_rows_are_the_exact_weights(lib: Library) -> None:
    for kind, shape in product(TYPES, SHAPES):
        matrix = random_matrix(kind, whole_blocks(kind, shape), np.random.default_rng(1))
        assert same_bits(lib.unpack(matrix, lib.pack(matrix, cuts=(1, 3))), matrix.exact)


def random_case(
    kind: int, shape: tuple[int, int], num_rows: int, seed: int | None = None
) -> tuple[Matrix, np.ndarray]:
    """Return a matrix of about this shape and rows for it, always the same for the same case."""
    matrix, x = _shared_case(kind, shape, num_rows, num_rows if seed is None else seed)
    return matrix, x.copy()


@cache
def _shared_case(
    kind: int, shape: tuple[int, int], num_rows: int, seed: int
) -> tuple[Matrix, np.ndarray]:
    """Make a case once for all levels."""
    rng = np.random.default_rng(seed)
    matrix = random_matrix(kind, whole_blocks(kind, shape), rng)
    return matrix, random_rows(num_rows, matrix.exact.shape[1], rng)


@cache
def twin_of(
    kind: int, shape: tuple[int, int], num_rows: int, row_kind: int, fused: bool
) -> np.ndarray:
    """Return what the plain twin computes for a case: once for all levels that round alike.

    It is near the exact product.
    """
    matrix, x = random_case(kind, shape, num_rows)
    if kind in BLOCK_TYPES:
        twin = multiply_blocks(matrix, x, fused, row_kind)
    else:
        twin = multiply_floats(matrix, x, fused)
    assert close(twin, matrix, x, 1e-4 if row_kind == GENERATED else 1e-2)
    return twin


def test_rows_equal_the_twin_bit_for_bit(lib: Library) -> None:
    fused = lib.name != "portable" or IS_ARM
    for kind, (shape, num_rows) in [
        *product(TYPES, CASES),
        *product(BLOCK_TYPES, [MANY_BLOCKS]),
    ]:
        matrix, x = random_case(kind, shape, num_rows)
        for row_kind in (GENERATED, COARSE, MIXED) if kind in BLOCK_TYPES else (GENERATED,):
            actual = lib.multiply(matrix, x, row_kind)
            case = (NAMES[kind], shape, num_rows, row_kind)
            assert same_bits(actual, twin_of(kind, shape, num_rows, row_kind, fused)), case


def test_activation_bits_do_not_matter_for_float_weights(lib: Library) -> None:
    for kind in FLOAT_TYPES:
        rng = np.random.default_rng(12)
        matrix = random_matrix(kind, (72, 192), rng)
        x = random_rows(19, 192, rng)
        for row_kind in (COARSE, MIXED):
            assert same_bits(lib.multiply(matrix, x, row_kind), lib.multiply(matrix, x, GENERATED))


def test_prompt_rows_equal_generated_rows_below_amx(lib: Library) -> None:
    if lib.name.startswith("amx"):
        pytest.skip("prompt rows go through tiles")
    for kind in TYPES:
        matrix, x = random_case(kind, (72, 192), 19, seed=3)
        for row_kind in (PROMPT, PRECISE_PROMPT):
            assert same_bits(lib.multiply(matrix, x, row_kind), lib.multiply(matrix, x, GENERATED))


def test_tiles_are_near_the_product_of_rounded_operands(tiles: Library) -> None:
    for kind, (shape, num_rows) in product(TYPES, CASES):
        matrix, x = random_case(kind, shape, num_rows)
        weights, rows = matrix.exact, x
        if kind != F32:
            weights, rows = from_bfloat16(bfloat16(weights)), from_bfloat16(bfloat16(x))
        exact = rows.astype(np.float64) @ weights.T.astype(np.float64)
        size = np.abs(rows).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
        actual = tiles.multiply(matrix, x, PROMPT)
        assert np.all(np.abs(actual - exact) <= 1e-6 * size + 1e-30)


def test_split_tiles_are_near_the_exact_product(tiles: Library) -> None:
    for kind, (shape, num_rows) in product(TYPES, CASES):
        matrix, x = random_case(kind, shape, num_rows)
        exact = x.astype(np.float64) @ matrix.exact.T.astype(np.float64)
        size = np.abs(x).astype(np.float64) @ np.abs(matrix.exact).T.astype(np.float64)
        # Each operand keeps about 16 bits; the product of the rounding errors is left out.
        max_error = 2.0**-15 * size + 1e-30
        assert np.all(np.abs(tiles.multiply(matrix, x, PRECISE_PROMPT) - exact) <= max_error)


def test_tiles_do_not_depend_on_how_many_rows_cut_a_product(tiles: Library) -> None:
    for kind, row_kind in product((BF16, Q4_1), (PROMPT, PRECISE_PROMPT)):
        matrix, x = random_case(kind, (200, 800), 700, seed=7)  # 13 groups, of which 10 go together
        together = tiles.multiply(matrix, x, row_kind)
        exact = x.astype(np.float64) @ matrix.exact.T.astype(np.float64)
        size = np.abs(x).astype(np.float64) @ np.abs(matrix.exact).T.astype(np.float64)
        assert np.all(np.abs(together - exact) <= 2.0**-7 * size + 1e-30)
        for count in (5, 32, 50):
            assert same_bits(tiles.multiply(matrix, x[:count], row_kind), together[:count])


def test_a_row_does_not_depend_on_other_rows_or_on_the_split(lib: Library) -> None:
    for kind, row_kind in product(TYPES, ROW_KINDS):
        matrix, x = random_case(kind, (121, 160), 45, seed=4)
        together = lib.multiply(matrix, x, row_kind)
        for cuts in ((1, 2, 3), (5,)):
            assert same_bits(lib.multiply(matrix, x, row_kind, cuts), together)
        few = [(20, 20 + count) for count in range(1, 17)]
        for begin, end in (*few, (5, 6), (7, 24), (12, 45)):
            part = np.ascontiguousarray(x[begin:end])
            assert same_bits(lib.multiply(matrix, part, row_kind), together[begin:end])
        order = np.random.default_rng(4).permutation(len(x))
        assert same_bits(lib.multiply(matrix, x[order], row_kind), together[order])


def test_accumulation_adds_to_the_output_and_touches_nothing_else(lib: Library) -> None:
    for kind, row_kind in product(TYPES, ROW_KINDS):
        rng = np.random.default_rng(5)
        matrix = random_matrix(kind, whole_blocks(kind, (37, 96)), rng)
        num_inputs = matrix.exact.shape[1]
        x = random_rows(23, 320, rng)[:, :num_inputs]  # rows apart by more than their length
        plain = lib.multiply(matrix, x, row_kind)
        before = rng.standard_normal((23, 50)).astype(np.float32)
        out = before.copy()
        lib.multiply(matrix, x, row_kind, out=out)
        expected = before[:, :37] + plain
        if row_kind == MIXED and NAMES[kind] in MIXED_FORMATS:  # two products, one after the other
            rest = multiply_rest(matrix, x, lib.name != "portable" or IS_ARM)
            expected = before[:, :37] + lib.multiply(matrix, x, COARSE) + rest
        assert same_bits(out[:, :37], expected)
        assert same_bits(np.ascontiguousarray(out[:, 37:]), np.ascontiguousarray(before[:, 37:]))


def test_vector_levels_agree_bit_for_bit() -> None:
    for kind in TYPES:
        matrix, x = random_case(kind, (200, 320), 33, seed=6)
        for row_kind in (GENERATED, COARSE, MIXED):
            first, second = (
                library(level).multiply(matrix, x, row_kind) for level in VECTOR_LEVELS
            )
            assert same_bits(first, second)


def test_generated_rows_on_amx_have_the_bits_of_avx512(tiles: Library) -> None:
    for kind in TYPES:
        matrix, x = random_case(kind, (48, 128), 9, seed=7)
        for row_kind in (GENERATED, COARSE, MIXED):
            expected = library("avx512").multiply(matrix, x, row_kind)
            assert same_bits(tiles.multiply(matrix, x, row_kind), expected)


def test_float_formats_take_any_number_of_inputs(lib: Library) -> None:
    for kind, num_inputs, row_kind in product(FLOAT_TYPES, (1, 7, 33, 95), ROW_KINDS):
        rng = np.random.default_rng(8)
        matrix = random_matrix(kind, (20, num_inputs), rng)
        x = random_rows(18, num_inputs, rng)
        assert same_bits(lib.unpack(matrix, lib.pack(matrix)), matrix.exact)
        tolerance = 1e-6 if kind == F32 else 1e-2
        assert close(lib.multiply(matrix, x, row_kind), matrix, x, tolerance)


def test_huge_and_tiny_activations(lib: Library) -> None:
    for kind, magnitude in product(BLOCK_TYPES, [1e-35, 1e-20, 1e20, 1e30]):
        rng = np.random.default_rng(9)
        matrix = random_matrix(kind, whole_blocks(kind, (16, 64)), rng)
        x = (rng.standard_normal((4, matrix.exact.shape[1])) * magnitude).astype(np.float32)
        assert close(lib.multiply(matrix, x), matrix, x, 1e-4)


def test_extreme_codes_and_activations_do_not_overflow(lib: Library) -> None:
    for kind, fill in product(BLOCK_TYPES, [0x00, 0x7F, 0x80, 0xFF]):
        rng = np.random.default_rng(10)
        source = np.full_like(random_matrix(kind, whole_blocks(kind, (48, 96)), rng).source, fill)
        set_halves(NAMES[kind], source, rng)
        matrix = block_matrix(kind, source)
        x = np.full((40, matrix.exact.shape[1]), 3, np.float32)
        x[::2] *= -1
        fused = lib.name != "portable" or IS_ARM
        for row_kind in (GENERATED, COARSE, MIXED):
            expected = multiply_blocks(matrix, x, fused, row_kind)
            for count in (1, 2, 3, 4, 7, 40):  # each kernel for few rows, and that for many
                actual = lib.multiply(matrix, x[:count], row_kind)
                assert same_bits(actual, expected[:count])


def test_a_row_that_is_not_finite_changes_no_other(lib: Library) -> None:
    for kind, bad, row_kind in product(TYPES, (np.nan, np.inf), ROW_KINDS):
        matrix, x = random_case(kind, (48, 320), 37, seed=11)
        clean = lib.multiply(matrix, x, row_kind)
        spoilt = [2, 36]  # among many rows, and alone after them
        x[spoilt, 40] = bad
        out = lib.multiply(matrix, x, row_kind)
        assert not np.isfinite(out[spoilt]).any()
        assert same_bits(np.delete(out, spoilt, axis=0), np.delete(clean, spoilt, axis=0))
        few = lib.multiply(matrix, x[:7], row_kind)
        assert not np.isfinite(few[2]).any()
        assert same_bits(np.delete(few, 2, axis=0), np.delete(clean[:7], 2, axis=0))


def test_wrong_types_and_sizes_are_rejected(lib: Library) -> None:
    assert lib.packed_bytes(Q4_1, 16, 33) == -1
    assert lib.packed_bytes(Q6_K, 16, 32) == -1
    assert lib.packed_bytes(99, 16, 32) == -1
    assert lib.packed_bytes(F32, 0, 32) == -1
    assert lib.packed_bytes(F32, 17, 32) == 2 * 16 * 32 * 4


def test_block_formats_share_prepared_rows(lib: Library) -> None:
    shared = int(lib.name != "avx2")  # there codes of 8 bits meet int16
    assert lib.c.ts_linear_same_preparation(Q4_0, Q8_0, 0) == shared
    assert lib.c.ts_linear_same_preparation(Q4_1, Q4_0, 0) == 1
    assert lib.c.ts_linear_same_preparation(Q6_K, Q4_0, 0) == 1
    assert lib.c.ts_linear_same_preparation(F16, BF16, 0) == 1
    assert lib.c.ts_linear_same_preparation(F32, Q4_0, 0) == 0


def test_mixed_rows_are_shared_by_formats_that_mix(lib: Library) -> None:
    assert lib.c.ts_linear_same_preparation(Q4_1, Q4_0, 1) == 1
    assert lib.c.ts_linear_same_preparation(Q6_K, Q4_0, 1) == 0  # meets 15 bits
    assert lib.c.ts_linear_same_preparation(F16, BF16, 1) == 1


def test_whole_rows_share_a_scale_where_the_last_group_is_short(lib: Library) -> None:
    for bits, zero in ((4, False), (4, True), (8, False)):
        rng = np.random.default_rng(13)
        values = rng.standard_normal((20, 288)).astype(np.float32)
        tensor = QuantTensor.from_floats(values, grouped(bits, 288, "f32", zero=zero))
        fmt = tensor.format
        assert fmt.to_kernel is not None
        matrix = Matrix(fmt.kernel_id, fmt.to_kernel(tensor.data), tensor.dequantize())
        assert np.array_equal(lib.unpack(matrix, lib.pack(matrix)), matrix.exact)
        x = random_rows(18, 288, rng)
        size = np.abs(x).astype(np.float64).max(axis=1) * 288 * np.abs(matrix.exact).max() * 16
        exact = x.astype(np.float64) @ matrix.exact.T.astype(np.float64)
        assert np.all(np.abs(lib.multiply(matrix, x) - exact) <= 1e-4 * size[:, None] + 1e-30)
