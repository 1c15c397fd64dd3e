"""The departures of each family's tiny model from a tiny Llama, in both kinds of files."""

from __future__ import annotations

from msgspec.structs import replace

from support.tiny_attention import (
    LARGE,
    LATENT_FUSED,
    LATENT_NAMES,
    ROUTED_NAMES,
    SMALL,
    WINDOW,
    Latent,
    latent_config,
    latent_metadata,
    wide_config,
    wide_metadata,
)
from support.tiny_hybrids import GRANITE, HYBRIDS
from support.tiny_kimi import KIMI_LINEAR
from support.tiny_llama4 import LLAMA4
from support.tiny_recurrent import DELTA_NAMES, Delta, delta_config, delta_metadata
from support.tiny_variant import Variant

_LLAMA = Variant(interleaves=True)

_MISTRAL = replace(
    _LLAMA,
    model_type="mistral",
    metadata={"attention.sliding_window": WINDOW},
    config={"sliding_window": WINDOW},
)

_MIXTRAL = replace(
    _LLAMA,
    model_type="mixtral",
    num_experts=4,
    metadata={"expert_count": 4, "expert_used_count": 2},
    config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    layer_names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
    },
)

_QWEN2 = Variant("qwen2", "qwen2", qkv_bias=True, config={"use_sliding_window": False})

_QWEN3 = Variant("qwen3", "qwen3", query_key_norm="head", config={"use_sliding_window": False})

