"""Kimi Linear: the delta rule with a decay for each channel, and latent attention without RoPE.

Usually every fourth layer has attention, and the others have the delta rule. The first layer is
dense; later layers have experts as in DeepSeek (arXiv:2510.26692).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.common_fields import (
    check_attention_layers,
    gguf_attention_layers,
    without_mtp_layers,
)
from twostroke.model.families.deepseek import LATENT_NAMES, check_latent_heads, stored_width
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.routed_experts import (
    EXPERT_NAMES,
    SIGMOID,
    config_first_expert_layer,
    config_routed_experts,
    gguf_routed_experts,
)
from twostroke.model.families.spec import DeltaSpec, LatentSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_MAX_KERNEL: Final = 64  # rows of the convolution; known models have 4
_LAYER_TYPES: Final = {"linear_attention": False, "full_attention": True}
_DEFAULT_PERIOD: Final = 4  # of layers with attention in transformers, which begins with layer 4
_MLPS: Final = ("block_sparse_moe", "mlp")  # names of dense feed-forwards
_NORMALIZES: Final = "expert_weights_norm"

# Keys of published files, and the keys that the readers of DeepSeek's files know.
_KEYS: Final = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a GGUF file: the widths of vectors in the KV cache.

    A token stores one latent vector, which counts as one key-value head.
    """
    width = stored_width(fields, "attention.kv_lora_rank", "rope.dimension_count")
    sizes = dict.fromkeys(("attention.key_length", "attention.value_length"), width)
    return sizes | {"attention.head_count_kv": 1} | without_mtp_layers(fields)


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add delta rule, latent attention and experts of a Kimi Linear model to its spec (GGUF)."""
    head_dim = fields.integer("kda.head_dim", MAX_HEAD_DIM)
    delta = _delta(
        gguf_attention_layers(fields, spec.num_layers),
        num_heads=spec.num_heads,
        head_dim=head_dim,
        kernel=fields.integer("ssm.conv_kernel", _MAX_KERNEL),
    )
    rotated = spec.rope.dim
    key = fields.integer("attention.key_length_mla", MAX_HEAD_DIM, low=rotated + 1) - rotated
    latent = LatentSpec(
        rank=spec.head_dim - rotated,
        rotated=rotated,
        key=key,
        value=fields.integer("attention.value_length_mla", MAX_HEAD_DIM),
        query_rank=fields.integer("attention.q_lora_rank", MAX_WIDTH, low=0, default=0),
    )
    spec = _with_layers(fields, spec, delta, latent)
    if not fields.has(_NORMALIZES):  # files do not say it
        fields = fields.changed({_NORMALIZES: True})
    return replace(spec, experts=gguf_routed_experts(fields, spec, default_gating=SIGMOID))


def config_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for values of a config.json: the widths of vectors in the KV cache."""
    width = stored_width(fields, "kv_lora_rank", "qk_rope_head_dim")
    return _renamed(fields) | {"num_key_value_heads": 1, "head_dim": width}


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add delta rule, latent attention and experts of Kimi Linear to its spec (config.json)."""
    fields = fields.changed(_renamed(fields))
    for key in ("attention_bias", "mla_use_output_gate"):
        fields.expect(key, False)  # noqa: FBT003 - the only value
    fields.expect("mla_use_nope", True)  # noqa: FBT003 - the only value
    fields.expect("attn_res_block_size", 0)
    fields.expect("moe_router_activation_func", "sigmoid")
    linear = fields.part("linear_attn_config")
    sizes = {"num_heads": MAX_WIDTH, "head_dim": MAX_HEAD_DIM, "short_conv_kernel_size": 64}
    keys = {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    num_heads, head_dim, kernel = (
        fields.integer(keys.get(key, f"linear_{key}"), limit)
        if linear is None or not linear.has(key)
        else linear.integer(key, limit)
        for key, limit in sizes.items()
    )
    latent = LatentSpec(
        rank=spec.head_dim - spec.rope.dim,
        rotated=spec.rope.dim,
        key=fields.integer("qk_nope_head_dim", MAX_HEAD_DIM),
        value=fields.integer("v_head_dim", MAX_HEAD_DIM),
        query_rank=fields.integer("q_lora_rank", MAX_WIDTH) if fields.has("q_lora_rank") else 0,
    )
    attends = _config_attends(fields, linear, spec.num_layers)
    delta = _delta(attends, num_heads=num_heads, head_dim=head_dim, kernel=kernel)
    spec = _with_layers(fields, spec, delta, latent)
    first = fields.integer("first_k_dense_replace", MAX_LAYERS, low=0, default=1)
    first = config_first_expert_layer(fields, spec, default=first)
    experts = config_routed_experts(fields, spec, first, has_groups=fields.has("n_group"))
    return replace(spec, experts=experts)


def _renamed(fields: Fields) -> dict[str, Any]:
    """Return values of a config.json under the keys by which other families name them."""
    return {new: fields.value(key) for key, new in _KEYS.items() if fields.has(key)}


def _delta(attends: tuple[bool, ...], *, num_heads: int, head_dim: int, kernel: int) -> DeltaSpec:
    return DeltaSpec(
        attends=attends,
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        kernel=kernel,
        gates_channels=True,
        gate_rank=head_dim,
    )


def _with_layers(
    fields: Fields, spec: ModelSpec, delta: DeltaSpec, latent: LatentSpec
) -> ModelSpec:
    """Return the spec with layers of the delta rule and of latent attention.

    Raises ModelFormatError if no layer has attention, or if there are too many heads.
    """
    check_latent_heads(fields, spec)
    check_attention_layers(fields, delta.attends)
    scale = (latent.key + latent.rotated) ** -0.5
    rotates = (False,) * spec.num_layers
    return replace(spec, delta=delta, latent=latent, attention_scale=scale, rotates=rotates)


def _config_attends(fields: Fields, linear: Fields | None, num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a config.json have attention.

    `linear` is the object that lists the numbers of attention layers and of delta rule layers; the
    first layer is number 1.
    """
    if fields.has("layer_types"):
        return fields.choices("layer_types", _LAYER_TYPES, num_layers)
    if linear is None or not linear.has("full_attn_layers"):
        return tuple(layer > 0 and layer % _DEFAULT_PERIOD == 0 for layer in range(num_layers))
    numbers = {key: linear.value(key) for key in ("full_attn_layers", "kda_layers")}
    listed = [number for part in numbers.values() if isinstance(part, list) for number in part]
    if any(type(number) is not int for number in listed) or sorted(listed) != list(
        range(1, num_layers + 1)
    ):
        layers = counted_noun(num_layers, "layer")
        linear.fault(f"has {' and '.join(numbers)} that do not list each of its {layers} once")
    return tuple(layer + 1 in numbers["full_attn_layers"] for layer in range(num_layers))


_SIZES: Final = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.446, "n_group": 1,
    "topk_group": 1, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip

KIMI_LINEAR = Family(
    model_types={"kimi_linear": _SIZES},
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    config_values=config_values,
    layer_names={
        # transformers saves dense layers under the name of sparse ones, too.
        **{f"{mlp}.{part}_proj": f"ffn_{part}" for mlp in _MLPS for part in ("gate", "up", "down")},
        **EXPERT_NAMES,
        **{name.replace("mlp", "block_sparse_moe"): w for name, w in EXPERT_NAMES.items()},
        **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
        "self_attn.f_a_proj": "ssm_f_a",
        "self_attn.f_b_proj": "ssm_f_b",
        "self_attn.b_proj": "ssm_beta",
        "self_attn.g_a_proj": "ssm_g_a",
        "self_attn.g_b_proj": "ssm_g_b",
        "self_attn.o_norm": "ssm_norm",
        **LATENT_NAMES,
    },
    fused={"attn_kv_a_mqa": ("attn_kv_a", "attn_k_pe")},
    interleaves=True,
    rotated="qk_rope_head_dim",
    extra_layers="num_nextn_predict_layers",
)
