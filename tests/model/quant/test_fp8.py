"""E4M3 in groups: the values of a block, by its definition, and the kernels' form."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.model.quant import FORMATS, e4m3, e4m3_tensor
from twostroke.model.quant.floats import E4M3


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0x42), codes)


@pytest.mark.parametrize(("group", "kernels"), [(128, "F32"), (384, "F32"), (32, "BF16")])
def test_values_are_numbers_times_scales_in_float32(group: int, kernels: str) -> None:
    rng = np.random.default_rng(group)
    codes = random_codes(rng, 5, 384)
    scales = rng.standard_normal((5, 384 // group)).astype(np.float32)
    if kernels == "BF16":
        scales = np.ldexp(np.float32(1.875), rng.integers(-30, 30, scales.shape)).astype(np.float32)
    tensor = e4m3_tensor(codes, scales)
    expected = np.empty((5, 384), np.float32)
    for row in range(5):
        for column in range(384):
            expected[row, column] = E4M3[codes[row, column]] * scales[row, column // group]
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    stored = FORMATS[kernels]
    assert tensor.format.kernel_id == stored.kernel_id
    assert tensor.format.multiplies_floats
    rows = tensor.format.to_kernel(tensor.data)
    np.testing.assert_array_equal(stored.dequantize(rows), expected)
    assert tensor.packed_bytes == rows.nbytes
    assert tensor.num_bytes == 5 * (384 + (384 // group) * stored.block_bytes)


def test_rounding_gives_the_nearest_number_of_each_group() -> None:
    values = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    values[2] = 0
    rounded = e4m3(128).dequantize(e4m3(128).quantize(values))
    largest = np.abs(values).reshape(4, 2, 128).max(axis=2).repeat(128, axis=1)
    # Four significant bits, but no less than half of the smallest step.
    assert (np.abs(rounded - values) <= np.maximum(np.abs(values) / 16, largest / 448 / 1024)).all()
    with pytest.raises(ValueError, match="E4M3_G128_BF16 is read, not written"):
        e4m3(128, "bf16").quantize(values)
