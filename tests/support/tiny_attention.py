"""Attention of tiny models that differs from Llama's in more than a few sizes."""

from __future__ import annotations

from typing import Any

from twostroke.core.frozen import Frozen

# The window of those that have one: less than a page of 32 tokens, and no multiple of one of 16.
WINDOW = 27


class Latent(Frozen):
    """Widths of latent attention; `in_one`: a GGUF file has keys and values in one matrix."""

    rank: int = 32
    rotated: int = 16
    key: int = 32
    value: int = 48
    query_rank: int = 0
    in_one: bool = False


class Wide(Frozen):
    """Gemma 4's layers: layers without a window have heads of another width.

    `slides` and `kv_heads` are given for each layer; `head_dim` is for layers with a window. The
    last `num_shared_kv` layers have no keys and values, and twice the feed-forward. With
    `one_matrix`, layers without a window use their keys as values, too. `inputs` is the width of
    each layer's input vectors.
    """

    slides: tuple[bool, ...]
    kv_heads: tuple[int, ...]
    head_dim: int = 32
    num_shared_kv: int = 0
    inputs: int = 0
    one_matrix: bool = False


ROUTED_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LATENT_NAMES = ROUTED_NAMES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
LATENT_FUSED: dict[str, tuple[str, ...]] = {"attn_kv_a_mqa": ("attn_kv_a", "attn_k_pe")}


def latent_config(latent: Latent) -> dict[str, Any]:
    return {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_rope_head_dim": latent.rotated,
        "qk_nope_head_dim": latent.key,
        "v_head_dim": latent.value,
        "head_dim": latent.rotated,
    }


def latent_metadata(latent: Latent) -> dict[str, Any]:
    stored, whole_size = latent.rank + latent.rotated, latent.key + latent.rotated
    sizes = {"attention.head_count_kv": 1, "attention.key_length": stored,
             "attention.value_length": latent.rank, "attention.key_length_mla": whole_size,
             "attention.value_length_mla": latent.value}  # fmt: skip
    if latent.in_one:  # an older file, with the sizes of whole heads
        sizes = {"attention.key_length": whole_size, "attention.value_length": latent.value}
    if latent.query_rank:
        sizes["attention.q_lora_rank"] = latent.query_rank
    return {**sizes, "attention.kv_lora_rank": latent.rank, "rope.dimension_count": latent.rotated}


# As E2B: the last two layers borrow keys and values of the last two of their kinds.
SMALL = Wide((True, True, False, True, False, True, False), (1,) * 7, num_shared_kv=2, inputs=32)
# As 31B: keys of layers without a window, of fewer heads, are their values.
LARGE = Wide((True, False, True, False), (2, 1, 2, 1), one_matrix=True)


def wide_metadata(wide: Wide) -> dict[str, Any]:
    num_own_kv = len(wide.slides) - wide.num_shared_kv
    return {
        "attention.key_length_swa": wide.head_dim,
        "attention.value_length_swa": wide.head_dim,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": list(wide.slides),
        "attention.shared_kv_layers": wide.num_shared_kv,
        "attention.head_count_kv": list(wide.kv_heads),
        "feed_forward_length": [128] * num_own_kv + [256] * wide.num_shared_kv,
        "embedding_length_per_layer_input": wide.inputs,
        "rope.dimension_count_swa": wide.head_dim,
        "rope.freq_base_swa": 10000.0,
        "final_logit_softcapping": 30.0,
    }


def wide_config(wide: Wide) -> dict[str, Any]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": wide.head_dim,
        "global_head_dim": 64,
        "num_key_value_heads": max(wide.kv_heads),
        "num_global_key_value_heads": min(wide.kv_heads),
        "attention_k_eq_v": wide.one_matrix,
        "sliding_window": WINDOW,
        "layer_types": [kinds[slides] for slides in wide.slides],
        "num_kv_shared_layers": wide.num_shared_kv,
        "use_double_wide_mlp": wide.num_shared_kv > 0,
        "hidden_size_per_layer_input": wide.inputs,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    }
