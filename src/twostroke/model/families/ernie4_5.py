"""ERNIE 4.5: Llama whose files all rotate neighbouring values as pairs; also with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.routed_experts import (
    EXPERT_NAMES,
    SOFTMAX,
    gguf_routed_experts,
    max_experts,
)
from twostroke.model.families.spec import ExpertSpec, RoutingSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_ROUTING = RoutingSpec(has_bias=True)


def experts_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of an ERNIE 4.5 model to its spec, from a GGUF file."""
    fields.expect("interleave_moe_layer_step", 1)
    fields.expect("expert_gating_func", 0, SOFTMAX)
    fields.expect("expert_weights_scale", 0.0, 1.0)
    fields.expect("expert_group_count", 0, 1)
    experts = gguf_routed_experts(fields, spec, default_gating=SOFTMAX)
    if experts is None:
        fields.fault("is a mixture of experts, but no layer has experts")
    return replace(spec, experts=replace(experts, normalize=True, routing=_ROUTING))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Return the spec of an ERNIE 4.5 model with interleaved RoPE, from a config.json."""
    del fields
    return replace(spec, rope=replace(spec.rope, interleaved=True))


def experts_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of an ERNIE 4.5 model to its spec, from a config.json.

    They must be in all layers from `moe_layer_start_index` to the last.
    """
    fields.expect("moe_layer_interval", 1)
    fields.expect("moe_layer_end_index", -1, spec.num_layers - 1)
    fields.expect("moe_norm_min", 1e-12)
    count = fields.integer("moe_num_experts", max_experts(spec))
    width = fields.integer("moe_intermediate_size", MAX_WIDTH)
    experts = ExpertSpec(
        count=count,
        num_used=fields.integer("moe_k", count),
        ffn_size=width,
        normalize=True,
        shared_size=width * fields.integer("moe_num_shared_experts", MAX_EXPERTS, low=0),
        first_layer=fields.integer("moe_layer_start_index", MAX_LAYERS, low=0),
        routing=_ROUTING,
    )
    return replace(from_config(fields, spec), experts=experts)


_DENSE = {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = {
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": None,
    "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
}  # fmt: skip

ERNIE4_5 = Family(model_types={"ernie4_5": _DENSE}, from_config=from_config, interleaves=True)

ERNIE4_5_MOE = Family(
    model_types={"ernie4_5_moe": _DENSE | _EXPERTS},
    from_gguf=experts_from_gguf,
    from_config=experts_from_config,
    layer_names=EXPERT_NAMES,
    interleaves=True,
)
