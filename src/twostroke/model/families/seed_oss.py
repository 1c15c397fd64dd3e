"""Seed-OSS: Llama with biases of queries, keys and values, and another name for the second norm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.family import Family

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add whether the output of attention has a bias, from a Seed-OSS model's config.json.

    `attention_bias` applies only to queries, keys and values.
    """
    return replace(spec, output_bias=fields.flag("attention_out_bias", default=False))


SEED_OSS = Family(
    model_types={
        "seed_oss": {
            "vocab_size": 155136,
            "hidden_size": 4096,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        }
    },
    layer=partial(residual_layer, pre_norms=("attn_norm", "post_attention_norm")),
    from_config=from_config,
    layer_names={"post_attention_layernorm": "post_attention_norm"},
)
