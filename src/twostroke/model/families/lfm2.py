"""LFM2 and LFM2.5: most layers have a gated short convolution in place of attention.

Models with experts have some dense layers first, and a router like DeepSeek V3's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import (
    check_attention_layers,
    gguf_attention_layers,
    gguf_kv_heads,
)
from twostroke.model.families.family import Family, no_values
from twostroke.model.families.fields import MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.routed_experts import (
    SIGMOID,
    config_routed_experts,
    gguf_routed_experts,
)
from twostroke.model.families.spec import ConvolutionSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_MAX_KERNEL: Final = 64  # rows of the convolution; known models have 3
_LAYER_TYPES: Final = {"conv": False, "full_attention": True}


def from_gguf(fields: Fields, spec: ModelSpec, *, has_experts: bool = False) -> ModelSpec:
    """Add the convolutions of an LFM2 model to its spec, and its experts, from a GGUF file."""
    fields.expect("attention.sliding_window", 0)
    convolution = ConvolutionSpec(
        attends=gguf_attention_layers(fields, spec.num_layers),
        kernel=fields.integer("shortconv.l_cache", _MAX_KERNEL, low=2),
    )
    check_attention_layers(fields, convolution.attends)
    spec = replace(spec, convolution=convolution)
    if not has_experts:
        return spec
    # Files do not tell that shares are divided by their sum.
    always = {"expert_weights_norm": True}
    experts = gguf_routed_experts(fields.changed(always), spec, default_gating=SIGMOID)
    return replace(spec, experts=experts)


def from_config(fields: Fields, spec: ModelSpec, *, has_experts: bool = False) -> ModelSpec:
    """Add the convolutions of an LFM2 model to its spec, and its experts, from a config.json."""
    convolution = ConvolutionSpec(
        attends=_config_attends(fields, spec.num_layers),
        kernel=fields.integer("conv_L_cache", _MAX_KERNEL, low=2),
        has_bias=fields.flag("conv_bias", default=False),
    )
    spec = replace(
        spec,
        convolution=convolution,
        norm_epsilon=fields.number("norm_eps"),
        tied_embeddings=fields.flag("tie_embedding", default=spec.tied_embeddings),
    )
    check_attention_layers(fields, convolution.attends)
    if not has_experts:
        return spec
    fields.expect("use_expert_bias", True)  # noqa: FBT003 - the only value
    first = fields.integer("num_dense_layers", MAX_LAYERS, low=0)
    experts = config_routed_experts(fields, spec, first, has_groups=False)
    return replace(spec, experts=experts)


def config_values(fields: Fields) -> dict[str, Any]:
    """Return a replacement for a value of a config.json: the width of the feed-forward.

    The file may have a larger width, from which the real width is computed.
    """
    key = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    width = fields.integer(key, MAX_WIDTH)
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        width = 2 * width // 3
        width = int(fields.number("block_ffn_dim_multiplier", high=MAX_WIDTH, default=1.0) * width)
        multiple = fields.integer("block_multiple_of", MAX_WIDTH, default=256)
        width = -(-width // multiple) * multiple
    return {"intermediate_size": width}


def _config_attends(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a config.json have attention.

    Older files have a list of these layers' indices; without any list, all layers have attention.
    """
    if fields.has("layer_types"):
        return fields.choices("layer_types", _LAYER_TYPES, num_layers)
    indices = fields.value("full_attn_idxs")
    if indices is None:
        return (True,) * num_layers
    if not isinstance(indices, list):
        fields.refuse("full_attn_idxs", "not a list of layers")
    return tuple(layer in indices for layer in range(num_layers))


_LAYER_NAMES: Final = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}

_SIZES: Final = {
    "vocab_size": 65536, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "conv_L_cache": 3, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip

LFM2 = Family(
    model_types={"lfm2": _SIZES | {"intermediate_size": 12288}},
    layer=partial(residual_layer, query_key_norm="head"),
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_kv_heads,
    config_values=config_values,
    layer_names=_LAYER_NAMES,
    gguf_names={"token_embd_norm.weight": "output_norm.weight"},
)

LFM2_MOE = replace(
    LFM2,
    model_types={
        "lfm2_moe": _SIZES
        | {
            "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
            "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        }
    },
    from_gguf=partial(from_gguf, has_experts=True),
    from_config=partial(from_config, has_experts=True),
    config_values=no_values,
)  # fmt: skip
