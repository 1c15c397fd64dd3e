"""Tiny models of families with short convolutions or Mamba-2, and of Granite."""

from __future__ import annotations

from msgspec.structs import replace

from support.tiny_mixers import (
    CONVOLUTION_EXPERT_NAMES,
    CONVOLUTION_NAMES,
    Convolution,
    Mamba,
    convolution_config,
    convolution_metadata,
    granite_config,
    mamba_metadata,
    mamba_names,
    mamba_state_names,
    nemotron_config,
    nemotron_metadata,
    nemotron_names,
)
from support.tiny_variant import Variant

NEMOTRON_MODEL_NAMES = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
}

_CONVOLUTION = Convolution((False, False, True, False))

_LFM2 = Variant(
    "lfm2",
    "lfm2",
    sizes={"num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    metadata=convolution_metadata(_CONVOLUTION, 2),
    config=convolution_config(_CONVOLUTION) | {"intermediate_size": 192, "block_multiple_of": 32},
    layer_names=CONVOLUTION_NAMES,
    model_names={"output_norm.weight": "model.embedding_norm.weight"},
    gguf_names={"output_norm.weight": "token_embd_norm.weight"},
    query_key_norm="head",
    convolution=_CONVOLUTION,
)

# The first layer has no experts.
_LFM2_MOE = replace(
    _LFM2,
    architecture="lfm2moe",
    model_type="lfm2_moe",
    num_experts=8,
    first_with_experts=1,
    has_choice_bias=True,
    metadata={
        **_LFM2.metadata,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    },
    config={
        **convolution_config(_CONVOLUTION),
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "norm_topk_prob": True,
    },
    layer_names=CONVOLUTION_NAMES | CONVOLUTION_EXPERT_NAMES,
    dense_names=CONVOLUTION_NAMES,
)

GRANITE = Variant(
    architecture="granite",
    model_type="granite",
    metadata={
        "attention.scale": 0.0625,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 1.5,
    },
    config={
        "attention_multiplier": 0.0625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.5,
    },
    interleaves=True,
)

_MAMBA = Mamba((False, False, True, False), (True, True, False, True))

# As 4.0-H 1B: the shared expert is the feed-forward.
_GRANITE_HYBRID = replace(
    GRANITE,
    architecture="granitehybrid",
    model_type="granitemoehybrid",
    sizes={"num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    metadata={
        **GRANITE.metadata,
        **mamba_metadata(_MAMBA, 2),
        "rope.scaling.finetuned": False,
    },
    config={**GRANITE.config, **granite_config(_MAMBA), "num_local_experts": 0},
    layer_names=mamba_names("mamba")
    | {"ffn_gate_up": "shared_mlp.input_linear", "ffn_down": "shared_mlp.output_linear"},
    folder_fused={"ffn_gate_up": ("ffn_gate", "ffn_up")},
    state_names=mamba_state_names("mamba"),
    mamba=_MAMBA,
)

# As 4.0-H Tiny.
_GRANITE_HYBRID_EXPERTS = replace(
    _GRANITE_HYBRID,
    num_experts=8,
    num_shared=1,
    metadata={
        **_GRANITE_HYBRID.metadata,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_feed_forward_length": 128,
    },
    config={**_GRANITE_HYBRID.config, "num_local_experts": 8, "num_experts_per_tok": 3},
    layer_names=mamba_names("mamba")
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    folder_fused={"ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp")},
    expert_stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)

_NEMOTRON_MAMBA = Mamba((False, True, False, False), (True, False, False, True))

# As Nano v2.
_NEMOTRON_H = Variant(
    "nemotron_h",
    "nemotron_h",
    sizes={"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "tied": False},
    metadata=nemotron_metadata(_NEMOTRON_MAMBA, 2, [0, 0, 128, 0]),
    config=nemotron_config(_NEMOTRON_MAMBA, "M*-M"),
    layer_names=nemotron_names(has_experts=False),
    model_names=NEMOTRON_MODEL_NAMES,
    state_names=mamba_state_names("mixer"),
    mamba=_NEMOTRON_MAMBA,
    blocks="M*-M",
    layer_prefix="backbone",
)

_SUPER_MAMBA = Mamba((False, False, True, False), (True, False, False, False))

# As Nemotron 3 Super.
_NEMOTRON_H_EXPERTS = replace(
    _NEMOTRON_H,
    architecture="nemotron_h_moe",
    metadata={
        **nemotron_metadata(_SUPER_MAMBA, 2, [0, 128, 0, 128]),
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 256,
        "expert_group_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.7,
        "moe_latent_size": 32,
    },
    config={
        **nemotron_config(_SUPER_MAMBA, "ME*E"),
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 256,
        "moe_latent_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
    },
    layer_names=nemotron_names(has_experts=True),
    num_experts=8,
    num_shared=2,
    expert_width=32,
    mamba=_SUPER_MAMBA,
    blocks="ME*E",
)

HYBRIDS: dict[str, Variant] = {
    "lfm2": _LFM2,
    "lfm2-moe": _LFM2_MOE,
    "granite-hybrid": _GRANITE_HYBRID,
    "granite-hybrid-experts": _GRANITE_HYBRID_EXPERTS,
    "nemotron-h": _NEMOTRON_H,
    "nemotron-h-experts": _NEMOTRON_H_EXPERTS,
}
