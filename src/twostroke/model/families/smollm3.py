"""SmolLM3: Llama in which every fourth layer has no RoPE (arXiv:2501.18795)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.common_fields import all_but_every, config_window
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_LAYERS

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_PERIOD = 4  # of layers without RoPE; GGUF files do not say it


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add which layers of a SmolLM3 model have a RoPE, for a GGUF file."""
    fields.expect("attention.sliding_window", 0)  # which llama.cpp ignores
    return replace(spec, rotates=all_but_every(_PERIOD, spec.num_layers))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add which layers of a SmolLM3 model have a RoPE and a sliding window, from a config.json.

    The key `no_rope_layers` has 1 for layers with a RoPE. Only layers without RoPE have a window,
    unless the file has `layer_types`.
    """
    if fields.has("no_rope_layers"):
        rotates = fields.choices("no_rope_layers", {1: True, 0: False}, spec.num_layers)
    else:
        period = fields.integer("no_rope_layer_interval", MAX_LAYERS, default=_PERIOD)
        rotates = all_but_every(period, spec.num_layers)
    spec = replace(spec, rotates=rotates)
    if fields.flag("use_sliding_window", default=False):
        slides = tuple(not rotated for rotated in rotates)
        return replace(spec, window=config_window(fields, slides))
    if fields.has("layer_types"):
        fields.choices("layer_types", {"full_attention": False}, spec.num_layers)
    return spec


SMOLLM3 = Family(
    model_types={
        "smollm3": {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        }
    },
    from_gguf=from_gguf,
    from_config=from_config,
    interleaves=True,
)
