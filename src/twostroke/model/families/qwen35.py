"""Qwen 3.5 to 3.8 and Qwen3-Next: most layers have the gated delta rule (arXiv:2412.06464).

Usually every fourth layer has attention, whose output is multiplied by the sigmoid of a gate. A
quarter of each head is rotated. Models with experts also have a shared expert with a gate.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import (
    check_attention_layers,
    config_experts,
    gguf_experts,
    without_mtp_layers,
)
from twostroke.model.families.family import Family, MtpInput
from twostroke.model.families.fields import MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.spec import DeltaSpec, ExpertSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_MAX_KERNEL: Final = 64  # rows of the convolution; known models have 4
_INTERVAL: Final = 4  # of layers with attention, if the file does not tell
_LAYER_TYPES: Final = {"linear_attention": False, "full_attention": True}
_SHARED_WIDTH: Final = "expert_shared_feed_forward_length"


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a GGUF file, for the readers that all families share.

    MTP layers are left out. RoPE with sections (M-RoPE) is read as plain RoPE: for text they are
    equal, because the positions of all sections are equal. If a model with experts has no width of
    a dense feed-forward, the experts' width takes its place.
    """
    values = without_mtp_layers(fields) | {"rope.dimension_sections": None}
    if not fields.has("feed_forward_length"):
        values["feed_forward_length"] = fields.value("expert_feed_forward_length")
    return values


def from_gguf(
    fields: Fields, spec: ModelSpec, *, is_tiled: bool = True, has_experts: bool = False
) -> ModelSpec:
    """Add the delta rule of a Qwen model to its spec, and its experts, from a GGUF file.

    `is_tiled` is the order of the value heads in the file; see `DeltaSpec`.
    """
    num_heads = fields.integer("ssm.time_step_rank", MAX_WIDTH)
    width = fields.integer("ssm.inner_size", MAX_WIDTH)
    if width % num_heads or width > num_heads * MAX_HEAD_DIM:
        parts = f"equal parts of at most {MAX_HEAD_DIM}"
        fields.fault(
            f"has {counted_noun(num_heads, 'value head that does', 'value heads that do')} not "
            f"divide {counted_noun(width, 'value')} into {parts}"
        )
    delta = DeltaSpec(
        attends=_gguf_attends(fields, spec.num_layers),
        num_key_heads=fields.integer("ssm.group_count", MAX_WIDTH),
        num_value_heads=num_heads,
        key_dim=fields.integer("ssm.state_size", MAX_HEAD_DIM),
        value_dim=width // num_heads,
        kernel=fields.integer("ssm.conv_kernel", _MAX_KERNEL),
        is_tiled=is_tiled,
    )
    experts = _gguf_experts(fields, spec) if has_experts else None
    return _with_delta(fields, replace(spec, experts=experts), delta)


