"""Gemma 4's text models: layers that share keys and values, and per-layer embeddings.

Layers without a window have wider heads and rotate a quarter of each head. Values are normalized
without a weight. One model adds experts to each feed-forward. In small models the last layers
compute no keys and values, and each token has an additional input vector for each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.blocks import norm, residual_layer
from twostroke.model.families.common_fields import (
    MAX_EXPERTS_IN_ALL,
    all_but_every,
    config_window,
    gguf_window,
)
from twostroke.model.families.family import Family
from twostroke.model.families.fields import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_WIDTH,
    Fields,
)
from twostroke.model.families.rope import config_rope
from twostroke.model.families.spec import ExpertSpec, RopeSpec, SharedKvSpec
from twostroke.model.program import Activation, ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families.spec import ModelSpec, WindowSpec
    from twostroke.model.program import Op

_WINDOW_PERIOD, _SLIDING_ROPE_BASE = 6, 10000.0
_INPUTS: Final = "layer_inputs"
_KV_HEADS, _FFN = "attention.head_count_kv", "feed_forward_length"


def gemma4_layer(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a Gemma 4 layer, which reads `x` and writes `output`.

    They are attention and the feed-forward. In models that have them, there follow the token's
    additional input for this layer (per-layer embedding), and a learned factor of the layer's
    output.
    """
    name = f"blk.{layer}"
    width = spec.layer_inputs
    hidden = spec.hidden_size
    parts = _layer_inputs(spec, x) if width and layer == 0 else []
    full_output = f"{output}.before" if spec.layer_factors else output
    block_output = f"{output}.own" if width else full_output
    parts += residual_layer(spec, layer, x, block_output, post_norms=True, query_key_norm="head")
    if width:
        gate, layer_input, gated = f"{name}.inp_gate", f"{name}.input", f"{name}.inp_gated"
        added = f"{name}.proj"
        parts += [
            ops.TakeColumns(layer_input, _INPUTS, width, layer * width),
            ops.Linear(gate, block_output, f"{gate}.weight", hidden, width),
            ops.GatedActivation(gated, gate, layer_input, width, spec.activation),
            ops.Linear(added, gated, f"{added}.weight", width, hidden),
            norm(spec, f"{added}.normed", added, f"{name}.post_norm"),
            ops.Add(full_output, block_output, f"{added}.normed", hidden),
        ]
    if spec.layer_factors:
        factor = f"{name}.layer_output_scale.weight"
        parts.append(ops.Scale(output, full_output, hidden, weight=factor))
    return parts


def _layer_inputs(spec: ModelSpec, x: str) -> list[Op]:
    """Return the operations that compute each token's additional inputs, one vector for each layer.

    An input is the scaled sum of a row of an embedding table and a projection of `x`. The
    projection is divided by the square root of the model's width and then normalized, which equals
    a norm with a larger epsilon.
    """
    input_size, hidden = spec.layer_inputs, spec.hidden_size
    width = input_size * spec.num_layers
    table, projected, total = "per_layer_token_embd", "per_layer_model_proj", f"{_INPUTS}.sum"
    return [
        ops.Embed(table, f"{table}.weight", spec.vocab_size, width),
        ops.Scale(f"{table}.scaled", table, width, input_size**0.5),
        ops.Linear(projected, x, f"{projected}.weight", hidden, width),
        ops.RMSNorm(
            f"{projected}.normed",
            projected,
            weight="per_layer_proj_norm.weight",
            width=width,
            epsilon=spec.norm_epsilon * hidden,
            num_groups=spec.num_layers,
        ),
        ops.Add(total, f"{projected}.normed", f"{table}.scaled", width),
        ops.Scale(_INPUTS, total, width, 0.5**0.5),
    ]


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a Gemma 4 GGUF file: one size in place of a list.

    Sizes differ between layers. The returned sizes are of layers without a window, and of layers
    that compute keys and values. `gemma4_from_gguf` reads the sizes of other layers.
    """
    count = fields.integer("block_count", MAX_LAYERS)
    slides = _windowed_layers(fields, count)
    values = {"attention.shared_kv_layers": 0}
    for key, layer in ((_KV_HEADS, slides.index(False)), (_FFN, 0)):
        values[key] = _layer_sizes(fields, key, count)[layer]
    return values


def gemma4_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add Gemma 4's windows, layers with shared keys and values, and layer inputs (GGUF)."""
    count = spec.num_layers
    sizes = _layer_sizes(fields, _FFN, spec.num_layers)
    kv_heads = _layer_sizes(fields, _KV_HEADS, count)
    spec = replace(
        spec,
        activation=Activation.GELU_TANH,
        attention_scale=1.0,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        layer_inputs=fields.integer(
            "embedding_length_per_layer_input", MAX_WIDTH, low=0, default=0
        ),
        layer_factors=True,
        norms_values=True,
    )
    window = gguf_window(fields, _windowed_layers(fields, count))
    if window is not None:
        dim = fields.integer("attention.key_length_swa", MAX_HEAD_DIM, low=2)
        if dim % 2:
            fields.refuse(
                "attention.key_length_swa", "which must be even, since halves are rotated"
            )
        fields.expect("attention.value_length_swa", dim)
        fields.expect("rope.dimension_count_swa", dim)
        base = fields.number("rope.freq_base_swa", default=_SLIDING_ROPE_BASE)
        sliding_kv_heads = kv_heads[window.slides.index(True)]
        rope = RopeSpec(base, dim, interleaved=False)
        window = replace(window, rope=rope, num_kv_heads=sliding_kv_heads, head_dim=dim)
    if fields.integer("expert_count", MAX_EXPERTS, low=0, default=0):
        experts = _experts(
            fields,
            spec,
            count_key="expert_count",
            used_key="expert_used_count",
            width_key="expert_feed_forward_length",
        )
        spec = replace(spec, experts=experts)
    num_shared_layers = fields.integer("attention.shared_kv_layers", count - 1, low=0, default=0)
    spec = with_shared_kv_layers(fields, replace(spec, window=window), num_shared_layers, sizes[-1])
    _check_heads(fields, spec)
    for layer in range(count):
        if sizes[layer] != spec.ffn_size_of(layer):
            fields.fault(
                f"has layers with different feed-forward widths: layer {layer} has {sizes[layer]}"
            )
        if kv_heads[layer] != spec.kv_heads_of(layer)[0]:
            fields.fault(
                "has layers of the same kind with different numbers of key-value heads: layer "
                f"{layer} has {kv_heads[layer]}"
            )
    return spec


