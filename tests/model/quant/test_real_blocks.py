"""Blocks of real files, of all their formats, against the reference package's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from twostroke.model.weights.gguf import read_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.model.quant import QuantTensor

gguf = pytest.importorskip("gguf", reason="the gguf package (test extra) is the second opinion")

FORMATS_IN = {
    "gemma3-270m": {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"},
    "qwen2.5-coder-0.5b": {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"},
    "qwen2.5-coder-1.5b": {"F32", "Q4_K", "Q6_K"},
}


def tensors_by_format(path: Path) -> dict[str, list[QuantTensor]]:
    file = read_gguf(path)
    assert not file.unsupported
    by_format: dict[str, list[QuantTensor]] = {}
    for tensor in file.tensors.values():
        by_format.setdefault(tensor.format.name, []).append(tensor)
    return by_format


@pytest.mark.models
@pytest.mark.parametrize("name", FORMATS_IN)
def test_real_blocks_are_dequantized_as_by_the_reference_bit_for_bit(
    real_model: Callable[[str], Path], name: str
) -> None:
    by_format = tensors_by_format(real_model(name))
    assert by_format.keys() == FORMATS_IN[name]
    for kind, tensors in by_format.items():
        for tensor in tensors[:: max(1, len(tensors) // 12)]:
            rows = np.ascontiguousarray(tensor.data[:256])
            theirs = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
            ours = tensor.dequantize(slice(0, 256))
            assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.models
@pytest.mark.parametrize("name", FORMATS_IN)
def test_real_blocks_quantized_again_change_little(
    real_model: Callable[[str], Path], name: str
) -> None:
    for kind, tensors in tensors_by_format(real_model(name)).items():
        values = tensors[0].dequantize(slice(0, 64))
        fmt = tensors[0].format
        requantized = fmt.dequantize(fmt.quantize(values))
        size = np.sqrt(np.mean(np.square(values)))
        assert np.sqrt(np.mean(np.square(requantized - values))) < 0.03 * size, kind
