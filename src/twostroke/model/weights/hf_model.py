"""Converts a Hugging Face folder's `config.json` into a `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.core.files import MAX_JSON_BYTES, read_at_most
from twostroke.model.families import ARCHITECTURES, MODEL_TYPES, ModelSpec
from twostroke.model.families.common_fields import read_sizes
from twostroke.model.families.fields import MAX_VOCAB, Fields
from twostroke.model.families.rope import config_rope
from twostroke.model.program import Activation
from twostroke.model.weights.published import published_layout

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}

# Features that are not supported, with the value that turns each off.
_UNSUPPORTED_FEATURES: dict[str, Any] = {
    "clip_qkv": None,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "position_embedding_type": "rope",
    "use_bias": False,
    "use_bidirectional_attention": False,
}


SIZE_KEYS = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_layers": "num_hidden_layers",
    "ffn_size": "intermediate_size",
    "context_length": "max_position_embeddings",
}


def hf_fields(name: str, config: Mapping[str, Any]) -> Fields:
    """Return a reader of a Hugging Face `config.json`, with the defaults of transformers.

    Raises ModelFormatError for an unknown model type.
    """
    fields = text_fields(name, config)
    model_type = fields.text("model_type")
    if model_type not in MODEL_TYPES:
        refuse_architecture(fields, model_type, MODEL_TYPES)
    defaults = ARCHITECTURES[MODEL_TYPES[model_type]].model_types[model_type]
    return Fields(name, {**defaults, **fields.values})


def text_fields(name: str, config: Mapping[str, Any]) -> Fields:
    """Return a reader of the text model's values in a Hugging Face `config.json`, without defaults.

    In a multimodal model they are in `text_config`, whose model type may differ from the file's,
    for example gemma3_text and gemma3.
    """
    text = Fields(name, config).part("text_config")
    return Fields(name, config if text is None else {**config, **text.values})


def refuse_architecture(fields: Fields, architecture: str, supported: Collection[str]) -> NoReturn:
    """Raise ModelFormatError because a Hugging Face model's architecture is not supported."""
    fields.fault(
        f"has the architecture {architecture[:40]!r}, which is not supported yet; "
        f"supported: {', '.join(sorted(supported))}"
    )


def hf_spec(fields: Fields, name: str) -> ModelSpec:
    """Convert a Hugging Face configuration (`hf_fields`) into a ModelSpec.

    Raises ModelFormatError for a missing or wrong value.
    """
    published_layout(fields)  # refuses unsupported quantizations
    architecture = MODEL_TYPES[fields.text("model_type")]
    family = ARCHITECTURES[architecture]
    shared_fields = fields.changed(family.config_values(fields))
    sizes = read_sizes(shared_fields, SIZE_KEYS)
    for key, supported_value in _UNSUPPORTED_FEATURES.items():
        shared_fields.expect(key, supported_value)
    norms_heads = shared_fields.flag("use_qk_norm", default=False)
    if norms_heads and not family.may_norm_heads:
        fields.refuse("use_qk_norm", "which is not supported yet")
    rotated_width = sizes["head_dim"]
    if family.rotated is not None:
        rotated_width = fields.integer(family.rotated, rotated_width)
    rope, sizes["context_length"] = config_rope(
        shared_fields, rotated_width, sizes["context_length"], share_key=family.partial_rotary
    )
    has_bias = fields.flag("attention_bias", default=False)
    spec = ModelSpec(
        **sizes,
        architecture=architecture,
        name=name,
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        norm_epsilon=fields.number("rms_norm_eps", default=1e-6),
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        activation=_activation(fields),
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms_heads=norms_heads,
    )
    return family.from_config(fields, spec)


def hf_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return a Hugging Face folder's chat template; None if it has none.

    It is in a separate file, or in the tokenizer configuration `config`.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        with path.open("rb") as file:
            return read_at_most(file, MAX_JSON_BYTES).decode("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = templates.get("default")
    return template if isinstance(template, str) else None


def _activation(fields: Fields) -> Activation:
    """Return the activation function that a `config.json` names.

    Gemma also has the key `hidden_activation`, which takes precedence: old files have a wrong
    `hidden_act`.
    """
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    activation = _ACTIVATIONS.get(fields.text(key, default="silu"))
    if activation is None:
        fields.refuse(key, f"which is not supported yet; supported: {', '.join(_ACTIVATIONS)}")
    return activation