def config_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for values of a Gemma 4 config.json: sizes of layers without a window.

    `gemma4_from_config` reads the sizes of the other layers. A flag for bidirectional attention
    between image tokens is removed, since text is always read causally.
    """
    values: dict[str, Any] = {"head_dim": fields.value("global_head_dim")}
    if fields.flag("attention_k_eq_v", default=False) and fields.has("num_global_key_value_heads"):
        values["num_key_value_heads"] = fields.value("num_global_key_value_heads")
    if overrides := fields.part("per_layer_config"):  # written by transformers 5
        layer_values = list(overrides.values.values()) or [None]
        if any(
            values_of_layer != layer_values[0] or not isinstance(values_of_layer, dict)
            for values_of_layer in layer_values
        ):
            fields.fault("has a per_layer_config with layers that differ, which is not supported")
        values |= layer_values[0]
    values["rope_parameters"] = _ropes(fields, "full_attention")
    if fields.value("use_bidirectional_attention") == "vision":
        values["use_bidirectional_attention"] = False
    return values


def gemma4_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add Gemma 4's windows, shared keys and values, and layer inputs to its spec (config.json)."""
    window = config_window(fields, all_but_every(_WINDOW_PERIOD, spec.num_layers))
    if window is not None:
        window = replace(window, slides=(*window.slides[:-1], False))  # as in transformers
        dim = fields.integer("head_dim", MAX_HEAD_DIM)
        sliding_fields = fields.changed({"rope_parameters": _ropes(fields, "sliding_attention")})
        rope, _ = config_rope(sliding_fields, dim, spec.context_length, "sliding_attention")
        kv_heads = fields.integer("num_key_value_heads", MAX_WIDTH)
        window = replace(window, rope=rope, num_kv_heads=kv_heads, head_dim=dim)
    _check_overrides(fields, window)
    inputs = fields.integer("hidden_size_per_layer_input", MAX_WIDTH, low=0, default=0)
    if inputs:
        fields.expect("vocab_size_per_layer_input", spec.vocab_size)
    spec = replace(
        spec,
        attention_scale=1.0,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        window=window,
        layer_inputs=inputs,
        layer_factors=True,
        norms_values=True,
        keys_give_values=fields.flag("attention_k_eq_v", default=False),
    )
    if fields.flag("enable_moe_block", default=False):
        experts = _experts(
            fields,
            spec,
            count_key="num_experts",
            used_key="top_k_experts",
            width_key="moe_intermediate_size",
        )
        spec = replace(spec, experts=experts)
    num_shared_layers = fields.integer(
        "num_kv_shared_layers", spec.num_layers - 1, low=0, default=0
    )
    is_wide = fields.flag("use_double_wide_mlp", default=False)
    _check_heads(fields, spec)
    return with_shared_kv_layers(
        fields, spec, num_shared_layers, spec.ffn_size * (2 if is_wide else 1)
    )


def _ropes(fields: Fields, kind: str) -> Mapping[str, Any]:
    """Return RoPE parameters for each layer type: "sliding_attention" and "full_attention".

    If the file has no parameters, these are Gemma 4's defaults. If it has any, it must have
    parameters for the layer type `kind`.
    """
    ropes = fields.part("rope_parameters")
    if ropes is None:
        return _ROPES
    if not ropes.has(kind):
        fields.fault(f"has rope_parameters without an entry for {kind}")
    return ropes.values


