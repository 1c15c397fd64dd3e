"""Gemma 4's text models: layers that read earlier layers' keys and values, and inputs of layers.

Layers without a window have wider heads, of which a quarter is rotated. Values are normalized
without a weight. One model has experts beside each feed-forward. In small models the last layers
have no keys and values of their own, and each token brings a vector to each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

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

_PERIOD, _LOCAL_BASE = 6, 10000.0
_INPUTS: Final = "layer_inputs"
_KV_HEADS, _FFN = "attention.head_count_kv", "feed_forward_length"


def gemma4_layer(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return attention and feed-forward, what the layer's input adds, and the layer's factor."""
    name, width, hidden = f"blk.{layer}", spec.layer_inputs, spec.hidden_size
    parts = _inputs(spec, x) if width and layer == 0 else []
    whole = f"{output}.before" if spec.layer_factors else output
    own = f"{output}.own" if width else whole
    parts += residual_layer(spec, layer, x, own, post_norms=True, query_key_norm="head")
    if width:
        gate, given, gated = f"{name}.inp_gate", f"{name}.input", f"{name}.inp_gated"
        added = f"{name}.proj"
        parts += [
            ops.TakeColumns(given, _INPUTS, width, layer * width),
            ops.Linear(gate, own, f"{gate}.weight", hidden, width),
            ops.GatedActivation(gated, gate, given, width, spec.activation),
            ops.Linear(added, gated, f"{added}.weight", width, hidden),
            norm(spec, f"{added}.normed", added, f"{name}.post_norm"),
            ops.Add(whole, own, f"{added}.normed", hidden),
        ]
    if spec.layer_factors:
        factor = f"{name}.layer_output_scale.weight"
        parts.append(ops.Scale(output, whole, hidden, weight=factor))
    return parts


def _inputs(spec: ModelSpec, x: str) -> list[Op]:
    """Return what each token brings to each layer: a row of a table, and a product of x.

    The product is divided by the root of the model's width and normalized, which is the same as
    with a larger epsilon.
    """
    each, hidden = spec.layer_inputs, spec.hidden_size
    width = each * spec.num_layers
    table, made, whole = "per_layer_token_embd", "per_layer_model_proj", f"{_INPUTS}.sum"
    epsilon = spec.norm_epsilon * hidden
    weight = "per_layer_proj_norm.weight"
    return [
        ops.Embed(table, f"{table}.weight", spec.vocab_size, width),
        ops.Scale(f"{table}.scaled", table, width, each**0.5),
        ops.Linear(made, x, f"{made}.weight", hidden, width),
        ops.RMSNorm(f"{made}.normed", made, weight, width, epsilon, spec.num_layers),
        ops.Add(whole, f"{made}.normed", f"{table}.scaled", width),
        ops.Scale(_INPUTS, whole, width, 0.5**0.5),
    ]


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return the sizes of layers without a window, and of those with keys of their own."""
    count = fields.integer("block_count", MAX_LAYERS)
    slides, values = _slides(fields, count), {"attention.shared_kv_layers": 0}
    for key, layer in ((_KV_HEADS, slides.index(False)), (_FFN, 0)):
        values[key] = _each(fields, key, count)[layer]
    return values


def gemma4_from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read windows, borrowing layers, and inputs of layers."""
    count, sizes = spec.num_layers, _each(fields, _FFN, spec.num_layers)
    kv_heads = _each(fields, _KV_HEADS, count)
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
    window = gguf_window(fields, _slides(fields, count))
    if window is not None:
        dim = fields.integer("attention.key_length_swa", MAX_HEAD_DIM, low=2)
        if dim % 2:
            fields.refuse("attention.key_length_swa", "of which halves are rotated")
        fields.expect("attention.value_length_swa", dim)
        fields.expect("rope.dimension_count_swa", dim)
        base = fields.number("rope.freq_base_swa", default=_LOCAL_BASE)
        sliding = kv_heads[window.slides.index(True)]
        rope = RopeSpec(base, dim, interleaved=False)
        window = replace(window, rope=rope, num_kv_heads=sliding, head_dim=dim)
    if fields.integer("expert_count", MAX_EXPERTS, low=0, default=0):
        keys = "expert_count", "expert_used_count", "expert_feed_forward_length"
        spec = replace(spec, experts=_experts(fields, spec, *keys))
    borrowed = fields.integer("attention.shared_kv_layers", count - 1, low=0, default=0)
    spec = borrowing_layers(fields, replace(spec, window=window), borrowed, sizes[-1])
    _check_heads(fields, spec)
    for layer in range(count):
        if sizes[layer] != spec.ffn_size_of(layer):
            fields.fault(f"has feed-forwards of many widths: layer {layer} has {sizes[layer]}")
        if kv_heads[layer] != spec.kv_heads_of(layer)[0]:
            fields.fault(f"has layers of one kind with {kv_heads[layer]} key-value heads and more")
    return spec


