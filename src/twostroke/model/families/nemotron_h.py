"""Nemotron-H, Nemotron Nano v2 and Nemotron 3: each layer has one block only.

The block is Mamba-2, attention without positions, a feed-forward, or experts. Feed-forwards have no
gate: their activation is the squared ReLU. Experts may read and write vectors of a smaller width.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.blocks import one_block_layer
from twostroke.model.families.common_fields import gguf_only_value, without_mtp_layers
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.mamba_fields import config_mamba2, gguf_mamba2, mamba_names
from twostroke.model.families.routed_experts import (
    SIGMOID,
    config_routed_experts,
    gguf_routed_experts,
)
from twostroke.model.families.spec import ExpertSpec, LayerKind
from twostroke.model.program import Activation

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_KV_HEADS: Final = "attention.head_count_kv"
_EPSILON: Final = "attention.layer_norm_rms_epsilon"
_FFN_SIZES: Final = "feed_forward_length"
_SHARED_WIDTH: Final = "expert_shared_feed_forward_length"
_KINDS: Final = {
    "mamba": LayerKind.RECURRENT,
    "linear_attention": LayerKind.RECURRENT,
    "attention": LayerKind.ATTENTION,
    "full_attention": LayerKind.ATTENTION,
    "mlp": LayerKind.FEED_FORWARD,
    "moe": LayerKind.EXPERTS,
}
_PATTERN: Final = {
    "M": LayerKind.RECURRENT,
    "*": LayerKind.ATTENTION,
    "-": LayerKind.FEED_FORWARD,
    "E": LayerKind.EXPERTS,
}
_MAMBA_KEYS: Final = {
    "num_heads": "mamba_num_heads",
    "num_groups": "n_groups",
    "state_size": "ssm_state_size",
    "head_dim": "mamba_head_dim",
    "kernel": "conv_kernel",
    "has_convolution_bias": "use_conv_bias",
    "has_bias": "use_bias",
}


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a GGUF file: one size for all layers, and no MTP layers.

    If the file has no epsilon for RMSNorm, its epsilon for LayerNorm is used.
    """
    values = {key: gguf_only_value(fields, key) for key in (_KV_HEADS, _FFN_SIZES)}
    if not fields.has(_EPSILON):
        values[_EPSILON] = fields.value("attention.layer_norm_epsilon")
    return without_mtp_layers(fields) | values


def from_gguf(fields: Fields, spec: ModelSpec, *, has_experts: bool = False) -> ModelSpec:
    """Add the blocks of a Nemotron-H model to its spec, from a GGUF file."""
    ffn_kind = LayerKind.EXPERTS if has_experts else LayerKind.FEED_FORWARD
    kinds = _gguf_kinds(fields, spec.num_layers, ffn_kind)
    experts = None
    if has_experts:
        experts = gguf_routed_experts(fields, spec, default_gating=SIGMOID)
    if experts is not None:
        experts = replace(
            experts,
            shared_size=fields.integer(_SHARED_WIDTH, MAX_WIDTH, low=0, default=0),
            latent_size=fields.integer("moe_latent_size", MAX_WIDTH, low=0, default=0),
        )
    attends = tuple(kind is LayerKind.ATTENTION for kind in kinds)
    spec = replace(spec, mamba=gguf_mamba2(fields, spec, attends))
    return _with_blocks(fields, spec, kinds, experts)


