"""OLMo 2 and 3: Llama with norms after attention and feed-forward, and with query-key norms.

In OLMo 3, three of four layers have a sliding window and a plain RoPE. A RoPE scaling applies to
the other layers. Sources: arXiv:2501.00656, 2512.13961.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import all_but_every, config_window, gguf_window
from twostroke.model.families.family import Family
from twostroke.model.families.fields import Fields
from twostroke.model.families.rope import config_rope
from twostroke.model.families.spec import RopeSpec

if TYPE_CHECKING:
    from twostroke.model.families.spec import ModelSpec

_WINDOW_PERIOD = 4  # of layers without a window


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window of an OLMo 3 model, from a GGUF file; OLMo 2 has none.

    Both have the architecture "olmo2" in GGUF.
    """
    window = gguf_window(fields, all_but_every(_WINDOW_PERIOD, spec.num_layers))
    if window is None:
        return spec
    base = fields.number("rope.freq_base_swa", low=1.001, default=spec.rope.base)
    plain = RopeSpec(base, spec.rope.dim, spec.rope.interleaved)
    return replace(spec, window=replace(window, rope=plain))


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window of an OLMo 3 model, from a config.json; OLMo 2 has none.

    A RoPE scaling that names no layer type applies to the layers without a window.
    """
    if fields.text("model_type") == "olmo2":
        return spec
    window = config_window(fields, all_but_every(_WINDOW_PERIOD, spec.num_layers))
    if window is None:
        return spec
    plain_fields = Fields(fields.name, {**fields.values, "rope_scaling": None})
    by_type = fields.part("rope_parameters")
    if by_type is not None and not by_type.has("sliding_attention"):
        plain_fields = plain_fields.changed({"rope_parameters": None})
    rope, _ = config_rope(plain_fields, spec.head_dim, spec.context_length, "sliding_attention")
    return replace(spec, window=replace(window, rope=rope))


_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}

OLMO2 = Family(
    model_types={
        "olmo2": _DEFAULTS,
        "olmo3": _DEFAULTS | {"rope_theta": 5e5, "sliding_window": 4096},
    },
    layer=partial(residual_layer, pre_norms=None, post_norms=True, query_key_norm="row"),
    from_gguf=from_gguf,
    from_config=from_config,
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
