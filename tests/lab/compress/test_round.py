"""Rounding with calibration: products change less than with plain rounding, in every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from support.plain_rounding import plain_rounding
from twostroke.lab.compress.grids import GRIDS, group_grid
from twostroke.lab.compress.round import damped_moments, outer_products, round_matrix, round_to
from twostroke.model.quant import FORMATS, QuantTensor, grouped
from twostroke.model.weights.gguf import read_gguf
from twostroke.model.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.quant import Floats


def case(rng: np.random.Generator, width: int, outputs: int) -> tuple[Floats, Floats]:
    """Return correlated inputs of a matrix product, and its matrix."""
    mixing = rng.standard_normal((16, width))
    inputs = rng.standard_normal((400, 16)) @ mixing + rng.standard_normal((400, width)) / 4
    weight = rng.standard_normal((outputs, width)) * np.exp(rng.standard_normal((outputs, 1)))
    return inputs.astype(np.float32), weight.astype(np.float32)


def test_compensated_rounding_is_closer_than_plain_rounding() -> None:
    inputs, weight = case(np.random.default_rng(0), 256, 48)
    moments = damped_moments([outer_products(inputs)])
    for name in GRIDS:
        plain = QuantTensor.from_floats(weight, FORMATS[name])
        rounded = round_matrix(weight, moments, name)
        errors = [
            np.linalg.norm(inputs @ (tensor.dequantize() - weight).T) for tensor in (plain, rounded)
        ]
        assert errors[1] < 0.35 * errors[0], name


def test_groups_of_one_sign_reach_zero_with_their_zero_point() -> None:
    """The zero point must be one of the levels, so the range of a group must include zero."""
    rng = np.random.default_rng(0)
    fmt, grid = grouped(4, 32, "f16", zero=True), group_grid(4, 32, "F16")
    inputs, _ = case(rng, 128, 8)
    moments = damped_moments([outer_products(inputs)])
    near_five = 5 + rng.random((24, 128)).astype(np.float32)
    for weight in (near_five, -near_five, np.full_like(near_five, 0.37), near_five - 5.5):
        plain = QuantTensor.from_floats(weight, fmt)
        rounded = round_to(weight, moments, grid, fmt)
        errors = [np.linalg.norm(inputs @ (x.dequantize() - weight).T) for x in (plain, rounded)]
        assert errors[1] < errors[0] + 1e-3 * np.linalg.norm(inputs @ weight.T)
        right = plain_rounding(weight, moments, grid)
        losses = [
            np.einsum("oi,ij,oj->", off, moments.damped, off)
            for off in (rounded.dequantize() - weight, right - weight)
        ]
        assert losses[0] < 1.1 * losses[1] + 1e-3


def test_inputs_that_are_all_zero_leave_weights_rounded_plainly() -> None:
    _, weight = case(np.random.default_rng(0), 256, 8)
    moments = damped_moments([np.zeros((256, 256), np.float32)])
    for name in GRIDS:
        error, plain = (
            np.linalg.norm(tensor.dequantize() - weight)
            for tensor in (
                round_matrix(weight, moments, name),
                QuantTensor.from_floats(weight, FORMATS[name]),
            )
        )
        assert error < 1.1 * plain, name


def test_kernels_round_as_their_definition_does_with_any_number_of_threads() -> None:
    for seed, (width, outputs) in enumerate([(256, 70), (768, 33), (96, 32), (576, 20)]):
        inputs, weight = case(np.random.default_rng(seed), width, outputs)
        weight[3, 40:72] = 0  # also a group of zeros
        moments = damped_moments([outer_products(inputs)])
        for name, grid in GRIDS.items():
            if width % FORMATS[name].block_size:
                continue
            right = plain_rounding(weight, moments, grid)
            single, three = (round_matrix(weight, moments, name, count) for count in (1, 3))
            np.testing.assert_array_equal(single.data, three.data)
            last = round_matrix(weight[-1:], moments, name)
            np.testing.assert_array_equal(single.data[-1:], last.data)
            values = single.dequantize()
            # Sums in another order turn ties, and then all columns that make up for them.
            same = np.isclose(values, right, rtol=1e-5, atol=1e-6)
            is_coarse = FORMATS[name].bits_per_value < 6
            assert same.mean() > (0.9 if is_coarse else 0.5), name
            losses = [
                np.einsum("oi,ij,oj->", off, moments.damped, off)
                for off in (values - weight, right - weight)
            ]
            assert abs(losses[0] / losses[1] - 1) < (0.02 if is_coarse else 0.05), name


def test_a_written_file_has_the_metadata_and_tensors_it_was_given(tmp_path: Path) -> None:
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    tensors = {name: QuantTensor.from_floats(values, FORMATS[name]) for name in ("Q8_0", "F32")}
    metadata = {"a": 7, "b": 0.5, "c": "word", "d": True}
    write_gguf(tmp_path / "one.gguf", metadata, tensors)
    first = read_gguf(tmp_path / "one.gguf")
    write_gguf(tmp_path / "two.gguf", {k: first.metadata.raw(k) for k in metadata}, first.tensors)  # type: ignore[attr-defined]
    second = read_gguf(tmp_path / "two.gguf")
    assert dict(second.metadata) == metadata
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(second.tensors[name].data, tensor.data)
