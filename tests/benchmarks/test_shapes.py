"""The models of real shapes that benchmarks measure can be loaded, and have even outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.common import shapes
from twostroke import LLM, EngineOptions, SamplingParams
from twostroke.core.options import CacheOptions
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

_SMALL = {"num_layers": 2, "hidden_size": 256, "ffn_size": 256, "vocab_size": 512}


@pytest.mark.parametrize("name", ["llama-3b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_models_of_real_shapes_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(shapes.SHAPES[name], **_SMALL, num_heads=4, num_kv_heads=2)
    monkeypatch.setitem(shapes.SHAPES, name, small)
    path = shapes.write_shape(name, tmp_path / f"{name}.gguf")
    for tensor_name, tensor in load_path(path).tensors.items():
        values = tensor.dequantize()
        if len(tensor.shape) == 2:
            assert abs(values.mean()) < 0.1 * values.std(), tensor_name
            assert 0.7 < values.std() * np.sqrt(values.shape[-1]) < 1.4, tensor_name
    options = EngineOptions(cache=CacheOptions(context_length=128), accept_quality=True)
    with LLM(path, options) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        assert len(llm.generate("Why?", params)[0][0].token_ids) == 4
