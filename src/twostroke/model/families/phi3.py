"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with fused matrices and scaled RoPE frequencies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.common_fields import config_window_of_all, gguf_window
from twostroke.model.families.family import Family

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window, which all layers of a Phi-3 model have, from a GGUF file."""
    return replace(spec, window=gguf_window(fields, (True,) * spec.num_layers))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
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
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    # GGUF's ffn_up has the rows of gate, then of up.
    fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
    partial_rotary="partial_rotary_factor",
)
