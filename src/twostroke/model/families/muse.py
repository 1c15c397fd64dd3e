"""Muse Glimmer: gated attention, with a sliding window and RoPE in three of four layers.

Embeddings and heads are normalized without weights. GGUF files do have weights for the norms of
heads; they are constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import all_but_every, config_window, gguf_window
from twostroke.model.families.family import Family
from twostroke.model.families.spec import RopeSpec

if TYPE_CHECKING:
    from twostroke.model.families.blocks import QueryKeyNorm
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.program import Op

_PERIOD = 4  # of layers without a window and RoPE, counted backwards from the last layer
_POST_NORM_EPSILON = 1e-8  # which GGUF files do not have
_FIXED: Final = {"gates_attention": True, "norms_embedding": True}


def muse_layer(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a Muse Glimmer layer: norms around attention and feed-forward."""
    head_norm: QueryKeyNorm = "head" if spec.norms_heads else "head without weight"
    return residual_layer(spec, layer, x, output, post_norms=True, query_key_norm=head_norm)


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return a replacement for metadata of a GGUF file: no logit scale; `from_gguf` reads it."""
    del fields
    return {"logit_scale": None}


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add window, norms and the factor of logits of Muse Glimmer to its spec (GGUF)."""
    window = gguf_window(fields, all_but_every(_PERIOD, spec.num_layers))
    if window is None:
        fields.fault("has no layer with a sliding window, which is not supported yet")
    base = fields.number("rope.freq_base_swa", default=spec.rope.base)
    window = replace(window, rope=RopeSpec(base, spec.rope.dim, spec.rope.interleaved))
    return replace(
        spec, **_FIXED, window=window, rotates=window.slides,
        post_norm_epsilon=_POST_NORM_EPSILON, logit_scale=fields.number("logit_scale"),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )  # fmt: skip


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add window, norms and the factors of queries and logits of Muse Glimmer (config.json)."""
    slides = tuple((spec.num_layers - 1 - i) % _PERIOD != 0 for i in range(spec.num_layers))
    bases = fields.value("layer_rope_theta") or slides
    if not isinstance(bases, list | tuple) or len(bases) != spec.num_layers:
        fields.fault(
            f"has layer_rope_theta that is not a list of {counted_noun(spec.num_layers, 'number')}"
        )
    return replace(
        spec, **_FIXED, window=config_window(fields, slides),
        rotates=tuple([bool(base) for base in bases]), norm_offset=1.0, offsets_last_norm=False,
        post_norm_epsilon=fields.number("post_norm_eps"),
        attention_scale=fields.number("qk_scale_factor") * spec.head_dim**-0.5,
        logit_scale=fields.number("output_multiplier"),
        logit_soft_cap=fields.number("final_logit_softcapping"),
    )  # fmt: skip


_TEXT: Final = {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968,
    "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
    "sliding_window": 2048, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
}  # fmt: skip
MUSE_GLIMMER = Family(
    model_types={"muse_glimmer_text": _TEXT, "muse_glimmer": _TEXT},
    layer=muse_layer,
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    layer_names={
        "self_attn.gate_proj": "attn_gate", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    },
    interleaves=True,
    may_norm_heads=True,
)  # fmt: skip
