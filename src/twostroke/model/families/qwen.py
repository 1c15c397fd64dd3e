"""Qwen2, Qwen2.5 and Qwen3: Llama with biases (Qwen2) or query-key norms (Qwen3).

Sources: arXiv:2407.10671, 2505.09388. Qwen3 also has models with experts.
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
)
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_LAYERS, MAX_WIDTH

if TYPE_CHECKING:
    from typing import Any

    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec


def config_values(fields: Fields) -> dict[str, Any]:
    """Return a replacement for a value of a Qwen3 model's config.json: no `use_qk_norm`.

    All models have norms of queries and keys. Only some published files say so (Qwen3-Coder).
    """
    del fields
    return {"use_qk_norm": None}


def qwen3_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window of a Qwen3 model to its spec, from a config.json.

    The window is off by default, and the first layers never have it.
    """
    if not fields.flag("use_sliding_window", default=False):
        return spec
    num_full_layers = fields.integer("max_window_layers", MAX_LAYERS, low=0)
    slides = tuple(layer >= num_full_layers for layer in range(spec.num_layers))
    return replace(spec, window=config_window(fields, slides))


def qwen2_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window of a Qwen2 model to its spec, from a config.json.

    `attention_bias` is ignored, since queries, keys and values always have biases.
    """
    spec = qwen3_from_config(fields, spec)
    return replace(spec, qkv_bias=True, output_bias=False)


def experts_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a Qwen model to its spec, from a GGUF file; every layer has experts."""
    experts = gguf_experts(fields, spec)
    if experts is None:
        fields.fault("is a mixture of experts, but its expert_count is 0")
    return replace(spec, experts=experts)


def experts_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add experts and sliding window of a Qwen model to its spec, from a config.json.

    Every layer must have experts.
    """
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [])
    if fields.flag("use_sliding_window", default=False):
        spec = replace(spec, window=config_window_of_all(fields, spec.num_layers))
    width = fields.integer("moe_intermediate_size", MAX_WIDTH)
    normalize = fields.flag("norm_topk_prob", default=False)
    experts = config_experts(fields, spec, width, normalize=normalize)
    return replace(spec, experts=experts)


_DENSE = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_LAYER = partial(residual_layer, query_key_norm="head")

QWEN2 = Family(model_types={"qwen2": _DENSE}, from_config=qwen2_from_config)

QWEN3 = Family(
    model_types={"qwen3": _DENSE | {"head_dim": 128}},
    layer=_LAYER,
    from_config=qwen3_from_config,
    config_values=config_values,
)

QWEN3_MOE = Family(
    model_types={
        "qwen3_moe": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        }
    },
    layer=_LAYER,
    from_gguf=experts_from_gguf,
    from_config=experts_from_config,
    config_values=config_values,
    layer_names={"mlp.gate": "ffn_gate_inp"},
)
