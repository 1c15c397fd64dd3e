"""Gemma 3: as Gemma 2, with norms of queries and keys for caps, and two rope bases."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from twostroke.models.blocks import decoder, residual_layer
from twostroke.models.common_fields import all_but_every, config_window, gguf_window
from twostroke.models.family import Family
from twostroke.models.fields import MAX_LAYERS, Fields
from twostroke.models.gemma2 import GEMMA2
from twostroke.models.rope_fields import config_rope
from twostroke.models.spec import RopeSpec
from twostroke.program import Activation

if TYPE_CHECKING:
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program

# The 27B model alone divides its scores by the root of width / heads; its GGUF does not say so.
_LAYERS_OF_27B = 62

# Every sixth layer sees everything; the others slide, and rotate by another base.
_PERIOD, _LOCAL_BASE = 6, 10000.0


def program(spec: ModelSpec) -> Program:
    """Build the Program of a Gemma 3 (arXiv:2503.19786)."""
    layer = partial(residual_layer, post_norms=True, query_key_norm="head")
    return decoder(spec, layer, embedding_scale=math.sqrt(spec.hidden_size))


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read the window. The file has one added to the weights of its norms already."""
    largest = spec.num_layers == _LAYERS_OF_27B
    window = gguf_window(fields, all_but_every(_PERIOD, spec.num_layers))
    if window is not None:
        base = fields.number("rope.freq_base_swa", above=1.0, default=_LOCAL_BASE)
        local = RopeSpec(base, spec.rope.dim, spec.rope.interleaved)
        window = replace(window, rope=local)
    return replace(
        spec,
        activation=Activation.GELU_TANH,
        attention_scale=(spec.hidden_size / spec.num_heads) ** -0.5 if largest else None,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        window=window,
    )


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read scale and window. A rope scaling without a layer type is that of the global layers."""
    fields.expect("attn_logit_softcapping")  # transformers reads it and does nothing
    period = fields.integer("sliding_window_pattern", MAX_LAYERS, default=_PERIOD)
    window = config_window(fields, all_but_every(period, spec.num_layers))
    if window is not None:
        base = fields.number("rope_local_base_freq", above=1.0, default=_LOCAL_BASE)
        local = RopeSpec(base, spec.head_dim, interleaved=False)
        by_type = fields.part("rope_parameters")
        if by_type is not None and by_type.has("sliding_attention"):
            # The model's own base and scaling are those of the global layers.
            own = Fields(fields.name, {**fields.values, "rope_theta": base, "rope_scaling": None})
            local = config_rope(own, spec.head_dim, spec.context_length, "sliding_attention")
        window = replace(window, rope=local)
    return replace(
        spec,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        window=window,
    )


_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

GEMMA3 = Family(
    program=program,
    model_types={"gemma3_text": _DEFAULTS, "gemma3": _DEFAULTS},
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names=GEMMA2.layer_names,
)
