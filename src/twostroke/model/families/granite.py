"""Granite 3 and 4.1, dense: Llama whose embeddings, scores, residuals and logits are multiplied.

The multiplier m of residuals needs no operation. If the whole residual stream is divided by m, its
norms are the same when their epsilon is divided by m². Therefore the embedding is divided by m, and
layers add their outputs unscaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.model.families.family import Family

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

GGUF_MULTIPLIERS: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
CONFIG_MULTIPLIERS: Final = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

# Far beyond known multipliers of residuals, such as 0.22; their squares stay float32 numbers.
_MIN_RESIDUAL, _MAX_RESIDUAL = 1e-3, 1e3


def without_scales(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a GGUF file: no multipliers; `from_gguf` reads them."""
    del fields
    return dict.fromkeys(GGUF_MULTIPLIERS)


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the multipliers of a Granite model to its spec, from a GGUF file.

    Experts, and models without rotary embeddings, are refused.
    """
    rope_key = "rope.scaling.finetuned"  # llama.cpp's switch
    if not fields.flag(rope_key, default=True):
        fields.refuse(rope_key, "which is not supported yet")
    for key in ("expert_count", "expert_shared_feed_forward_length"):
        fields.expect(key, 0)
    return with_multipliers(fields, spec, GGUF_MULTIPLIERS)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the multipliers of a Granite model to its spec, from a config.json."""
    return with_multipliers(fields, spec, CONFIG_MULTIPLIERS)


def with_multipliers(fields: Fields, spec: ModelSpec, keys: tuple[str, ...]) -> ModelSpec:
    """Add the multipliers of a Granite model to its spec.

    `keys` are the metadata keys of the multipliers of scores, embeddings and residuals, and of the
    divisor of logits, in this order.
    """
    attention_key, embedding_key, residual_key, logits_key = keys
    residual = fields.number(residual_key, low=_MIN_RESIDUAL, high=_MAX_RESIDUAL, default=1.0)
    return replace(
        spec,
        attention_scale=fields.number(attention_key) if fields.has(attention_key) else None,
        embedding_scale=fields.number(embedding_key, default=1.0) / residual,
        norm_epsilon=spec.norm_epsilon / residual**2,
        logit_scale=1 / fields.number(logits_key, default=1.0),
    )


GRANITE = Family(
    model_types={
        "granite": {
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
        }
    },
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=without_scales,
    interleaves=True,
)  # fmt: skip
