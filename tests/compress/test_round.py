"""Rounding with compensation: fewer errors in products than plain rounding, in every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.compress.round import GRIDS, moments_of, round_matrix
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights.gguf import read_gguf
from twostroke.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from pathlib import Path


def test_compensated_rounding_is_closer_than_plain_rounding() -> None:
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((16, 96))
    inputs = (rng.standard_normal((400, 16)) @ mixing + rng.standard_normal((400, 96)) / 4).astype(
        np.float32
    )
    weight = rng.standard_normal((48, 96)).astype(np.float32)
    moments = moments_of(inputs)
    for name in GRIDS:
        plain = QuantTensor.from_floats(weight, FORMATS[name])
        rounded = round_matrix(weight, moments, name)
        errors = [
            np.linalg.norm(inputs @ (one.dequantize() - weight).T) for one in (plain, rounded)
        ]
        assert errors[1] < 0.35 * errors[0], name


def test_a_written_file_has_the_metadata_and_tensors_it_was_given(tmp_path: Path) -> None:
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    tensors = {name: QuantTensor.from_floats(values, FORMATS[name]) for name in ("Q8_0", "F32")}
    given = {"a": 7, "b": 0.5, "c": "word", "d": True}
    write_gguf(tmp_path / "one.gguf", given, tensors)
    first = read_gguf(tmp_path / "one.gguf")
    write_gguf(tmp_path / "two.gguf", {k: first.metadata.raw(k) for k in given}, first.tensors)  # type: ignore[attr-defined]
    second = read_gguf(tmp_path / "two.gguf")
    assert dict(second.metadata) == given
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(second.tensors[name].data, tensor.data)
