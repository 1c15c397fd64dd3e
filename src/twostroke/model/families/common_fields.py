"""Fields that several families share: sizes, sliding windows, experts, multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.core.message_text import counted_noun
from twostroke.model.families.fields import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_WIDTH,
)
from twostroke.model.families.spec import ExpertSpec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

# Of all layers together; known models have far fewer (Kimi K2 about 23,000).
MAX_EXPERTS_IN_ALL = 1 << 16

_KV_HEADS = "attention.head_count_kv"
_LAYER_TYPES = {"sliding_attention": True, "full_attention": False}


def read_sizes(fields: Fields, keys: Mapping[str, str]) -> dict[str, Any]:
    """Read the sizes of a model from its file's metadata.

    `keys` maps the name of each size to the metadata key that this file format has for it. The
    default number of key-value heads is the number of heads. The default head width is the model's
    width divided by the number of heads.
    """
    hidden = fields.integer(keys["hidden_size"], MAX_WIDTH)
    heads = fields.integer(keys["num_heads"], MAX_WIDTH)
    kv_heads = fields.integer(keys["num_kv_heads"], MAX_WIDTH, default=heads)
    if heads % kv_heads:
        fields.fault(
            f"has {counted_noun(heads, 'head')}, not a multiple of its "
            f"{counted_noun(kv_heads, 'key-value head')}"
        )
    if not fields.has(keys["head_dim"]) and (hidden % heads or hidden > heads * MAX_HEAD_DIM):
        parts = f"equal parts of at most {MAX_HEAD_DIM}"
        heads_do = counted_noun(heads, "head that does", "heads that do")
        fields.fault(f"has {heads_do} not divide its width of {hidden} into {parts}")
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": fields.integer(keys["head_dim"], MAX_HEAD_DIM, default=hidden // heads),
        "num_layers": fields.integer(keys["num_layers"], MAX_LAYERS),
        "ffn_size": fields.integer(keys["ffn_size"], MAX_WIDTH),
        "context_length": fields.integer(keys["context_length"], MAX_CONTEXT),
    }


def without_mtp_layers(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a GGUF file, so that its layers for MTP are left out.

    MTP (multi-token prediction) layers are the last layers of a file. They only draft tokens.
    """
    mtp_key, count_key = "nextn_predict_layers", "block_count"
    layers = fields.integer(count_key, MAX_LAYERS)
    return {count_key: layers - fields.integer(mtp_key, layers - 1, low=0, default=0), mtp_key: 0}


