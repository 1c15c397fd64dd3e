"""Gemma 2 and 3: norms before and after attention and feed-forward, and sliding windows.

Gemma 2 (arXiv:2408.00118) caps scores and logits. Gemma 3 (arXiv:2503.19786) normalizes queries and
keys instead, and its layers with a window have another RoPE base.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import all_but_every, config_window, gguf_window
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_LAYERS, Fields
from twostroke.model.families.rope import config_rope
from twostroke.model.families.spec import RopeSpec
from twostroke.model.program import Activation

if TYPE_CHECKING:
    from twostroke.model.families.spec import ModelSpec

# Only the 27B models divide scores by the root of width / heads; their GGUF files do not say so.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

# Gemma 2: the defaults of transformers and llama.cpp.
_SCORE_CAP, _LOGIT_CAP, _WINDOW = 50.0, 30.0, 4096

# Gemma 3: every sixth layer has no window; the other layers have one, and another RoPE base.
_WINDOW_PERIOD, _SLIDING_ROPE_BASE = 6, 10000.0


def gemma2_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window and the soft caps of Gemma 2 to its spec, from a GGUF file."""
    return replace(
        _from_gguf(spec),
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", default=_SCORE_CAP),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", default=_LOGIT_CAP),
        window=gguf_window(fields, all_but_every(2, spec.num_layers), default_size=_WINDOW),
    )


def gemma2_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add attention scale, sliding window and soft caps of Gemma 2 to its spec (config.json)."""
    return replace(
        _from_config(fields, spec),
        attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
        window=config_window(fields, all_but_every(2, spec.num_layers)),
    )


def gemma3_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add Gemma 3's sliding window and RoPE to its spec, from a GGUF file.

    Layers with a window have another RoPE base.
    """
    window = gguf_window(fields, all_but_every(_WINDOW_PERIOD, spec.num_layers))
    if window is not None:
        base = fields.number("rope.freq_base_swa", default=_SLIDING_ROPE_BASE)
        window = replace(window, rope=RopeSpec(base, spec.rope.dim, spec.rope.interleaved))
    soft_cap = fields.optional_number("final_logit_softcapping")
    return replace(_from_gguf(spec), logit_soft_cap=soft_cap, window=window)


def gemma3_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the attention scale and the sliding window of Gemma 3 to its spec, from a config.json.

    A RoPE scaling that names no layer type applies to the layers without a window.
    """
    fields.expect("attn_logit_softcapping")  # which transformers ignores
    period = fields.integer("sliding_window_pattern", MAX_LAYERS, default=_WINDOW_PERIOD)
    window = config_window(fields, all_but_every(period, spec.num_layers))
    if window is not None:
        base = fields.number("rope_local_base_freq", default=_SLIDING_ROPE_BASE)
        local = RopeSpec(base, spec.head_dim, interleaved=False)
        by_type = fields.part("rope_parameters")
        if by_type is not None and by_type.has("sliding_attention"):
            # `rope_theta` and `rope_scaling` are for the global layers.
            sliding_fields = Fields(
                fields.name, {**fields.values, "rope_theta": base, "rope_scaling": None}
            )
            local, _ = config_rope(
                sliding_fields, spec.head_dim, spec.context_length, "sliding_attention"
            )
        window = replace(window, rope=local)
    return replace(_from_config(fields, spec), window=window)


def _from_gguf(spec: ModelSpec) -> ModelSpec:
    """Return a spec with the constants that Gemma 2 and 3 share, for a GGUF file.

    The file's norm weights already include the offset of 1.
    """
    is_27b = spec.num_layers == _LAYERS_OF_27B[spec.architecture]
    scale = (spec.hidden_size / spec.num_heads) ** -0.5 if is_27b else None
    return replace(spec, activation=Activation.GELU_TANH, attention_scale=scale)


def _from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Return a spec with the fields that Gemma 2 and 3 share, from a config.json."""
    return replace(
        spec,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


_LAYER_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": _WINDOW,
    "tie_word_embeddings": True,
}

_GEMMA2_DEFAULTS = _SIZES | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": _SCORE_CAP,
    "final_logit_softcapping": _LOGIT_CAP,
}

_GEMMA3_DEFAULTS = _SIZES | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}

GEMMA2 = Family(
    model_types={"gemma2": _GEMMA2_DEFAULTS},
    layer=partial(residual_layer, post_norms=True),
    scales_embedding=True,
    from_gguf=gemma2_from_gguf,
    from_config=gemma2_from_config,
    layer_names=_LAYER_NAMES,
)

GEMMA3 = Family(
    model_types={"gemma3_text": _GEMMA3_DEFAULTS, "gemma3": _GEMMA3_DEFAULTS},
    layer=partial(residual_layer, post_norms=True, query_key_norm="head"),
    scales_embedding=True,
    from_gguf=gemma3_from_gguf,
    from_config=gemma3_from_config,
    layer_names=_LAYER_NAMES,
)
