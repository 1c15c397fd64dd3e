"""MiniMax M2: a mixture of experts as in DeepSeek V3, without groups, in every layer.

Queries and keys are normalized as whole rows, not by head, and a part of each head is rotated.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_HEAD_DIM
from twostroke.model.families.routed_experts import (
    SIGMOID,
    config_routed_experts,
    gguf_routed_experts,
)

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_SHARE_KEY = "partial_rotary_factor"


def config_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for values of a config.json, under keys that the shared readers know.

    All models of the family have norms of queries and keys (`use_qk_norm`). Published files have
    the number of rotated values of a head in place of the rotated fraction.
    """
    values: dict[str, Any] = {"use_qk_norm": False}
    if fields.has("rotary_dim") and not fields.has(_SHARE_KEY):
        head_dim = fields.integer("head_dim", MAX_HEAD_DIM)
        values[_SHARE_KEY] = fields.integer("rotary_dim", head_dim) / head_dim
    return values


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a MiniMax M2 model to its spec, from a GGUF file.

    The routing weights of the chosen experts are always normalized, as in llama.cpp.
    """
    normalized = fields.changed({"expert_weights_norm": True})
    experts = gguf_routed_experts(normalized, spec, default_gating=SIGMOID)
    if experts is None or experts.first_layer or experts.shared_size:
        fields.fault("does not have only experts in every layer, which is not supported yet")
    return replace(spec, experts=experts)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a MiniMax M2 model to its spec, from a config.json."""
    fields.expect("shared_intermediate_size", 0)
    return replace(spec, experts=config_routed_experts(fields, spec, 0, has_groups=False))


MINIMAX_M2 = Family(
    model_types={
        "minimax_m2": {
            "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
            "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6,
            "num_local_experts": 256, "num_experts_per_tok": 8,
        }
    },
    layer=partial(residual_layer, query_key_norm="row"),
    from_gguf=from_gguf,
    from_config=from_config,
    config_values=config_values,
    layer_names={"block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp"},
    partial_rotary=_SHARE_KEY,
    extra_layers="num_mtp_modules",
)  # fmt: skip
