"""Gemma 2: norms before and after each part, every other layer slides, capped scores and logits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from twostroke.models.blocks import decoder, residual_layer
from twostroke.models.common_fields import all_but_every, config_window, gguf_window
from twostroke.models.family import Family
from twostroke.program import Activation

if TYPE_CHECKING:
    from twostroke.models.fields import Fields
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program

# The 27B model alone divides its scores by the root of width / heads; its GGUF does not say so.
_LAYERS_OF_27B = 46

# The defaults of transformers and llama.cpp.
_SCORE_CAP, _LOGIT_CAP, _WINDOW = 50.0, 30.0, 4096


def program(spec: ModelSpec) -> Program:
    """Build the Program of a Gemma 2 (arXiv:2408.00118)."""
    layer = partial(residual_layer, post_norms=True)
    return decoder(spec, layer, embedding_scale=math.sqrt(spec.hidden_size))


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read window and soft caps. The file has one added to the weights of its norms already."""
    largest = spec.num_layers == _LAYERS_OF_27B
    slides = all_but_every(2, spec.num_layers)
    return replace(
        spec,
        activation=Activation.GELU_TANH,
        attention_scale=(spec.hidden_size / spec.num_heads) ** -0.5 if largest else None,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", default=_SCORE_CAP),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", default=_LOGIT_CAP),
        window=gguf_window(fields, slides, default_size=_WINDOW),
    )


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read scale, window and soft caps."""
    return replace(
        spec,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        window=config_window(fields, all_but_every(2, spec.num_layers)),
    )


GEMMA2 = Family(
    program=program,
    model_types={
        "gemma2": {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": _WINDOW,
            "attn_logit_softcapping": _SCORE_CAP,
            "final_logit_softcapping": _LOGIT_CAP,
            "tie_word_embeddings": True,
        }
    },
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
