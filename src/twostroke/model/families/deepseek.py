"""DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash, Youtu: latent attention (arXiv:2405.04434).

Most have experts, some of them shared. V3 and later models choose experts by sigmoid scores with a
bias for each expert (arXiv:2412.19437).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.common_fields import without_mtp_layers
from twostroke.model.families.family import Family, MtpInput
from twostroke.model.families.fields import MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.routed_experts import (
    EXPERT_NAMES,
    SOFTMAX,
    config_first_expert_layer,
    config_routed_experts,
    gguf_routed_experts,
    max_experts,
)
from twostroke.model.families.spec import LatentSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ExpertSpec, ModelSpec

_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a DeepSeek GGUF file: the widths of cached vectors.

    In latent attention a token stores one latent vector, which counts as one key-value head. Older
    files have the head widths of ordinary attention instead. YaRN's multiplier is removed from
    RoPE, because in this family it applies to attention scores only; rotated keys keep their
    length.
    """
    width = stored_width(fields, "attention.kv_lora_rank", "rope.dimension_count")
    values: dict[str, Any] = dict.fromkeys(
        ("attention.key_length", "attention.value_length"), width
    )
    if fields.has(_MULTIPLIER):
        values |= {_MULTIPLIER: 0.0, "rope.scaling.yarn_attn_factor": 1.0}
    return values | {"attention.head_count_kv": 1} | without_mtp_layers(fields)


def config_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for values of a DeepSeek config.json: the widths of cached vectors.

    In latent attention a token stores one latent vector, which counts as one key-value head.
    """
    width = stored_width(fields, "kv_lora_rank", "qk_rope_head_dim")
    return {"num_key_value_heads": 1, "head_dim": width}


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add a DeepSeek model's latent attention and experts to its spec, from a GGUF file."""
    is_new = fields.has("attention.key_length_mla")
    ending = "_mla" if is_new else ""
    rotated = spec.rope.dim
    head_width = fields.integer(f"attention.key_length{ending}", MAX_HEAD_DIM, low=rotated + 1)
    latent = LatentSpec(
        rank=spec.head_dim - rotated,
        rotated=rotated,
        key=head_width - rotated,
        value=fields.integer(f"attention.value_length{ending}", MAX_HEAD_DIM),
        query_rank=fields.integer("attention.q_lora_rank", MAX_WIDTH, low=0, default=0),
    )
    multiplier = 1.0
    if fields.has(_MULTIPLIER):
        factor = fields.number("rope.scaling.factor", low=1.0)
        multiplier += fields.number(_MULTIPLIER, low=0.0) * math.log(factor)
    check_latent_heads(fields, spec)
    spec = replace(spec, latent=latent, attention_scale=multiplier**2 * head_width**-0.5)
    return replace(spec, experts=gguf_routed_experts(fields, spec, default_gating=SOFTMAX))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add a DeepSeek model's latent attention and experts to its spec, from a config.json."""
    fields.expect("attention_bias", False)  # noqa: FBT003 - the only value
    model_type = fields.text("model_type")
    has_query_rank = fields.has("q_lora_rank")
    latent = LatentSpec(
        rank=spec.head_dim - spec.rope.dim,
        rotated=spec.rope.dim,
        key=fields.integer("qk_nope_head_dim", MAX_HEAD_DIM),
        value=fields.integer("v_head_dim", MAX_HEAD_DIM),
        query_rank=fields.integer("q_lora_rank", MAX_WIDTH) if has_query_rank else 0,
    )
    check_latent_heads(fields, spec)
    interleaved = model_type == "deepseek_v2" or fields.flag("rope_interleave", default=True)
    spec = replace(
        spec,
        rope=replace(spec.rope, interleaved=interleaved),
        latent=latent,
        attention_scale=_scale(fields, latent),
    )
    return spec if model_type == "youtu" else replace(spec, experts=_config_experts(fields, spec))


def stored_width(fields: Fields, latent: str, rotated: str) -> int:
    """Return how many values latent attention stores per token: latent vector and rotary key.

    `latent` and `rotated` are the metadata keys of these two widths.
    """
    rotated_width = fields.integer(rotated, MAX_HEAD_DIM // 2, low=2)
    return fields.integer(latent, MAX_HEAD_DIM // 2) + rotated_width


def _scale(fields: Fields, latent: LatentSpec) -> float:
    """Return the factor by which latent attention multiplies scores.

    It is 1 / sqrt(head width), multiplied by a correction if YaRN has `mscale_all_dim`.
    """
    part = fields.part("rope_scaling") or fields.part("rope_parameters")
    weight = None if part is None else part.optional_number("mscale_all_dim")
    multiplier = 1.0
    if part is not None and weight is not None:
        multiplier += 0.1 * weight * math.log(part.number("factor", low=1.0, default=1.0))
    return float(multiplier**2 * (latent.key + latent.rotated) ** -0.5)


def _config_experts(fields: Fields, spec: ModelSpec) -> ExpertSpec | None:
    first = _first_expert_layer(fields, spec)
    if fields.text("model_type") != "deepseek_v2":
        return config_routed_experts(fields, spec, first, has_groups=fields.has("n_group"))
    fields.expect("norm_topk_prob", False)  # noqa: FBT003 - the only value
    fields.expect("topk_method", "greedy", "group_limited_greedy")
    has_groups = fields.value("topk_method") == "group_limited_greedy"
    return config_routed_experts(fields, spec, first, has_groups=has_groups, is_sigmoid=False)


def _first_expert_layer(fields: Fields, spec: ModelSpec) -> int:
    """Return the first layer with experts; layers before it have a dense feed-forward."""
    if fields.text("model_type") != "glm4_moe_lite":
        return fields.integer("first_k_dense_replace", MAX_LAYERS, low=0, default=0)
    return config_first_expert_layer(fields, spec, default=1)


def check_latent_heads(fields: Fields, spec: ModelSpec) -> None:
    """Refuse a file with far more attention heads than any known model has.

    In latent attention each head has two matrices, so a damaged number would take much memory.
    """
    max_heads = max_experts(spec)
    if spec.num_heads > max_heads:
        fields.fault(
            f"has {counted_noun(spec.num_heads, 'attention head')}; at most {max_heads} are "
            "supported"
        )


# The names of latent attention's weights in files of transformers.
LATENT_NAMES: Final = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_COMMON: Final[dict[str, Any]] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip
_V2: Final = {
    **_COMMON, "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
    "topk_method": "greedy",
}  # fmt: skip
_V3: Final = {
    **_COMMON, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096,
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
}  # fmt: skip

DEEPSEEK2 = Family(
    model_types={
        "deepseek_v2": _V2,
        "deepseek_v3": _V3,
        "kimi_k2": _V3,
        "glm4_moe_lite": _V3 | {
            "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
            "num_hidden_layers": 47, "num_attention_heads": 20, "q_lora_rank": 768,
            "max_position_embeddings": 202752, "n_routed_experts": 64, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "n_group": 1,
            "topk_group": 1, "v_head_dim": 256, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5,
        },
        "youtu": _COMMON | {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 32, "num_attention_heads": 16,
            "max_position_embeddings": 131072, "tie_word_embeddings": True,
        },
    },
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    config_values=config_values,
    layer_names=EXPERT_NAMES | LATENT_NAMES,
    fused={"attn_kv_a_mqa": ("attn_kv_a", "attn_k_pe")},
    interleaves=True,
    rotated="qk_rope_head_dim",
    extra_layers="num_nextn_predict_layers",
    mtp=MtpInput.UNNORMED,
)  # fmt: skip
