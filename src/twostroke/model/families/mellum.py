"""Mellum 2: a mixture of experts as in Qwen 3, in which most layers have a sliding window.

Layers with a window have a different RoPE.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import (
    all_but_every,
    config_experts,
    config_window,
    gguf_experts,
    gguf_window,
)
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_WIDTH
from twostroke.model.families.rope import config_rope
from twostroke.model.families.routed_experts import config_first_expert_layer
from twostroke.model.families.spec import RopeSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_PERIOD = 4  # every fourth layer has no window


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts, the sliding window and its RoPE to a Mellum model's spec, from a GGUF file.

    In layers with a window, RoPE has no context extension.
    """
    experts = gguf_experts(fields, spec)
    if experts is None:
        fields.fault("is a mixture of experts, but its expert_count is 0")
    window = gguf_window(fields, all_but_every(_PERIOD, spec.num_layers))
    if window is not None:
        base = fields.number("rope.freq_base_swa", default=spec.rope.base)
        window = replace(window, rope=RopeSpec(base, spec.rope.dim, spec.rope.interleaved))
    return replace(spec, experts=experts, window=window)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts, the sliding window and its RoPE to a Mellum model's spec (config.json)."""
    width = fields.integer("moe_intermediate_size", MAX_WIDTH)
    normalize = fields.flag("norm_topk_prob", default=True)
    experts = config_experts(fields, spec, width, normalize=normalize)
    first = config_first_expert_layer(fields, spec, default=0)
    window = config_window(fields, (False,) * spec.num_layers)
    if window is not None:
        rope, _ = config_rope(fields, spec.head_dim, spec.context_length, "sliding_attention")
        window = replace(window, rope=rope)
    return replace(spec, experts=replace(experts, first_layer=first), window=window)


MELLUM = Family(
    model_types={
        "mellum": {
            "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168,
            "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 1024,
            "moe_intermediate_size": 896, "num_local_experts": 64, "num_experts_per_tok": 8,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4},
            },
        }
    },
    layer=partial(residual_layer, query_key_norm="head"),
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names={"mlp.gate": "ffn_gate_inp"},
)  # fmt: skip
