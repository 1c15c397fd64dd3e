"""`Family`: everything that differs between model families."""

from __future__ import annotations

from enum import Enum
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


def unchanged_spec(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Return the spec unchanged: the reader of families whose files have no fields of their own."""
    del fields
    return spec


def no_values(fields: Fields) -> dict[str, Any]:
    """Return an empty dict: the `gguf_values` or `config_values` of many families."""
    del fields
    return {}


class MtpInput(Enum):
    """Which hidden state of its previous step an MTP layer reads when it drafts several tokens."""

    NORMED = "normed"  # after the layer's last norm
    UNNORMED = "unnormed"


class Family(Frozen):
    """A model family: how to read its files, and the layer from which its Program is built.

    `layer` returns the operations of one layer. With `scales_embedding`, embeddings are multiplied
    by the square root of their width. `from_gguf` and `from_config` receive a spec with the fields
    that all families share. They return it with the family's fields, which they read from a GGUF
    file's metadata (keys without the architecture) or from a config.json. They refuse unsupported
    values (`Fields.expect`). `gguf_values` and `config_values` are called before: they return
    replacements for metadata values that the readers of all families read.

    `model_types` maps each of the family's names in config.json to the values that transformers
    uses for missing keys, where these differ from our readers' defaults. `layer_names` maps Hugging
    Face names of a layer's weights to GGUF names, where they differ from Llama's. `dense_names`
    does so for models without experts. `gguf_names` maps weight names in the family's GGUF files to
    the names that other families' files have. `fused` maps a matrix that files store fused to its
    parts, for example {"attn_qkv": ("attn_q", "attn_k", "attn_v")}.

    `interleaves`: GGUF files have the rows of queries and keys reordered, so that RoPE rotates
    neighbouring values as pairs. `partial_rotary` is config.json's key for the rotated fraction of
    each head; None where transformers always rotates whole heads. `rotated` is the key for the
    rotated width itself.

    `may_lack_values`: GGUF layers that have keys but no values are read as `keys_give_values`.
    `transposes_experts`: stacked experts in safetensors files have the shape (experts, inputs,
    outputs). `may_norm_heads`: some models of the family have query-key norms
    (`ModelSpec.norms_heads`). `extra_layers` is config.json's key for the number of further layers
    that do not compute the next token, such as MTP layers (multi-token prediction). `mtp` tells how
    an MTP layer continues its own drafts; None: MTP layers are left out.
    """

    model_types: Mapping[str, Mapping[str, Any]]
    layer: Layer = residual_layer
    scales_embedding: bool = False
    from_gguf: Reading = unchanged_spec
    from_config: Reading = unchanged_spec
    layer_names: Mapping[str, str] = field(default_factory=dict)
    dense_names: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaves: bool = False
    partial_rotary: str | None = None
    rotated: str | None = None
    gguf_values: Values = no_values
    config_values: Values = no_values
    may_lack_values: bool = False
    transposes_experts: bool = False
    may_norm_heads: bool = False
    extra_layers: str | None = None
    mtp: MtpInput | None = None
