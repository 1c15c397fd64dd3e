"""`Family`: everything that differs between model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field

from twostroke.core.frozen import Frozen
from twostroke.model.families.blocks import residual_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from twostroke.model.families.blocks import Layer
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

    Reading = Callable[[Fields, ModelSpec], ModelSpec]
    Values = Callable[[Fields], Mapping[str, Any]]


def as_read(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Return the spec unchanged: for families without additional fields."""
    del fields
    return spec


def as_said(fields: Fields) -> dict[str, Any]:
    """Return nothing: the file's own values hold."""
    del fields
    return {}


class Family(Frozen):
    """A model family.

    `layer` adds the operations of one layer. With `scales_embedding` embeddings are multiplied by
    the square root of their width. `from_gguf` and `from_config` receive a spec with the fields
    that all families share, and read the others from a GGUF's metadata (keys without the
    architecture) or from a config.json. They refuse unsupported values (`Fields.expect`).

    `model_types` are the family's names in config.json, each with the values that transformers
    takes for keys that are left out, where these differ from what the readers take. `layer_names`
    maps Hugging Face names of a layer's weights, where they differ from Llama's, to those of GGUF.
    `fused` names the parts of matrices that files store as one, for example
    {"attn_qkv": ("attn_q", "attn_k", "attn_v")}.

    `interleaves` says that GGUF files have the rows of queries and keys reordered for rotation in
    neighbouring pairs. `partial_rotary` is config.json's key for the share of each head that is
    rotated; None where transformers rotates whole heads whatever the file says. `rotated` is the
    key for the width itself.

    `gguf_values` and `config_values` return values of shared keys that hold in place of a file's.
    With `may_lack_values` a GGUF file's layers with keys but no values have `keys_give_values`.
    With `may_norm_heads` some models of the family have `norms_heads`.
    `extra_layers` is config.json's key for how many layers follow that take no part, such as those
    that guess.
    """

    model_types: Mapping[str, Mapping[str, Any]]
    layer: Layer = residual_layer
    scales_embedding: bool = False
    from_gguf: Reading = as_read
    from_config: Reading = as_read
    layer_names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaves: bool = False
    partial_rotary: str | None = None
    rotated: str | None = None
    gguf_values: Values = as_said
    config_values: Values = as_said
    may_lack_values: bool = False
    may_norm_heads: bool = False
    extra_layers: str | None = None
