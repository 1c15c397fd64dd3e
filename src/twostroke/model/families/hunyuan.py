"""Hunyuan's Hy3: grouped attention with norms of heads, and experts as in DeepSeek V3."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import without_mtp_layers
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.routed_experts import (
    EXPERT_NAMES,
    SIGMOID,
    config_first_expert_layer,
    config_routed_experts,
    gguf_routed_experts,
)

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_NUM_DENSE_LAYERS = 1  # the first layers, which GGUF files do not count


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a Hy3 model to its spec, from a GGUF file.

    The file has the width of the shared experts instead of their number.
    """
    first_key, shared_key = "leading_dense_block_count", "expert_shared_feed_forward_length"
    first = fields.integer(first_key, MAX_LAYERS, low=0, default=_NUM_DENSE_LAYERS)
    with_first = fields.changed({first_key: first, "expert_shared_count": 0})
    experts = gguf_routed_experts(with_first, spec, default_gating=SIGMOID)
    if experts is not None:
        width = fields.integer(shared_key, MAX_WIDTH, default=experts.ffn_size)
        experts = replace(experts, shared_size=width)
    return replace(spec, experts=experts)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a Hy3 model to its spec, from a config.json."""
    first = config_first_expert_layer(fields, spec, default=_NUM_DENSE_LAYERS)
    return replace(spec, experts=config_routed_experts(fields, spec, first, has_groups=False))


HY_V3 = Family(
    model_types={
        "hy_v3": {
            "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0, "num_local_experts": 192, "num_experts_per_tok": 8,
            "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826,
        }
    },
    layer=partial(residual_layer, query_key_norm="head"),
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=without_mtp_layers,
    layer_names={
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
        "mlp.shared_mlp.up_proj": "ffn_up_shexp",
        "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    }
    | EXPERT_NAMES,
    extra_layers="num_nextn_predict_layers",
)  # fmt: skip
