"""Llama 4 (text): chunked attention, layers without RoPE, experts whose inputs are scaled.

In three of four layers a token attends only to its own chunk of the context, and heads of queries
and keys are normalized. Here they are normalized before RoPE, which gives the same result since
rotations change no length. The other layers attend to the whole context without RoPE, and multiply
queries at later positions by an attention temperature (arXiv:2501.19399).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import all_but_every
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.routed_experts import SIGMOID, max_experts
from twostroke.model.families.spec import ExpertSpec, WindowSpec

if TYPE_CHECKING:
    from typing import Any

    from twostroke.model.families.blocks import QueryKeyNorm
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.program import Op

# What GGUF files do not say; llama.cpp has the same constants.
_CHUNK: Final = 8192
_PERIOD: Final = 4  # of layers without RoPE
_TEMPERATURE_SCALE: Final = 0.1
_TEMPERATURE_LENGTH: Final = 8192
_EXPERTS_WITHOUT_HEAD_NORMS: Final = 128  # Maverick's

_LAYER_TYPES: Final = {"chunked_attention": True, "full_attention": False}
_STEP: Final = "interleave_moe_layer_step"
_EXPERT_LAYERS: Final = "moe_layers"
_UNROTATED: Final = "no_rope_layers"


def llama4_layer(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a Llama 4 layer; heads are normalized in layers with RoPE."""
    is_normed = spec.norms_heads and spec.rotates is not None and spec.rotates[layer]
    head_norm: QueryKeyNorm = "head without weight" if is_normed else None
    return residual_layer(spec, layer, x, output, query_key_norm=head_norm)


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add chunks, temperature and experts of a Llama 4 model to its spec, from a GGUF file."""
    fields.expect("attention.sliding_window", _CHUNK)
    fields.expect("attention.sliding_window_pattern", _PERIOD)
    fields.expect("expert_gating_func", 0, SIGMOID)
    fields.expect("expert_weights_norm", False)  # noqa: FBT003 - the only value
    fields.expect("expert_weights_scale", 0.0, 1.0)
    rotates = all_but_every(_PERIOD, spec.num_layers)
    experts = _experts(
        fields,
        spec,
        keys=("expert_count", "expert_used_count", "expert_feed_forward_length"),
        layers=_every(fields.integer(_STEP, MAX_LAYERS), spec.num_layers),
    )
    spec = replace(spec, experts=experts, rotates=rotates)
    spec = replace(spec, norms_heads=experts.count != _EXPERTS_WITHOUT_HEAD_NORMS)
    window = WindowSpec(_CHUNK, rotates, is_chunked=True)
    return _with_temperature(
        replace(spec, window=window if any(rotates) else None),
        scale=_TEMPERATURE_SCALE,
        length=_TEMPERATURE_LENGTH,
    )


def config_values(fields: Fields) -> dict[str, Any]:
    """Return a replacement for a value of a config.json: the width of dense feed-forwards."""
    return {"intermediate_size": fields.value("intermediate_size_mlp")}


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add chunks, temperature and experts of a Llama 4 model to its spec, from a config.json."""
    if fields.value(_UNROTATED):  # with 0 for layers without RoPE; an empty list says nothing
        rotates = fields.choices(_UNROTATED, {1: True, 0: False}, spec.num_layers)
    else:
        period = fields.integer("no_rope_layer_interval", MAX_LAYERS, default=_PERIOD)
        rotates = all_but_every(period, spec.num_layers)
    slides = rotates
    if fields.has("layer_types"):
        slides = fields.choices("layer_types", _LAYER_TYPES, spec.num_layers)
    window = None
    if any(slides):
        window = WindowSpec(
            fields.integer("attention_chunk_size", MAX_CONTEXT), slides, is_chunked=True
        )
    experts = _experts(
        fields,
        spec,
        keys=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        layers=_config_expert_layers(fields, spec.num_layers),
    )
    rope = replace(spec.rope, interleaved=True)
    spec = replace(spec, rope=rope, rotates=rotates, window=window, experts=experts)
    if not fields.value("attn_temperature_tuning"):  # a flag; published files have a number
        return spec
    scale = fields.number("attn_scale", low=0.0)
    return _with_temperature(spec, scale, fields.integer("floor_scale", MAX_CONTEXT))


def _experts(
    fields: Fields, spec: ModelSpec, keys: tuple[str, str, str], layers: tuple[bool, ...]
) -> ExpertSpec:
    """Read the experts of a Llama 4 model; `layers` tells which layers have them.

    `keys` are the metadata keys of the number of experts, of the number that a token uses, and of
    their width.
    """
    count = fields.integer(keys[0], max_experts(spec))
    width = fields.integer(keys[2], MAX_WIDTH)
    return ExpertSpec(
        count=count,
        num_used=fields.integer(keys[1], count),
        ffn_size=width,
        normalize=False,
        shared_size=width,
        layers=layers,
        scales_inputs=True,
    )


def _config_expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a config.json have experts.

    The file has a list of these layers, or an interval: every n-th layer.
    """
    numbers = fields.value(_EXPERT_LAYERS)
    if numbers is None:
        return _every(fields.integer(_STEP, MAX_LAYERS), num_layers)
    if not isinstance(numbers, list) or any(
        type(number) is not int or not 0 <= number < num_layers for number in numbers
    ):
        layers = counted_noun(num_layers, "layer")
        fields.fault(f"has {_EXPERT_LAYERS} that is not a list of numbers of its {layers}")
    return tuple(layer in numbers for layer in range(num_layers))


def _every(step: int, num_layers: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % step == 0 for layer in range(num_layers))


def _with_temperature(spec: ModelSpec, scale: float, length: int) -> ModelSpec:
    """Return the spec with an attention temperature in the layers without RoPE."""
    unrotated = replace(
        spec.rope,
        scaled_frequencies=(0.0,) * (spec.rope.dim // 2),
        magnitude=1.0,
        temperature_scale=scale,
        temperature_length=length,
        temperature_offset=1,
    )
    return replace(spec, unrotated_rope=unrotated)


_TEXT: Final = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_local_experts": 16, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1, "use_qk_norm": True, "attention_chunk_size": 8192,
    "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip

LLAMA4 = Family(
    model_types={"llama4_text": _TEXT, "llama4": _TEXT},
    layer=llama4_layer,
    from_gguf=from_gguf,
    from_config=from_config,
    config_values=config_values,
    layer_names={
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
        "feed_forward.router": "ffn_gate_inp",
        "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
        "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
        "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    },
    interleaves=True,
    may_norm_heads=True,
    transposes_experts=True,
)