def gguf_attention_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a GGUF file have attention, and therefore key-value heads.

    The file has one number for all layers, or a number for each layer.
    """
    counts = fields.value(_KV_HEADS)
    if not isinstance(counts, list):
        return (True,) * num_layers
    if len(counts) < num_layers:
        numbers = counted_noun(len(counts), "number", "numbers")
        layers = counted_noun(num_layers, "layer")
        fields.fault(f"has {numbers} of key-value heads for {layers}")
    return tuple(count != 0 for count in counts[:num_layers])


def check_attention_layers(fields: Fields, attends: tuple[bool, ...]) -> None:
    """Refuse a model without attention in any layer; `attends` tells which layers have it."""
    if not any(attends):
        fields.fault(f"has no attention in any of its {counted_noun(len(attends), 'layer')}")


def gguf_kv_heads(fields: Fields) -> dict[str, Any]:
    """Return a replacement for a GGUF file's list of key-value heads: one number for all layers.

    Files of hybrid models have such a list, with 0 for layers without attention.
    """
    return {_KV_HEADS: gguf_only_value(fields, _KV_HEADS)}


def gguf_only_value(fields: Fields, key: str) -> Any:
    """Return a GGUF file's value at `key`, or of a list of numbers the only number but 0.

    Such a list has a number for each layer. Raises ModelFormatError if it has several different
    numbers that are not 0.
    """
    value = fields.value(key)
    if not isinstance(value, list):
        return value
    if not all(type(number) is int for number in value):
        fields.refuse(key, "not whole numbers")
    values = {number: None for number in value if number != 0}
    if len(values) != 1:
        numbers = ", ".join(map(str, list(values)[:3])) or "zeros"
        fields.fault(
            f"has {fields.prefix}{key} with {numbers}; one number that is not 0 is supported"
        )
    return next(iter(values))


def all_but_every(period: int, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have a sliding window, if every `period`-th layer has none."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def gguf_window(
    fields: Fields, slides: tuple[bool, ...], *, default_size: int = 0
) -> WindowSpec | None:
    """Read the sliding window of a GGUF file: its size, and which layers have it.

    Returns None if no layer has a window. `slides` tells which layers have the window, and
    `default_size` its size, if the file does not.
    """
    size = fields.integer("attention.sliding_window", MAX_CONTEXT, low=0, default=default_size)
    pattern = "attention.sliding_window_pattern"
    if isinstance(fields.value(pattern), list):
        slides = fields.choices(pattern, {True: True, False: False}, len(slides))
    elif fields.has(pattern):
        slides = all_but_every(fields.integer(pattern, MAX_LAYERS), len(slides))
    return WindowSpec(size, slides) if size and any(slides) else None


def config_window(fields: Fields, slides: tuple[bool, ...]) -> WindowSpec | None:
    """Read the sliding window of a config.json: its size, and which layers have it.

    Returns None if no layer has a window. `slides` tells which layers have the window if the file
    has no `layer_types`.
    """
    if fields.has("layer_types"):
        slides = fields.choices("layer_types", _LAYER_TYPES, len(slides))
    elif not fields.has("sliding_window"):
        return None
    return (
        WindowSpec(fields.integer("sliding_window", MAX_CONTEXT), slides) if any(slides) else None
    )


def config_window_of_all(fields: Fields, num_layers: int) -> WindowSpec | None:
    """Read the sliding window of a family in which all layers have it; None if it is off.

    `layer_types` in the config.json is ignored, as in transformers for these families.
    """
    if not fields.has("sliding_window"):
        return None
    return WindowSpec(fields.integer("sliding_window", MAX_CONTEXT), (True,) * num_layers)


def gguf_experts(fields: Fields, spec: ModelSpec) -> ExpertSpec | None:
    """Read the mixture of experts of a GGUF file; None if the model has no experts."""
    unsupported_keys = "expert_shared_count", "expert_shared_feed_forward_length"
    for key in (*unsupported_keys, "leading_dense_block_count"):
        fields.expect(key, 0)
    if fields.integer("expert_count", MAX_EXPERTS, low=0, default=0) == 0:
        return None
    fields.expect("expert_gating_func", 0, 1)  # 0 is unspecified, 1 softmax
    fields.expect("expert_weights_scale", 0.0, 1.0)
    fields.expect("expert_group_count", 0, 1)
    width = fields.integer("expert_feed_forward_length", MAX_WIDTH, default=spec.ffn_size)
    normalize = fields.flag("expert_weights_norm", default=True)
    return _experts(fields, spec, ("expert_count", "expert_used_count"), width, normalize=normalize)


def config_experts(
    fields: Fields, spec: ModelSpec, ffn_size: int, *, normalize: bool
) -> ExpertSpec:
    """Read how many experts a config.json has, and how many of them a row uses."""
    for key in ("n_shared_experts", "shared_expert_intermediate_size"):
        fields.expect(key, 0)
    count = "num_experts" if fields.has("num_experts") else "num_local_experts"
    return _experts(fields, spec, (count, "num_experts_per_tok"), ffn_size, normalize=normalize)


def _experts(
    fields: Fields, spec: ModelSpec, keys: tuple[str, str], ffn_size: int, *, normalize: bool
) -> ExpertSpec:
    count = fields.integer(keys[0], min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // spec.num_layers))
    return ExpertSpec(count, fields.integer(keys[1], count), ffn_size, normalize)