def config_values(fields: Fields) -> dict[str, Any]:
    """Return the sizes of layers without a window; text is causal whatever pictures are."""
    values: dict[str, Any] = {"head_dim": fields.value("global_head_dim")}
    if fields.flag("attention_k_eq_v", default=False) and fields.has("num_global_key_value_heads"):
        values["num_key_value_heads"] = fields.value("num_global_key_value_heads")
    if each := fields.part("per_layer_config"):  # as transformers 5 writes them
        changes = list(each.values.values()) or [None]
        if any(one != changes[0] or not isinstance(one, dict) for one in changes):
            fields.fault("has a per_layer_config with layers that differ, which is not supported")
        values |= changes[0]
    values["rope_parameters"] = _ropes(fields, "full_attention")
    if fields.value("use_bidirectional_attention") == "vision":
        values["use_bidirectional_attention"] = False
    return values


def gemma4_from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Read windows, borrowing layers, and inputs of layers."""
    window = config_window(fields, all_but_every(_PERIOD, spec.num_layers))
    if window is not None:
        window = replace(window, slides=(*window.slides[:-1], False))  # as in transformers
        dim = fields.integer("head_dim", MAX_HEAD_DIM)
        own = fields.changed({"rope_parameters": _ropes(fields, "sliding_attention")})
        rope, _ = config_rope(own, dim, spec.context_length, "sliding_attention")
        kv_heads = fields.integer("num_key_value_heads", MAX_WIDTH)
        window = replace(window, rope=rope, num_kv_heads=kv_heads, head_dim=dim)
    _check_each(fields, window)
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
        keys = "num_experts", "top_k_experts", "moe_intermediate_size"
        spec = replace(spec, experts=_experts(fields, spec, *keys))
    borrowed = fields.integer("num_kv_shared_layers", spec.num_layers - 1, low=0, default=0)
    is_wide = fields.flag("use_double_wide_mlp", default=False)
    _check_heads(fields, spec)
    return borrowing_layers(fields, spec, borrowed, spec.ffn_size * (2 if is_wide else 1))


def _ropes(fields: Fields, kind: str) -> Mapping[str, Any]:
    """Return the ropes of both kinds of layers; a file must have that of `kind`, if any."""
    said = fields.part("rope_parameters")
    if said is None:
        return _ROPES
    if not said.has(kind):
        fields.fault(f"has rope_parameters without those of {kind}")
    return said.values


def _check_each(fields: Fields, window: WindowSpec | None) -> None:
    """Refuse a file whose `per_layer_config` is not about heads of layers without a window."""
    if (each := fields.part("per_layer_config")) is None:
        return
    slides = () if window is None else window.slides
    width = len(str(len(slides) - 1))
    wide = {str(layer).zfill(width) for layer, one in enumerate(slides) if not one}
    said = {key.zfill(width) for key in each.values}
    keys = {key for one in each.values.values() for key in one}
    if said != wide or keys - {"head_dim", "num_key_value_heads"}:
        fields.fault("has a per_layer_config that is not about heads of layers without a window")


def _check_heads(fields: Fields, spec: ModelSpec) -> None:
    """Refuse sliding layers whose key-value heads do not divide the others."""
    for kv_heads, _ in map(spec.kv_heads_of, range(spec.num_layers)):
        if spec.num_heads % kv_heads:
            heads = f"{spec.num_heads} heads, not a multiple of its {kv_heads} key-value heads"
            fields.fault(f"has {heads}")


def _slides(fields: Fields, count: int) -> tuple[bool, ...]:
    """Return which layers of a GGUF file slide; some do not."""
    usual = (*all_but_every(_PERIOD, count)[:-1], False)
    fields.integer("attention.sliding_window", MAX_CONTEXT, low=0)  # must be there
    window = gguf_window(fields, usual)
    slides = (False,) * count if window is None else window.slides
    if all(slides):
        fields.fault("has no layer without a window")
    return slides


def _each(fields: Fields, key: str, count: int) -> list[int]:
    """Return a size of each layer, of which a GGUF file has one for all, or a list."""
    value = fields.value(key)
    if not isinstance(value, list):
        return [fields.integer(key, MAX_WIDTH)] * count
    if len(value) != count:
        fields.fault(f"has {fields.prefix}{key} that is not a list of {count} numbers")
    entries = Fields(fields.name, {f"{fields.prefix}{key}[{i}]": v for i, v in enumerate(value)})
    return [entries.integer(name, MAX_WIDTH) for name in entries.values]


def borrowing_layers(fields: Fields, spec: ModelSpec, count: int, ffn_size: int) -> ModelSpec:
    """Return the spec with `count` layers that borrow keys and values."""
    if count == 0:
        return spec
    own = {spec.window_of(layer) is None for layer in range(spec.num_layers - count)}
    if own != {spec.window_of(layer) is None for layer in range(spec.num_layers)}:
        fields.fault(f"has {count} layers that read keys and values of earlier ones, not of a kind")
    return replace(spec, borrowing=SharedKvSpec(count, ffn_size))


def _experts(fields: Fields, spec: ModelSpec, count: str, used: str, width: str) -> ExpertSpec:
    """Return the experts beside each feed-forward; the rest are keys."""
    number = fields.integer(count, min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // spec.num_layers))
    chosen, size = fields.integer(used, number), fields.integer(width, MAX_WIDTH)
    return ExpertSpec(number, chosen, size, normalize=True, beside=True)


_ROPES: Final = {
    "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_BASE},
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
