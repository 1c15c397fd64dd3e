"""GLM 4.5, 4.6 and 4.7 (arXiv:2508.06471): grouped-query attention, DeepSeek V3's experts.

Half of each head is rotated. The large models, not Air, have norms of queries and keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import without_mtp_layers
from twostroke.model.families.family import Family, MtpInput
from twostroke.model.families.fields import MAX_LAYERS
from twostroke.model.families.routed_experts import (
    EXPERT_NAMES,
    SIGMOID,
    config_routed_experts,
    gguf_routed_experts,
)

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.program import Op


def glm4_layer(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a GLM 4 layer: Llama's layer, with query-key norms in some models.

    The norm before the feed-forward has the weight name "post_attention_norm", as in GGUF files.
    """
    return residual_layer(
        spec,
        layer,
        x,
        output,
        pre_norms=("attn_norm", "post_attention_norm"),
        query_key_norm="head" if spec.norms_heads else None,
    )


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a GLM 4 model to its spec, from a GGUF file."""
    return replace(spec, experts=gguf_routed_experts(fields, spec, default_gating=SIGMOID))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the experts of a GLM 4 model to its spec, from a config.json.

    `attention_bias` applies only to queries, keys and values.
    """
    first = fields.integer("first_k_dense_replace", MAX_LAYERS, low=0)
    experts = config_routed_experts(fields, spec, first, has_groups=fields.has("n_group"))
    return replace(spec, experts=experts, output_bias=False)


GLM4_MOE = Family(
    model_types={
        "glm4_moe": {
            "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
            "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
            # transformers' width of a head is 42 here, which cannot be rotated by halves.
            "head_dim": 128, "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        }
    },
    layer=glm4_layer,
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=without_mtp_layers,
    layer_names=EXPERT_NAMES | {"post_attention_layernorm": "post_attention_norm"},
    partial_rotary="partial_rotary_factor",
    may_norm_heads=True,
    extra_layers="num_nextn_predict_layers",
    mtp=MtpInput.UNNORMED,
)  # fmt: skip
