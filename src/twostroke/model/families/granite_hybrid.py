"""Granite 4.0 and 4.0-H: Granite with Mamba-2 layers; most layers do not know positions.

Layers have a feed-forward, or experts and a shared expert. Safetensors models with attention in all
layers have the same model type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.model.families.common_fields import (
    config_experts,
    gguf_attention_layers,
    gguf_experts,
    gguf_kv_heads,
)
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_EXPERTS, MAX_WIDTH
from twostroke.model.families.granite import (
    CONFIG_MULTIPLIERS,
    GGUF_MULTIPLIERS,
    with_multipliers,
    without_scales,
)
from twostroke.model.families.mamba_fields import config_mamba2, gguf_mamba2, mamba_names

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_SHARED_WIDTH: Final = "expert_shared_feed_forward_length"
_LAYER_TYPES: Final = {
    "mamba": False,
    "linear_attention": False,
    "attention": True,
    "full_attention": True,
}
_MAMBA_KEYS: Final = {
    "num_heads": "mamba_n_heads",
    "num_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "head_dim": "mamba_d_head",
    "expand": "mamba_expand",
    "kernel": "mamba_d_conv",
    "has_convolution_bias": "mamba_conv_bias",
    "has_bias": "mamba_proj_bias",
}


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata: no multipliers, and one number of key-value heads."""
    return without_scales(fields) | gguf_kv_heads(fields)


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add Mamba-2, experts and multipliers of a Granite model to its spec, from a GGUF file."""
    attends = gguf_attention_layers(fields, spec.num_layers)
    experts = gguf_experts(fields.changed({_SHARED_WIDTH: None}), spec)
    if experts is not None:
        shared_size = fields.integer(_SHARED_WIDTH, MAX_WIDTH, low=0, default=0)
        experts = replace(experts, shared_size=shared_size)
    # llama.cpp's switch
    rotates = fields.flag("rope.scaling.finetuned", default=True)
    spec = replace(
        spec,
        mamba=gguf_mamba2(fields, spec, attends),
        experts=experts,
        rotates=None if rotates else (False,) * spec.num_layers,
    )
    return with_multipliers(fields, spec, GGUF_MULTIPLIERS)


def config_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for values of a config.json, for keys that all families' readers read.

    In a model without experts, the shared expert is the feed-forward.
    """
    values: dict[str, Any] = {"position_embedding_type": None}
    if _num_experts(fields) == 0:
        values["intermediate_size"] = fields.integer("shared_intermediate_size", MAX_WIDTH)
    return values


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add Mamba-2, experts and multipliers of a Granite model to its spec, from a config.json."""
    attends = (False,) * spec.num_layers
    if fields.has("layer_types"):
        attends = fields.choices("layer_types", _LAYER_TYPES, spec.num_layers)
    fields.expect("position_embedding_type", "rope", "nope")
    rotates = fields.value("position_embedding_type") == "rope"
    experts = None
    if _num_experts(fields):
        experts = config_experts(fields, spec, spec.ffn_size, normalize=True)
        shared_size = fields.integer("shared_intermediate_size", MAX_WIDTH, low=0)
        experts = replace(experts, shared_size=shared_size)
    spec = replace(
        spec,
        mamba=None if all(attends) else config_mamba2(fields, spec, attends, _MAMBA_KEYS),
        experts=experts,
        rotates=None if rotates else (False,) * spec.num_layers,
    )
    return with_multipliers(fields, spec, CONFIG_MULTIPLIERS)


def _num_experts(fields: Fields) -> int:
    return fields.integer("num_local_experts", MAX_EXPERTS, low=0, default=0)


GRANITE_HYBRID = Family(
    model_types={
        "granitemoehybrid": {
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
            "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
        }
    },
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    config_values=config_values,
    layer_names=mamba_names("mamba")
    | {
        "block_sparse_moe.router": "ffn_gate_inp",
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.input_linear": "ffn_gate_up_exps",
        "block_sparse_moe.output_linear": "ffn_down_exps",
        "shared_mlp.input_linear": "ffn_gate_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    dense_names={
        "shared_mlp.input_linear": "ffn_gate_up",
        "shared_mlp.output_linear": "ffn_down",
    },
    fused={
        "ffn_gate_up": ("ffn_gate", "ffn_up"),
        "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
    },
    interleaves=True,
)  # fmt: skip