def config_values(fields: Fields) -> dict[str, Any]:
    """Return a replacement for a value of a config.json: the number of layers.

    It is the length of the file's list of layer kinds.
    """
    return {"num_hidden_layers": len(_config_kinds(fields))}


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the blocks of a Nemotron-H model to its spec, from a config.json.

    transformers limits the time steps of prompts, not of generated tokens, to `time_step_min`.
    Other engines do not, and neither does Twostroke.
    """
    for key, supported in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        fields.expect(key, supported)
    fields.expect("attention_bias", False)  # noqa: FBT003 - the only value
    kinds = _config_kinds(fields)
    spec = replace(spec, norm_epsilon=fields.number("layer_norm_epsilon"))
    experts = None
    if LayerKind.EXPERTS in kinds:
        experts = config_routed_experts(fields, spec, 0, has_groups=True)
    if experts is not None:
        experts = replace(
            experts,
            shared_size=fields.integer("moe_shared_expert_intermediate_size", MAX_WIDTH),
            latent_size=fields.integer("moe_latent_size", MAX_WIDTH, low=0, default=0),
        )
    attends = tuple(kind is LayerKind.ATTENTION for kind in kinds)
    spec = replace(spec, mamba=config_mamba2(fields, spec, attends, _MAMBA_KEYS))
    return _with_blocks(fields, spec, kinds, experts)


def _with_blocks(
    fields: Fields, spec: ModelSpec, kinds: tuple[LayerKind, ...], experts: ExpertSpec | None
) -> ModelSpec:
    """Return the spec with the kind of each layer's block, and with its experts if it has any."""
    if LayerKind.RECURRENT not in kinds:
        fields.fault(f"has no Mamba-2 in any of its {counted_noun(len(kinds), 'layer')}")
    if LayerKind.EXPERTS in kinds and experts is None:
        fields.fault("has layers with experts, but its expert_count is 0")
    return replace(
        spec,
        experts=experts,
        layer_kinds=kinds,
        rotates=(False,) * spec.num_layers,
        activation=Activation.RELU,
        gates_ffn=False,
    )


def _gguf_kinds(fields: Fields, num_layers: int, ffn_kind: LayerKind) -> tuple[LayerKind, ...]:
    """Return the kind of each layer's block, from a GGUF file's sizes of each layer.

    A layer with neither key-value heads nor a feed-forward width is recurrent (Mamba-2). `ffn_kind`
    is the kind of layers with a feed-forward width.
    """
    kinds = []
    head_counts = _layer_numbers(fields, _KV_HEADS, num_layers)
    ffn_sizes = _layer_numbers(fields, _FFN_SIZES, num_layers)
    for layer, (num_kv_heads, ffn_size) in enumerate(zip(head_counts, ffn_sizes, strict=True)):
        if num_kv_heads and ffn_size:
            fields.fault(f"has both attention and a feed-forward in layer {layer}")
        ffn_or_recurrent = ffn_kind if ffn_size else LayerKind.RECURRENT
        kinds.append(LayerKind.ATTENTION if num_kv_heads else ffn_or_recurrent)
    return tuple(kinds)


def _layer_numbers(fields: Fields, key: str, num_layers: int) -> list[int]:
    """Return the numbers of the first `num_layers` layers from a GGUF file's list at `key`.

    The list may be longer: MTP layers follow.
    """
    values = fields.value(key)
    if not isinstance(values, list) or len(values) < num_layers:
        numbers = counted_noun(num_layers, "number")
        fields.fault(f"has {fields.prefix}{key} that is not a list of {numbers}")
    return values[:num_layers]


def _config_kinds(fields: Fields) -> tuple[LayerKind, ...]:
    """Return the kind of each layer's block, from a config.json.

    The file has a list of names, or a string with a letter for each layer.
    """
    for key in ("layers_block_type", "layer_types"):
        values = fields.value(key)
        if isinstance(values, list):
            return fields.choices(key, _KINDS, len(values))
    key = "hybrid_override_pattern"
    letters = list(fields.text(key))
    if not 0 < len(letters) <= MAX_LAYERS:
        layers = counted_noun(len(letters), "layer")
        fields.fault(f"has {key} of {layers}, not of 1 to {MAX_LAYERS}")
    return fields.changed({key: letters}).choices(key, _PATTERN, len(letters))


_SIZES: Final = {
    "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "intermediate_size": 21504, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1,
    "hybrid_override_pattern": "ME*-",
}  # fmt: skip

NEMOTRON_H = Family(
    model_types={"nemotron_h": _SIZES},
    layer=one_block_layer,
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    config_values=config_values,
    layer_names=mamba_names("mixer")
    | {
        "norm": "attn_norm",
        "mixer.q_proj": "attn_q",
        "mixer.k_proj": "attn_k",
        "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
        "mixer.gate": "ffn_gate_inp",
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
        "mixer.shared_experts.up_proj": "ffn_up_shexp",
        "mixer.shared_experts.down_proj": "ffn_down_shexp",
    },
)

# Folders of both have the same model type, which is in `NEMOTRON_H`.
NEMOTRON_H_MOE = replace(NEMOTRON_H, model_types={}, from_gguf=partial(from_gguf, has_experts=True))
