"""Grouped formats against plain loops over the parts of random groups."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from twostroke.model.quant import FORMATS_BY_KERNEL_ID, Format, QuantTensor, assemble, grouped
from twostroke.model.quant.floats import (
    E2M1,
    E4M3,
    E8M0,
    nearest_e2m1,
    nearest_e4m3,
    nearest_e8m0,
)
from twostroke.model.quant.grouped import KERNEL_FORMATS, NO_KERNEL, SCALE_BYTES

# bits, zero point, table
KINDS = [(4, False, None), (4, True, None), (8, False, None), (8, True, None), (4, False, "e2m1")]
GROUPS = (16, 32, 64, 128, 576)
# The largest error of a value in steps: coarse scales clip the ends of a group.
MOST_STEPS = {"f32": 2, "f16": 2, "bf16": 2.5, "e4m3": 20, "e8m0": 130}


def all_formats() -> list[tuple[Format, int, str, bool, str | None]]:
    return [
        (grouped(bits, group, scale, zero=zero, table=table), bits, scale, zero, table)
        for (bits, zero, table), group, scale in product(KINDS, GROUPS, SCALE_BYTES)
        if group != 16 or table
    ]


def random_scales(scale: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return stored scales (rows, groups, bytes), of both signs if the type has them."""
    values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    match scale:
        case "f16":
            return values.astype(np.float16)[..., None].view(np.uint8)
        case "bf16":
            upper = values.view(np.uint32) >> np.uint32(16)
            return upper.astype(np.uint16)[..., None].view(np.uint8)
        case "f32":
            return values[..., None].view(np.uint8)
    max_exponent = 255 if scale == "e8m0" else 127
    return rng.integers(0, max_exponent, (*shape, 1)).astype(np.uint8)


def plain_scale(scale: str, raw: np.ndarray) -> np.float32:
    """Decode one scale by its definition."""
    match scale:
        case "f16":
            return np.float32(raw.view(np.float16)[0])
        case "bf16":
            return np.float32((raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0])
        case "f32":
            return np.float32(raw.view(np.float32)[0])
        case "e8m0":
            return np.float32(2.0 ** (int(raw[0]) - 127))
    exponent, mantissa = int(raw[0]) >> 3, int(raw[0]) & 7
    if exponent == 0:
        return np.float32(mantissa / 8 * 2**-6)
    return np.float32((1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_decoding_equals_a_plain_loop_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for fmt, bits, scale, zero, table in all_formats():
        groups = 3
        codes = rng.integers(0, 1 << bits, (2, groups * fmt.block_size)).astype(np.uint8)
        scales = random_scales(scale, (2, groups), rng)
        zeros = rng.integers(0, 1 << bits, (2, groups)).astype(np.uint8) if zero else None
        tensor = assemble(fmt, codes, scales, zeros)
        plain = np.empty(codes.shape, np.float32)
        for row, i in np.ndindex(codes.shape):
            group, code = i // fmt.block_size, int(codes[row, i])
            factor = plain_scale(scale, scales[row, group])
            if table:
                value = np.float32(magnitudes[code & 7] * (-1 if code & 8 else 1))
            else:
                half = 1 << (bits - 1)
                value = np.float32(code - (half if zeros is None else int(zeros[row, group])))
            plain[row, i] = value * factor
        assert np.array_equal(tensor.dequantize().view(np.uint32), plain.view(np.uint32)), fmt.name


def test_kernels_get_the_same_values() -> None:
    rng = np.random.default_rng(1)
    for fmt, _, _, _, _ in all_formats():
        rows = rng.standard_normal((3, 1 if fmt.block_size == 576 else 2, fmt.block_size))
        tensor = QuantTensor.from_floats(rows.reshape(3, -1).astype(np.float32), fmt)
        if fmt.kernel_id == NO_KERNEL:
            continue
        data = tensor.data if fmt.to_kernel is None else fmt.to_kernel(tensor.data)
        values = FORMATS_BY_KERNEL_ID[fmt.kernel_id].dequantize(data)
        expected = tensor.dequantize()
        assert np.array_equal(values[:, : expected.shape[1]], expected), fmt.name
    assert all(FORMATS_BY_KERNEL_ID[fmt.kernel_id] is fmt for fmt in KERNEL_FORMATS)


def test_a_rounded_value_is_within_a_step_of_the_original() -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((16, 1152)).astype(np.float32)
    values[3] = 0
    values[4] = np.abs(values[4]) + 1
    for fmt, bits, scale, zero, table in all_formats():
        back = fmt.dequantize(fmt.quantize(values))
        groups = np.abs(values).reshape(16, -1, fmt.block_size).max(axis=2)
        span = 3 if table else ((1 << bits) - 1) / (2 if not zero else 1)
        step = np.repeat(groups / span * (2 if zero else 1), fmt.block_size, axis=1)
        assert (np.abs(back - values) <= MOST_STEPS[scale] * step + 1e-6).all(), fmt.name
        assert not back[3].any()


def test_what_a_format_holds_is_kept() -> None:
    for fmt, _, _, zero, _ in all_formats():
        if zero:  # a group need not reach both ends, which its scale is made from
            continue
        values = np.random.default_rng(3).standard_normal((4, fmt.block_size)).astype(np.float32)
        once = fmt.dequantize(fmt.quantize(values))
        twice = fmt.dequantize(fmt.quantize(once))
        assert np.abs(twice - once).max() <= np.abs(once - values).max(), fmt.name


def test_small_floats_are_rounded_to_themselves_and_ties_to_even() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert np.array_equal(nearest_e4m3(E4M3[codes]), codes)
    assert E4M3[[0x01, 0x08, 0x38, 0x7E]].tolist() == [2**-9, 2**-6, 1, 448]
    assert np.array_equal(nearest_e8m0(E8M0[:255]), np.arange(255))
    assert np.array_equal(E2M1[nearest_e2m1(E2M1)], E2M1)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0], np.float32)
    assert E2M1[nearest_e2m1(-ties)].tolist() == [0, -1, -1, -2, -2, -4, -4, -6]


def test_a_combination_without_a_format_is_refused() -> None:
    for wrong in ((3, 32, "f16"), (4, 40, "f16"), (4, 32, "f64")):
        with pytest.raises(ValueError, match="no format"):
            grouped(*wrong)
    with pytest.raises(ValueError, match="no format"):
        grouped(8, 32, "f16", table="e2m1")
    with pytest.raises(ValueError, match="do not fill"):
        QuantTensor.from_floats(np.ones((2, 96), np.float32), grouped(4, 64, "f16"))
