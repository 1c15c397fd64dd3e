"""OLMo 2: Llama with norms after each part of a layer instead of before, and query-key norms.

Source: arXiv:2501.00656.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.family import Family

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Refuse a GGUF file of OLMo 3, which has the architecture "olmo2" in GGUF, too.

    OLMo 3's layers with a window have another RoPE, which is not supported.
    """
    fields.expect("attention.sliding_window", 0)
    return spec


OLMO2 = Family(
    model_types={
        "olmo2": {
            "vocab_size": 50304,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        }
    },
    layer=partial(residual_layer, pre_norms=None, post_norms=True, query_key_norm="row"),
    from_gguf=from_gguf,
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