def _check_overrides(fields: Fields, window: WindowSpec | None) -> None:
    """Refuse a `per_layer_config` that changes more than the heads of layers without a window."""
    if (overrides := fields.part("per_layer_config")) is None:
        return
    slides = () if window is None else window.slides
    width = len(str(len(slides) - 1))
    full_layers = {
        str(layer).zfill(width) for layer, layer_values in enumerate(slides) if not layer_values
    }
    listed_layers = {key.zfill(width) for key in overrides.values}
    keys = {key for layer_values in overrides.values.values() for key in layer_values}
    if listed_layers != full_layers or keys - {"head_dim", "num_key_value_heads"}:
        fields.fault(
            "has a per_layer_config that changes more than the heads of layers without a window, "
            "which is not supported"
        )


def _check_heads(fields: Fields, spec: ModelSpec) -> None:
    """Refuse layers whose number of key-value heads does not divide the number of heads."""
    for kv_heads, _ in map(spec.kv_heads_of, range(spec.num_layers)):
        if spec.num_heads % kv_heads:
            heads = (
                f"{counted_noun(spec.num_heads, 'head')}, not a multiple of its "
                f"{counted_noun(kv_heads, 'key-value head')}"
            )
            fields.fault(f"has {heads}")


def _windowed_layers(fields: Fields, count: int) -> tuple[bool, ...]:
    """Return, for each layer of a GGUF file, whether it has a sliding window.

    Refuses a file in which all layers have one.
    """
    usual = (*all_but_every(_WINDOW_PERIOD, count)[:-1], False)
    fields.integer("attention.sliding_window", MAX_CONTEXT, low=0)  # required
    window = gguf_window(fields, usual)
    slides = (False,) * count if window is None else window.slides
    if all(slides):
        fields.fault("has no layer without a window")
    return slides


def _layer_sizes(fields: Fields, key: str, count: int) -> list[int]:
    """Return the size of each layer at a GGUF key, whose value is one number for all, or a list."""
    value = fields.value(key)
    if not isinstance(value, list):
        return [fields.integer(key, MAX_WIDTH)] * count
    if len(value) != count:
        fields.fault(
            f"has {fields.prefix}{key} that is not a list of {counted_noun(count, 'number')}"
        )
    entries = Fields(fields.name, {f"{fields.prefix}{key}[{i}]": v for i, v in enumerate(value)})
    return [entries.integer(name, MAX_WIDTH) for name in entries.values]


def with_shared_kv_layers(fields: Fields, spec: ModelSpec, count: int, ffn_size: int) -> ModelSpec:
    """Return a spec whose last `count` layers share keys and values of earlier layers."""
    if count == 0:
        return spec
    window_kinds = {spec.window_of(layer) is None for layer in range(spec.num_layers - count)}
    if window_kinds != {spec.window_of(layer) is None for layer in range(spec.num_layers)}:
        fields.fault(
            f"has {counted_noun(count, 'layer that reads', 'layers that read')} keys and values of "
            "earlier layers, but no earlier layer with the same kind of attention"
        )
    return replace(spec, shared_kv=SharedKvSpec(count, ffn_size))


def _experts(
    fields: Fields, spec: ModelSpec, count_key: str, used_key: str, width_key: str
) -> ExpertSpec:
    """Read the experts that Gemma 4 adds to each feed-forward.

    The metadata keys are of the number of experts, the number that a token uses, and their width.
    """
    num_experts = fields.integer(count_key, min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // spec.num_layers))
    num_used = fields.integer(used_key, num_experts)
    size = fields.integer(width_key, MAX_WIDTH)
    return ExpertSpec(num_experts, num_used, size, normalize=True, adds_dense_ffn=True)


_ROPES: Final = {
    "sliding_attention": {"rope_type": "default", "rope_theta": _SLIDING_ROPE_BASE},
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
    },
}  # fmt: skip
_DEFAULTS: Final = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
    "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "tie_word_embeddings": True, "sliding_window": 512, "global_head_dim": 512,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
    "rope_parameters": _ROPES,
}  # fmt: skip

_UNIFIED: Final = _DEFAULTS | {
    "max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip

GEMMA4 = Family(
    model_types={
        "gemma4_text": _DEFAULTS,
        "gemma4": _DEFAULTS,
        "gemma4_unified_text": _UNIFIED,
        "gemma4_unified": _UNIFIED,
    },
    layer=gemma4_layer,
    scales_embedding=True,
    from_gguf=gemma4_from_gguf,
    from_config=gemma4_from_config,
    gguf_values=gguf_values,
    may_lack_values=True,
    config_values=config_values,
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "router": "ffn_gate_inp",
        "router.proj": "ffn_gate_inp",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    },
)  # fmt: skip
