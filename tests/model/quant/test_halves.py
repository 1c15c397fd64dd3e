"""The float16 scales of blocks: the term of each, and matrices with multiplied scales."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.quant.floats import SCALE_OFFSETS, multiply_scales, terms_by_scale


@pytest.mark.parametrize("name", SCALE_OFFSETS)
def test_a_matrix_is_linear_in_its_halves(name: str) -> None:
    rng = np.random.default_rng(1)
    fmt = FORMATS[name]
    values = rng.normal(0.1, 1.0, (3, 2 * fmt.block_size)).astype(np.float32)
    tensor = QuantTensor.from_floats(values, fmt)
    parts = terms_by_scale(tensor)
    total = sum(parts[1:], parts[0])
    np.testing.assert_allclose(total.reshape(values.shape), tensor.dequantize(), atol=1e-5)
    factors = tuple(rng.uniform(0.5, 2.0, part.shape[:2]).astype(np.float32) for part in parts)
    changed = multiply_scales(tensor, factors).dequantize()
    expected = sum(part * factor[..., None] for part, factor in zip(parts, factors, strict=True))
    np.testing.assert_allclose(changed, expected.reshape(values.shape), rtol=2e-3, atol=1e-2)


def test_factors_of_one_change_nothing() -> None:
    values = np.random.default_rng(2).normal(size=(4, 256)).astype(np.float32)
    tensor = QuantTensor.from_floats(values, FORMATS["Q4_K"])
    unit_factors = tuple(np.ones(part.shape[:2], np.float32) for part in terms_by_scale(tensor))
    assert np.array_equal(multiply_scales(tensor, unit_factors).data, tensor.data)
    assert not any(np.array_equal(part, 0 * part) for part in terms_by_scale(tensor))
