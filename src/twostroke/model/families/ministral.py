"""Ministral 3 and Devstral 2: Llama with YaRN, whose queries have an attention temperature.

GGUF files of Mistral Small 3 may have the same architecture, without YaRN and temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.families.common_fields import config_window_of_all
from twostroke.model.families.family import Family
from twostroke.model.families.fields import MAX_CONTEXT
from twostroke.model.families.rope import yarn_magnitude

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_MULTIPLIER_KEY: Final = "rope.scaling.yarn_log_multiplier"


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return a replacement for metadata of a GGUF file: YaRN's attention factor.

    YaRN scales attention by a magnitude that grows with the logarithm of the context's scaling
    factor. In this family that magnitude is divided by a second magnitude, which is computed with
    the file's `yarn_log_multiplier`. The returned attention factor is the quotient.
    """
    weight = fields.optional_number(_MULTIPLIER_KEY)
    factor = fields.optional_number("rope.scaling.factor", low=1.0)
    if weight is None or factor is None:
        return {}
    magnitude = yarn_magnitude(factor) / yarn_magnitude(factor, weight)
    return {_MULTIPLIER_KEY: 0.0, "rope.scaling.yarn_attn_factor": magnitude}


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the attention temperature of a Ministral 3 model to its spec, from a GGUF file."""
    for key in ("attention.sliding_window", "expert_count"):
        fields.expect(key, 0)
    scale = fields.optional_number("attention.temperature_scale")
    return _with_temperature(fields, spec, scale, "rope.scaling.original_context_length")


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add window and attention temperature of a Ministral 3 model to its spec (config.json)."""
    spec = replace(spec, window=config_window_of_all(fields, spec.num_layers))
    part = fields.part("rope_scaling") or fields.part("rope_parameters") or fields
    scale = part.optional_number("llama_4_scaling_beta")
    return _with_temperature(part, spec, scale, "original_max_position_embeddings")


def _with_temperature(
    fields: Fields, spec: ModelSpec, scale: float | None, length_key: str
) -> ModelSpec:
    if scale is None:
        return spec
    if spec.rope.dim != spec.head_dim:
        fields.fault(
            f"rotates only {spec.rope.dim} of {counted_noun(spec.head_dim, 'value')} of queries"
        )
    length = fields.integer(length_key, MAX_CONTEXT)
    rope = replace(spec.rope, temperature_scale=scale, temperature_length=length)
    return replace(spec, rope=rope)


MISTRAL3 = Family(
    model_types={
        "ministral3": {
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1,
            },
        }
    },
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    interleaves=True,
)  # fmt: skip