def from_config(fields: Fields, spec: ModelSpec, *, has_experts: bool = False) -> ModelSpec:
    """Add the delta rule of a Qwen model to its spec, and its experts, from a config.json.

    All norms add 1 to their weights, except the norm after the delta rule.
    """
    fields.expect("attention_bias", False)  # noqa: FBT003 - the only value
    fields.expect("attn_output_gate", True)  # noqa: FBT003 - the only value
    if fields.has("layer_types"):
        attends = fields.choices("layer_types", _LAYER_TYPES, spec.num_layers)
    else:
        attends = _every_interval(fields, spec.num_layers)
    delta = DeltaSpec(
        attends=attends,
        num_key_heads=fields.integer("linear_num_key_heads", MAX_WIDTH),
        num_value_heads=fields.integer("linear_num_value_heads", MAX_WIDTH),
        key_dim=fields.integer("linear_key_head_dim", MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", MAX_HEAD_DIM),
        kernel=fields.integer("linear_conv_kernel_dim", _MAX_KERNEL),
    )
    experts = _config_experts(fields, spec) if has_experts else None
    return _with_delta(fields, replace(spec, experts=experts, norm_offset=1.0), delta)


def _with_delta(fields: Fields, spec: ModelSpec, delta: DeltaSpec) -> ModelSpec:
    """Return the spec with the delta rule; raise ModelFormatError if its sizes do not fit."""
    if delta.num_value_heads % delta.num_key_heads:
        fields.fault(
            f"has {counted_noun(delta.num_value_heads, 'value head')}, not a multiple of its "
            f"{counted_noun(delta.num_key_heads, 'key head')}"
        )
    check_attention_layers(fields, delta.attends)
    return replace(spec, delta=delta, gates_attention=True)


def _gguf_attends(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a GGUF file have attention.

    If the file has a list of layers, MTP layers are at its end, and left out.
    """
    key = "attention.recurrent_layers"
    if not fields.has(key):
        return _every_interval(fields, num_layers)
    num_stored = fields.integer("block_count", MAX_LAYERS)
    return fields.choices(key, {True: False, False: True}, num_stored)[:num_layers]


def _every_interval(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    interval = fields.integer("full_attention_interval", MAX_LAYERS, default=_INTERVAL)
    return tuple((layer + 1) % interval == 0 for layer in range(num_layers))


def _gguf_experts(fields: Fields, spec: ModelSpec) -> ExpertSpec:
    experts = gguf_experts(fields.changed({_SHARED_WIDTH: None}), spec)
    if experts is None:
        fields.fault("is a mixture of experts, but its expert_count is 0")
    shared_size = fields.integer(_SHARED_WIDTH, MAX_WIDTH, default=spec.ffn_size)
    return replace(experts, shared_size=shared_size, gates_shared=True)


def _config_experts(fields: Fields, spec: ModelSpec) -> ExpertSpec:
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [])
    key = "shared_expert_intermediate_size"
    experts = config_experts(
        fields.changed({key: None}),
        spec,
        fields.integer("moe_intermediate_size", MAX_WIDTH),
        normalize=fields.flag("norm_topk_prob", default=True),
    )
    shared_size = fields.integer(key, MAX_WIDTH)
    return replace(experts, shared_size=shared_size, gates_shared=True)


_LAYER = partial(
    residual_layer, pre_norms=("attn_norm", "post_attention_norm"), query_key_norm="head"
)

_LAYER_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}

_EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}

_LINEAR_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_DENSE = _LINEAR_SIZES | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}

_MIXTURE = _DENSE | {
    "hidden_size": 2048,
    "intermediate_size": 512,  # of no layer: every layer has experts
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

_NEXT = _MIXTURE | {
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}

QWEN35 = Family(
    model_types={"qwen3_5_text": _DENSE, "qwen3_5": _DENSE},
    layer=_LAYER,
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    layer_names=_LAYER_NAMES,
    partial_rotary="partial_rotary_factor",
    mtp=MtpInput.NORMED,
)

QWEN35_MOE = Family(
    model_types={"qwen3_5_moe_text": _MIXTURE, "qwen3_5_moe": _MIXTURE},
    layer=_LAYER,
    from_gguf=partial(from_gguf, has_experts=True),
    from_config=partial(from_config, has_experts=True),
    gguf_values=gguf_values,
    layer_names=_LAYER_NAMES | _EXPERT_NAMES,
    partial_rotary="partial_rotary_factor",
    mtp=MtpInput.NORMED,
)

QWEN3_NEXT = Family(
    model_types={"qwen3_next": _NEXT},
    layer=_LAYER,
    from_gguf=partial(from_gguf, is_tiled=False, has_experts=True),
    from_config=partial(from_config, has_experts=True),
    gguf_values=gguf_values,
    layer_names={
        name: weight
        for name, weight in (_LAYER_NAMES | _EXPERT_NAMES).items()
        if not name.startswith("linear_attn.in_proj")
    }
    | {"linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba"},
    partial_rotary="partial_rotary_factor",
    mtp=MtpInput.NORMED,
)
