"""The Qwen2 family, Qwen2.5 included: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.models.blocks import decoder, residual_layer
from twostroke.models.common_fields import config_window_of_qwen
from twostroke.models.family import Family

if TYPE_CHECKING:
    from twostroke.models.fields import Fields
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program


def program(spec: ModelSpec) -> Program:
    """Build the Program of a Qwen2 (arXiv:2407.10671)."""
    return decoder(spec, residual_layer)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read the window. Biases are not a choice here, whatever `attention_bias` says."""
    window = config_window_of_qwen(fields, spec.num_layers)
    return replace(spec, qkv_bias=True, output_bias=False, window=window)


QWEN2 = Family(
    program=program,
    model_types={
        "qwen2": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        }
    },
    from_config=from_config,
)
