"""The Qwen2 family, Qwen2.5 included: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.models.blocks import decoder, residual_layer
from twostroke.models.common_fields import config_window
from twostroke.models.family import Family
from twostroke.models.fields import MAX_LAYERS

if TYPE_CHECKING:
    from twostroke.models.fields import Fields
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program


def program(spec: ModelSpec) -> Program:
    """Build the Program of a Qwen2 (arXiv:2407.10671)."""
    return decoder(spec, residual_layer)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read the window, which is off by default and leaves the first layers alone."""
    spec = replace(spec, output_bias=False)
    if not fields.flag("use_sliding_window", default=False):
        return spec
    whole = fields.integer("max_window_layers", MAX_LAYERS, low=0)
    slides = tuple(layer >= whole for layer in range(spec.num_layers))
    return replace(spec, window=config_window(fields, slides))


QWEN2 = Family(
    program=program,
    model_types={
        "qwen2": {
            "attention_bias": True,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        }
    },
    from_config=from_config,
)
