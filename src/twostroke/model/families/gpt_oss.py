"""gpt-oss: a mixture of experts with biases, a clamped activation, and attention sinks.

Every second layer has a sliding window. RoPE is extended by YaRN, whose range of blended
frequencies is not rounded to whole pairs. Sources: arXiv:2508.10925; the model's configuration in
transformers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.model.families.blocks import residual_layer
from twostroke.model.families.common_fields import (
    all_but_every,
    config_experts,
    config_window,
    gguf_experts,
    gguf_window,
)
from twostroke.model.families.family import Family
from twostroke.model.program.operation import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT, Activation

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ExpertSpec, ModelSpec

_WINDOW_PERIOD: Final = 2  # of layers without a window
_SOFTMAX_OF_CHOSEN: Final = 3  # GGUF's number of a softmax over the chosen experts
_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gguf_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for metadata of a gpt-oss GGUF file.

    YaRN's rounding to whole pairs is turned off: files do not say so. If a file has no width of a
    dense feed-forward, the experts' width takes its place; all layers have experts anyway.
    """
    values: dict[str, Any] = {"rope.scaling.yarn_truncate": False}
    if not fields.has("feed_forward_length"):
        values["feed_forward_length"] = fields.value("expert_feed_forward_length")
    return values


def config_values(fields: Fields) -> dict[str, Any]:
    """Return replacements for values of a config.json: the default RoPE of gpt-oss, if it has none.

    As in transformers, this default has YaRN's context extension.
    """
    if fields.has("rope_scaling") or fields.has("rope_parameters"):
        return {}
    return {"rope_parameters": _ROPE}


def from_gguf(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window, the sinks and the experts of gpt-oss, from a GGUF file."""
    if fields.value("expert_gating_func") == _SOFTMAX_OF_CHOSEN:
        fields = fields.changed({"expert_gating_func": None})
    experts = gguf_experts(fields, spec)
    if experts is None:
        fields.fault("is a mixture of experts, but its expert_count is 0")
    slides = all_but_every(_WINDOW_PERIOD, spec.num_layers)
    return _complete(replace(spec, window=gguf_window(fields, slides)), experts)


def from_config(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Add the sliding window, the sinks and the experts of gpt-oss, from a config.json."""
    fields.expect("swiglu_alpha", SWIGLU_OAI_ALPHA)
    fields.expect("swiglu_limit", SWIGLU_OAI_LIMIT)
    experts = config_experts(fields, spec, spec.ffn_size, normalize=True)
    slides = all_but_every(_WINDOW_PERIOD, spec.num_layers)
    return _complete(replace(spec, window=config_window(fields, slides)), experts)


def _complete(spec: ModelSpec, experts: ExpertSpec) -> ModelSpec:
    """Return the spec with experts, activation and attention sinks, equal in all gpt-oss models."""
    return replace(
        spec,
        experts=replace(experts, normalize=True, has_biases=True),
        activation=Activation.SWIGLU_OAI,
        has_sinks=True,
    )


GPT_OSS = Family(
    model_types={
        "gpt_oss": {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        }
    },
    layer=partial(residual_layer, pre_norms=("attn_norm", "post_attention_norm")),
    from_gguf=from_gguf,
    from_config=from_config,
    gguf_values=gguf_values,
    config_values=config_values,
    layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    },
    transposes_experts=True,
)
