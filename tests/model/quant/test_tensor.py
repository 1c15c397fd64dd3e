"""A stored tensor: its shape, and the rows and columns that it returns."""

from __future__ import annotations

import numpy as np
import pytest

from support.random_blocks import in_format
from twostroke.model.quant import FORMATS, Format, QuantTensor


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_rows_and_columns_equal_those_of_the_whole(fmt: Format) -> None:
    values = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    tensor = in_format(values, fmt.name)
    dequantized = tensor.dequantize()
    assert dequantized.shape == (40, 512)
    for rows in (slice(0, 1), slice(7, 23), slice(39, None), slice(5, 5)):
        assert np.array_equal(tensor.dequantize(rows), dequantized[rows])
    assert np.array_equal(tensor.part(7, 23).dequantize(), dequantized[7:23])
    assert np.array_equal(tensor.columns(256, 512).dequantize(), dequantized[:, 256:])


def test_a_tensor_larger_than_one_chunk_is_decoded_whole() -> None:
    values = np.random.default_rng(1).standard_normal((5000, 128)).astype(np.float32)
    tensor = QuantTensor.from_floats(values, FORMATS["F32"])
    assert np.array_equal(tensor.dequantize(), values)
    assert np.array_equal(tensor.dequantize(slice(4000, 5000)), values[4000:])


def test_vectors_and_stacks_keep_their_shape() -> None:
    vector = QuantTensor.from_floats(np.ones(64, dtype=np.float32), FORMATS["Q8_0"])
    assert vector.data.shape == (1, 68)
    assert vector.dequantize().shape == (64,)
    stack = QuantTensor.from_floats(np.ones((3, 4, 32), dtype=np.float32), FORMATS["Q4_0"])
    assert stack.data.shape == (12, 18)
    assert (stack.num_rows, stack.num_values, stack.num_bytes) == (12, 384, 216)
    assert stack.dequantize().shape == (3, 4, 32)


def test_bytes_that_do_not_match_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="needs uint8"):
        QuantTensor(FORMATS["Q8_0"], (2, 32), np.zeros((2, 33), dtype=np.uint8))
