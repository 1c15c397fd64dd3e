"""The specs of the larger real models (`make long SUITE=models`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twostroke.model.families import RopeSpec
from twostroke.model.program import Activation
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.models


def test_gemma3_is_translated(real_model: Callable[[str], Path]) -> None:
    spec = load_path(real_model("gemma3-270m")).spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (18, 640, 262144)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 1, 256)
    assert (spec.norm_offset, spec.attention_scale, spec.logit_soft_cap) == (0.0, None, None)
    assert spec.activation is Activation.GELU_TANH
    assert spec.rope == RopeSpec(1e6, 256, interleaved=False)
    assert spec.window is not None
    assert spec.window.size == 512
    assert [i for i, slides in enumerate(spec.window.slides) if not slides] == [5, 11, 17]
    assert spec.window.rope == RopeSpec(1e4, 256, interleaved=False)
    assert spec.tied_embeddings


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen2.5-coder-0.5b", (24, 896, 14, 2, 64)), ("qwen2.5-coder-1.5b", (28, 1536, 12, 2, 128))],
)
def test_qwen2_is_translated(
    name: str, sizes: tuple[int, ...], real_model: Callable[[str], Path]
) -> None:
    spec = load_path(real_model(name)).spec
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    assert (spec.num_layers, spec.hidden_size, *heads) == sizes
    assert spec.rope == RopeSpec(1e6, sizes[-1], interleaved=False)
    assert (spec.qkv_bias, spec.output_bias, spec.window) == (True, False, None)
    assert spec.vocab_size == 151936
