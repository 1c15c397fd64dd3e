"""Llama, Mistral and Mixtral (arXiv:2302.13971, 2310.06825, 2401.04088).

Other families are variations: a norm, attention with grouped queries, add; a norm, a gated
feed-forward or experts, add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

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
    and vLLM applies it. A "mistral" with `layer_types` is transformers' ministral: `layer_types`
    tells which layers have the window.
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
