"""EXAONE 4: norms after attention and after the feed-forward, and query-key norms by head.

In models with a sliding window (32B), layers without the window have no RoPE. Source:
arXiv:2507.11407.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import all_but_every, config_window, gguf_window
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_LAYERS

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec, WindowSpec

_PERIOD = 4  # of layers without a window
# llama.cpp gives a model of this many layers the window of the 32B, even if the file has none.
_LAYERS_OF_32B, _WINDOW_OF_32B = 64, 4096


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window of an EXAONE 4 model, and which layers have a RoPE (GGUF)."""
    fields.expect("rope.freq_base_swa")
    default_size = _WINDOW_OF_32B if spec.num_layers == _LAYERS_OF_32B else 0
    slides = all_but_every(_PERIOD, spec.num_layers)
    window = gguf_window(fields, slides, default_size=default_size)
    size = fields.value("attention.sliding_window")
    return _hybrid(spec, window, has_window=bool(default_size if size is None else size))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window of an EXAONE 4 model, and which layers have a RoPE (config.json)."""
    window = config_window(fields, _config_slides(fields, spec.num_layers))
    spec = replace(spec, qkv_bias=False, output_bias=False)  # transformers ignores attention_bias
    return _hybrid(spec, window, has_window=fields.has("sliding_window"))


def _config_slides(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it has the sliding window, if there are no `layer_types`.

    The pattern is a number n, with which each n-th layer has no window, or letters of a group of
    layers, such as LLLG: L (local) is a layer with the window, G (global) a layer without. With
    letters, the last layer never has the window.
    """
    key = "sliding_window_pattern"
    if fields.has("layer_types"):
        return all_but_every(_PERIOD, num_layers)
    if not isinstance(fields.value(key), str):
        return all_but_every(fields.integer(key, MAX_LAYERS, default=_PERIOD), num_layers)
    letters = fields.text(key)
    if not letters or set(letters) - {"L", "G"}:
        fields.refuse(key, "not a number or a text of the letters L and G")
    slides = [letters[layer % len(letters)] == "L" for layer in range(num_layers)]
    return (*slides[:-1], False)


def _hybrid(spec: ModelSpec, window: WindowSpec | None, *, has_window: bool) -> ModelSpec:
    """Return a spec with this sliding window, in which only layers with the window have a RoPE.

    `has_window`: the file has the size of a window, even if no layer uses it. Otherwise the spec is
    returned unchanged, and all layers have a RoPE.
    """
    if not has_window:
        return spec
    return replace(
        spec, window=window, rotates=window.slides if window else (False,) * spec.num_layers
    )


EXAONE4 = Family(
    model_types={
        "exaone4": {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        }
    },
    layer=partial(residual_layer, pre_norms=None, post_norms=True, query_key_norm="head"),
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
