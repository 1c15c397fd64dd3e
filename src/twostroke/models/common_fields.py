"""Fields that several families share: sliding windows and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.models.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from twostroke.models.spec import ExpertSpec, WindowSpec

if TYPE_CHECKING:
    from twostroke.models.fields import Fields

# In all layers together; known models have far fewer (Kimi K2 about 23,000).
_MAX_EXPERTS_IN_ALL = 1 << 16


def all_but_every(period: int, num_layers: int) -> tuple[bool, ...]:
    """Return which layers slide where every `period`-th layer sees everything."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def gguf_window(
    fields: Fields, slides: tuple[bool, ...], *, default_size: int = 0
) -> WindowSpec | None:
    """Read the sliding window of a GGUF file, 0 for none.

    `slides` says which layers do if the file does not.
    """
    size = fields.integer("attention.sliding_window", MAX_CONTEXT, low=0, default=default_size)
    pattern = "attention.sliding_window_pattern"
    if isinstance(fields.value(pattern), list):
        slides = fields.flags(pattern, len(slides))
    elif fields.has(pattern):
        slides = all_but_every(fields.integer(pattern, MAX_LAYERS), len(slides))
    return WindowSpec(size, slides) if size and any(slides) else None


def config_window(fields: Fields, slides: tuple[bool, ...]) -> WindowSpec | None:
    """Read the sliding window of a config.json, null for none.

    `slides` says which layers do if the file does not, by its `layer_types`.
    """
    if fields.has("layer_types"):
        slides = _layer_types(fields, len(slides))
        if any(slides) and not fields.has("sliding_window"):
            fields.fault("has layers of type 'sliding_attention' but no sliding_window")
    if not any(slides) or not fields.has("sliding_window"):
        return None
    return WindowSpec(fields.integer("sliding_window", MAX_CONTEXT), slides)


def config_window_of_all(fields: Fields, num_layers: int) -> WindowSpec | None:
    """Read the window of a family in which either all layers slide or none; null for none.

    As in transformers, `layer_types` changes nothing here.
    """
    if not fields.has("sliding_window"):
        return None
    return WindowSpec(fields.integer("sliding_window", MAX_CONTEXT), (True,) * num_layers)


def config_window_of_qwen(fields: Fields, num_layers: int) -> WindowSpec | None:
    """Read a window that needs `use_sliding_window` and spares the first layers."""
    if fields.flag("use_sliding_window", default=False):
        whole = fields.integer("max_window_layers", MAX_LAYERS, low=0)
        return config_window(fields, tuple(layer >= whole for layer in range(num_layers)))
    if fields.has("layer_types") and any(_layer_types(fields, num_layers)):
        fields.fault("has layers of type 'sliding_attention' but no use_sliding_window")
    return None


def gguf_experts(fields: Fields, num_layers: int) -> ExpertSpec | None:
    """Read the experts of a GGUF file; None if it has none."""
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        fields.expect(key, 0)
    if fields.integer("expert_count", MAX_EXPERTS, low=0, default=0) == 0:
        return None
    fields.expect("expert_gating_func", 0, 1)  # 0 is unspecified, 1 softmax
    fields.expect("expert_weights_scale", 0.0, 1.0)
    fields.expect("expert_group_count", 0, 1)
    width = fields.integer("feed_forward_length", MAX_WIDTH, default=1)
    return _experts(
        fields,
        ("expert_count", "expert_used_count"),
        num_layers,
        fields.integer("expert_feed_forward_length", MAX_WIDTH, default=width),
        normalize=fields.flag("expert_weights_norm", default=True),
    )


def config_experts(
    fields: Fields, num_layers: int, ffn_size: int, *, normalize: bool
) -> ExpertSpec:
    """Read how many experts a config.json has, and how many of them a row uses."""
    for key in ("n_shared_experts", "shared_expert_intermediate_size"):
        fields.expect(key, 0)
    count = "num_experts" if fields.has("num_experts") else "num_local_experts"
    keys = (count, "num_experts_per_tok")
    return _experts(fields, keys, num_layers, ffn_size, normalize=normalize)


def _experts(
    fields: Fields, keys: tuple[str, str], num_layers: int, ffn_size: int, *, normalize: bool
) -> ExpertSpec:
    count = fields.integer(keys[0], min(MAX_EXPERTS, _MAX_EXPERTS_IN_ALL // num_layers))
    return ExpertSpec(count, fields.integer(keys[1], count), ffn_size, normalize)


def _layer_types(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    known = {"sliding_attention": True, "full_attention": False}
    types = fields.value("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        fields.fault(f"has layer_types that are not a list of {num_layers}, one for each layer")
    if not all(isinstance(name, str) and name in known for name in types):
        fields.fault(f"has layer_types that are not supported; supported: {', '.join(known)}")
    return tuple(known[name] for name in types)
