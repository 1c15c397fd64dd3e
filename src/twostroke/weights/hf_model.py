"""From a Hugging Face folder's `config.json` to a `ModelSpec`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError
from twostroke.models import ModelSpec, RopeSpec
from twostroke.models.fields import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_JSON_BYTES = 1 << 24


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a small file; ModelFormatError if it is not one."""
    try:
        with path.open("rb") as file:
            # A read reserves what it is allowed: no more than the file has.
            raw = file.read(min(path.stat().st_size, MAX_JSON_BYTES) + 1)
    except OSError as error:
        raise ModelFormatError(f"{path.name!r} cannot be read: {error.strerror}.") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path.name!r} is larger than {MAX_JSON_BYTES} bytes.")
    return parse_json(raw, path.name)


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Decode a JSON object; ModelFormatError, naming `name`, if it is damaged."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelFormatError(f"{name!r} is damaged: it is not JSON.") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{name!r} is damaged: it is not a JSON object.")
    return value


def hf_spec(fields: Fields, name: str) -> ModelSpec:
    """Translate a configuration into a ModelSpec; ModelFormatError for what is not sound."""
    if fields.has("quantization_config"):
        fields.fault("has a quantization_config, which is not supported yet: use F32, F16 or BF16")
    heads = fields.integer("num_attention_heads", MAX_WIDTH)
    hidden = fields.integer("hidden_size", MAX_WIDTH)
    if not fields.has("head_dim") and hidden % heads:
        fields.fault(f"has {heads} heads that do not divide its width of {hidden}")
    head_dim = fields.integer("head_dim", MAX_HEAD_DIM, default=max(1, hidden // heads))
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", only=False)
    fields.expect("mlp_bias", only=False)
    return ModelSpec(
        architecture=fields.text("model_type"),
        name=name,
        num_layers=fields.integer("num_hidden_layers", MAX_LAYERS),
        hidden_size=hidden,
        ffn_size=fields.integer("intermediate_size", MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", MAX_WIDTH, default=heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        context_length=fields.integer("max_position_embeddings", MAX_CONTEXT),
        norm_epsilon=fields.number("rms_norm_eps", default=1e-6),
        rope=_rope(fields, head_dim),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
    )


def hf_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the folder's chat template: its own file, or the tokenizer configuration's."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        with path.open("rb") as file:
            size = min(path.stat().st_size, MAX_JSON_BYTES)
            return file.read(size).decode("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    """Read rope from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    fields.expect("partial_rotary_factor", 1.0)
    default_base: Any = 10000.0
    for key in ("rope_parameters", "rope_scaling"):
        part = fields.values.get(key)
        if part is None:
            continue
        if not isinstance(part, dict):
            fields.fault(f"has {key} that is not an object")
        rope = Fields(f"{fields.name}: {key}", part)
        rope.expect("rope_type", "default")
        rope.expect("type", "default")
        default_base = rope.number("rope_theta", default=default_base)
    base = fields.number("rope_theta", default=default_base)
    return RopeSpec(base=base, dim=head_dim, interleaved=False)