_QWEN3_MOE = replace(
    _QWEN3,
    architecture="qwen3moe",
    model_type="qwen3_moe",
    num_experts=8,
    metadata={"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 128},
    config={
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    layer_names={
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate": "mlp.experts.{}.gate_proj",
        "ffn_up": "mlp.experts.{}.up_proj",
        "ffn_down": "mlp.experts.{}.down_proj",
    },
)

# Layers with the delta rule and layers with attention alternate.
_QWEN35 = Variant(
    "qwen35",
    "qwen3_5_text",
    sizes={"num_layers": 4, "head_dim": 32},
    metadata=delta_metadata(Delta()) | {"rope.dimension_sections": [2, 1, 1, 0]},
    config=delta_config(Delta()),
    layer_names={name: DELTA_NAMES[name] for name in DELTA_NAMES if "ffn" not in name},
    query_key_norm="head",
    norm_offset=1.0,
    ffn_norm="post_attention_norm",
    delta=Delta(),
)

_QWEN35_MOE = replace(
    _QWEN35,
    architecture="qwen35moe",
    model_type="qwen3_5_moe_text",
    num_experts=8,
    num_shared=1,
    metadata={
        **_QWEN35.metadata,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 128,
    },
    config={
        **_QWEN35.config,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    layer_names=DELTA_NAMES,
)

_NEXT_DELTA = Delta(is_tiled=False, in_one=True)

_QWEN3_NEXT = replace(
    _QWEN35_MOE,
    architecture="qwen3next",
    model_type="qwen3_next",
    metadata={
        key: value
        for key, value in _QWEN35_MOE.metadata.items()
        if key != "rope.dimension_sections"
    },
    config={
        **_QWEN35_MOE.config,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    delta=_NEXT_DELTA,
)

_GEMMA2 = Variant(
    "gemma2",
    "gemma2",
    sizes={"num_layers": 4, "head_dim": 32},
    metadata={
        "attention.sliding_window": WINDOW,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    config={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer_names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    post_norms=True,
    norm_offset=1.0,
)

# Seven layers: the sixth sees everything.
_GEMMA3 = replace(
    _GEMMA2,
    architecture="gemma3",
    model_type="gemma3_text",
    sizes={"num_layers": 7, "head_dim": 32, "rope_base": 1e6},
    metadata={
        "attention.sliding_window": WINDOW,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    config={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    query_key_norm="head",
)

_PHI3 = Variant(
    "phi3",
    "phi3",
    metadata={"attention.sliding_window": WINDOW},
    config={"sliding_window": WINDOW, "pad_token_id": 0},
    layer_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
)

_SHORT = (1.0, 1.02, 1.1, 1.3, 1.6, 2.0)
_LONG = (1.0, 1.5, 3.0, 6.0, 12.0, 24.0)

# Half a head is not rotated; the long factors are there and, within 256 tokens, not used.
_PHI3_LONG = replace(
    _PHI3,
    sizes={"head_dim": 16},
    metadata={
        "attention.sliding_window": 0,
        "rope.dimension_count": 12,
        "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 1.06066017,  # sqrt(1 + ln(512 / 256) / ln(256))
    },
    config={
        "sliding_window": None,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": list(_SHORT),
            "long_factor": list(_LONG),
        },
    },
    factors={"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
)

_YARN = replace(
    _QWEN2,
    metadata={
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    config={
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
)

_LLAMA31 = replace(
    _LLAMA,
    config={
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    # What a converter makes of the above for 8 pairs and a base of 10,000.
    factors={"rope_freqs.weight": (1.0, 1.0, 2.3391168, 8.0, 8.0, 8.0, 8.0, 8.0)},
)

_OLMO2 = Variant(
    "olmo2",
    "olmo2",
    layer_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    query_key_norm="row",
    pre_norms=False,
    post_norms=True,
)

# As OLMo 3: the fourth layer has no window, and a scaled RoPE.
_OLMO3 = replace(
    _OLMO2,
    model_type="olmo3",
    sizes={"num_layers": 4, "rope_base": 5e5},
    metadata={"attention.sliding_window": WINDOW, **_YARN.metadata},
    config={"sliding_window": WINDOW, "pad_token_id": 0, **_YARN.config},
)

# As the 32B: the fourth layer has neither a window nor a RoPE.
_EXAONE4 = replace(
    _OLMO2,
    architecture="exaone4",
    model_type="exaone4",
    sizes={"num_layers": 4},
    query_key_norm="head",
    metadata={"attention.sliding_window": WINDOW},
    config={"sliding_window": WINDOW, "sliding_window_pattern": 4},
)

# As the 1.2B: no layer has a window, and all have a RoPE.
_EXAONE4_SMALL = replace(
    _EXAONE4,
    sizes={},
    metadata={},
    config={"sliding_window": None, "layer_types": ["full_attention"] * 2},
)

_SEED_OSS = Variant(
    "seed_oss",
    "seed_oss",
    sizes={"head_dim": 32},
    qkv_bias=True,
    config={"attention_bias": True, "attention_out_bias": False, "pad_token_id": 0},
    layer_names={"post_attention_norm": "post_attention_layernorm"},
    ffn_norm="post_attention_norm",
)

_ERNIE = Variant("ernie4_5", "ernie4_5")

# Dense, with queries of low rank.
_YOUTU = Variant(
    "deepseek2",
    "youtu",
    sizes={"num_kv_heads": 4},
    metadata=latent_metadata(Latent(query_rank=32)),
    config=latent_config(Latent(query_rank=32)) | {"head_dim": 16},
    layer_names=LATENT_NAMES,
    fused=LATENT_FUSED,
    latent=Latent(query_rank=32),
)

# A layer without experts, then three of eight and two shared ones.
_SHARED_METADATA = {
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 128,
}
_SHARED_CONFIG = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 128,
}

# As V2 Lite, in an older GGUF: the first layer is dense, the choice is by softmax alone.
_DEEPSEEK_V2 = replace(
    _YOUTU,
    model_type="deepseek_v2",
    sizes={"num_kv_heads": 4, "num_layers": 3},
    latent=Latent(in_one=True),
    num_experts=8,
    first_with_experts=1,
    num_shared=2,
    metadata={
        **latent_metadata(Latent(in_one=True)),
        **_SHARED_METADATA,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    },
    config={
        **latent_config(Latent()),
        **_SHARED_CONFIG,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 128,
        },
    },
)

# The choice is by sigmoids and a bias, among half of four groups.
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    model_type="deepseek_v3",
    latent=Latent(query_rank=32),
    has_choice_bias=True,
    metadata={
        **latent_metadata(Latent(query_rank=32)),
        **_SHARED_METADATA,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.7,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    },
    config={
        **latent_config(Latent(query_rank=32)),
        **_SHARED_CONFIG,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
)

_GLM4_LITE = replace(
    _DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    metadata={key: value for key, value in _DEEPSEEK_V3.metadata.items() if "group" not in key},
    config={**_DEEPSEEK_V3.config, "n_group": 1, "topk_group": 1},
)

_ERNIE_EXPERTS = replace(
    _ERNIE,
    architecture="ernie4_5-moe",
    model_type="ernie4_5_moe",
    num_experts=8,
    first_with_experts=1,
    num_shared=2,
    has_choice_bias=True,
    metadata={**_SHARED_METADATA, "interleave_moe_layer_step": 1},
    config={
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 128,
    },
    layer_names=ROUTED_NAMES | {"exp_probs_b": "mlp.moe_statics.e_score_correction_"},
)

# As Air: half of each head is rotated, queries, keys and values have biases.
_GLM4_AIR = Variant(
    "glm4moe",
    "glm4_moe",
    sizes={"num_layers": 3},
    num_experts=8,
    first_with_experts=1,
    num_shared=2,
    has_choice_bias=True,
    qkv_bias=True,
    metadata={
        **_SHARED_METADATA,
        "rope.dimension_count": 8,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.7,
    },
    config={
        **_SHARED_CONFIG,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "num_nextn_predict_layers": 0,
    },
    layer_names=ROUTED_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    ffn_norm="post_attention_norm",
)

_GLM4 = replace(_GLM4_AIR, query_key_norm="head", config={**_GLM4_AIR.config, "use_qk_norm": True})

# Every second layer has a window. The blend of YaRN begins and ends between two pairs.
_GPT_OSS = Variant(
    "gpt-oss",
    "gpt_oss",
    sizes={"num_layers": 4, "rope_base": 1.5e5},
    num_experts=8,
    qkv_bias=True,
    output_bias=True,
    has_sinks=True,
    has_expert_biases=True,
    metadata={
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "attention.sliding_window": WINDOW,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    config={
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "pad_token_id": 0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    layer_names={
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
    },
    ffn_norm="post_attention_norm",
)

# Half of each head is rotated.
_MINIMAX_M2 = Variant(
    "minimax-m2",
    "minimax_m2",
    num_experts=8,
    has_choice_bias=True,
    query_key_norm="row",
    metadata={
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_gating_func": 2,
        "rope.dimension_count": 8,
    },
    config={
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "num_mtp_modules": 3,
    },
    layer_names={
        **_MIXTRAL.layer_names,
        "exp_probs_b": "block_sparse_moe.e_score_correction_",
    },
)

_HY3 = Variant(
    "hy_v3",
    "hy_v3",
    sizes={"num_layers": 3},
    num_experts=8,
    first_with_experts=1,
    num_shared=2,
    has_choice_bias=True,
    query_key_norm="head",
    metadata={
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_shared_feed_forward_length": 256,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.7,
    },
    config={
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 128,
        "router_scaling_factor": 1.7,
        "num_nextn_predict_layers": 0,
    },
    layer_names=ROUTED_NAMES
    | {
        "ffn_gate_inp": "mlp.router.gate",
        "exp_probs_b": "mlp.expert_",
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
)

# The last of four layers sees everything, with YaRN and another base.
_MELLUM = replace(
    _QWEN3_MOE,
    architecture="mellum",
    model_type="mellum",
    sizes={"num_layers": 4, "rope_base": 5e5},
    metadata={
        **_QWEN3_MOE.metadata,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.freq_base_swa": 1e4,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    config={
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)

# Queries have an attention temperature after 2,048 tokens, which are more than tests have.
_MINISTRAL3 = replace(
    _LLAMA,
    architecture="mistral3",
    model_type="ministral3",
    sizes={"rope_base": 1e6},
    metadata={
        "attention.temperature_scale": 0.5,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 2048,
        "rope.scaling.yarn_log_multiplier": 1.0,
    },
    config={
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
        "sliding_window": None,
    },
)

_MUSE = Variant(
    "muse-glimmer",
    "muse_glimmer_text",
    sizes={"num_layers": 4},
    metadata={
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, True, True, False],
        "final_logit_softcapping": 5.0,
        "logit_scale": 0.7,
    },
    config={
        "hidden_activation": "silu",
        "sliding_window": WINDOW,
        "final_logit_softcapping": 5.0,
        "output_multiplier": 0.7,
        "qk_scale_factor": 3.0,
    },
    layer_names=_GEMMA2.layer_names | {"attn_gate": "self_attn.gate_proj"},
    interleaves=True,
    post_norms=True,
    norm_offset=1.0,
    last_norm_has_offset=False,
    query_norm_in_gguf=3.0,
    gates_attention=True,
)

_GEMMA4 = replace(
    _GEMMA3,
    architecture="gemma4",
    sizes={"num_layers": 7, "head_dim": 64, "rope_base": 1e6, "num_kv_heads": 1},
    model_type="gemma4_text",
    metadata=wide_metadata(SMALL),
    config=wide_config(SMALL),
    layer_names=_GEMMA3.layer_names
    | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    factors={"rope_freqs.weight": (1.0,) * 8 + (1e30,) * 24},
    norm_offset=0.0,
    wide=SMALL,
)

_GEMMA4_LARGE = replace(
    _GEMMA4,
    sizes={"num_layers": 4, "head_dim": 64, "rope_base": 1e6},
    metadata=wide_metadata(LARGE),
    config=wide_config(LARGE),
    wide=LARGE,
)

# As 26B-A4B: experts beside each feed-forward.
_GEMMA4_EXPERTS = replace(
    _GEMMA4_LARGE,
    num_experts=8,
    expert_stacks=("experts.gate_up_proj", "experts.down_proj"),
    metadata={
        **_GEMMA4_LARGE.metadata,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
    },
    config={
        **_GEMMA4_LARGE.config,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 128,
    },
    layer_names=_GEMMA4.layer_names
    | {
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
)

# The fourth layer has no RoPE.
_SMOLLM3 = replace(
    _LLAMA,
    architecture="smollm3",
    model_type="smollm3",
    sizes={"num_layers": 4},
    config={"pad_token_id": 0},
)

FAMILIES: dict[str, Variant] = {
    "llama": _LLAMA,
    "llama-3.1": _LLAMA31,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen2-yarn": _YARN,
    "qwen3": _QWEN3,
    "qwen3-moe": _QWEN3_MOE,
    "qwen3.5": _QWEN35,
    "qwen3.5-moe": _QWEN35_MOE,
    "qwen3-next": _QWEN3_NEXT,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4-large": _GEMMA4_LARGE,
    "gemma4-experts": _GEMMA4_EXPERTS,
    "olmo2": _OLMO2,
    "olmo3": _OLMO3,
    "exaone4": _EXAONE4,
    "exaone4-small": _EXAONE4_SMALL,
    "seed-oss": _SEED_OSS,
    "ernie4.5": _ERNIE,
    "ernie4.5-experts": _ERNIE_EXPERTS,
    "phi3": _PHI3,
    "phi3-long": _PHI3_LONG,
    "youtu": _YOUTU,
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v3": _DEEPSEEK_V3,
    "glm4-lite": _GLM4_LITE,
    "glm4-air": _GLM4_AIR,
    "glm4": _GLM4,
    "gpt-oss": _GPT_OSS,
    "granite": GRANITE,
    "kimi-linear": KIMI_LINEAR,
    "llama4": LLAMA4,
    "minimax-m2": _MINIMAX_M2,
    "hy3": _HY3,
    "mellum": _MELLUM,
    "ministral3": _MINISTRAL3,
    "muse-glimmer": _MUSE,
    "smollm3": _SMOLLM3,
    **HYBRIDS,
}

# The backends that compute recurrent layers; others refuse models with such layers.
_RECURRENT_BACKENDS = {"cpu", "reference", "torch"}


def families_on(backend: str) -> list[str]:
    """Return the families whose tiny models a backend computes."""
    is_recurrent = backend in _RECURRENT_BACKENDS
    return [name for name, variant in FAMILIES.items() if is_recurrent or variant.attends is None]
