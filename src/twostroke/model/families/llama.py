"""Llama, Mistral and Mixtral (arXiv:2302.13971, 2310.06825, 2401.04088), Phi-3 and 4, Seed-OSS.

A layer is: norm, grouped-query attention, residual; norm, gated feed-forward or experts, residual.
Other families are variations of it. Phi-3 and Phi-4 (arXiv:2404.14219) have fused matrices and
scaled RoPE frequencies. Seed-OSS has biases of queries, keys and values, and another name for the
second norm.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import (
    config_experts,
    config_window,
    config_window_of_all,
    gguf_experts,
    gguf_window,
)
from twostroke.model.families.family import Family

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window and the experts of a Llama, Mistral or Mixtral model (GGUF)."""
    return replace(
        spec,
        window=gguf_window(fields, (True,) * spec.num_layers),
        experts=gguf_experts(fields, spec),
    )


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window and the experts of a Llama, Mistral or Mixtral model (config.json).

    A model of the type "llama" with a window is refused, because transformers ignores the window
    and vLLM applies it. A model of the type "mistral" with `layer_types` is called ministral in
    transformers: `layer_types` tells which layers have the window.
    """
    match fields.text("model_type"):
        case "llama":
            for key in ("sliding_window", "layer_types", "num_local_experts"):
                fields.expect(key)
            return spec
        case "mistral":
            return replace(spec, window=config_window(fields, (True,) * spec.num_layers))
        case _:
            experts = config_experts(fields, spec, spec.ffn_size, normalize=True)
            window = config_window_of_all(fields, spec.num_layers)
            return replace(spec, window=window, experts=experts)


_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}

LLAMA = Family(
    model_types={
        "llama": _SIZES | {"intermediate_size": 11008, "max_position_embeddings": 2048},
        "mistral": _SIZES | {"num_key_value_heads": 8, "sliding_window": 4096},
        "mixtral": _SIZES
        | {
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    },
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names={"block_sparse_moe.gate": "ffn_gate_inp"},
    interleaves=True,
)


def phi3_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window, which all layers of a Phi-3 model have, from a GGUF file."""
    return replace(spec, window=gguf_window(fields, (True,) * spec.num_layers))


def phi3_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window, which all layers of a Phi-3 model have, from a config.json."""
    return replace(spec, window=config_window_of_all(fields, spec.num_layers))


PHI3 = Family(
    model_types={
        "phi3": {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        }
    },
    from_gguf=phi3_from_gguf,
    from_config=phi3_from_config,
    layer_names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    # GGUF's ffn_up has the rows of gate, then of up.
    fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
    partial_rotary="partial_rotary_factor",
)


def seed_oss_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read from a Seed-OSS config.json whether the output projection of attention has a bias.

    The key is `attention_out_bias`; `attention_bias` applies only to queries, keys and values.
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
    from_config=seed_oss_from_config,
    layer_names={"post_attention_layernorm": "post_attention_norm"},
)
