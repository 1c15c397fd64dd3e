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
    """Return no changes of a file's metadata: for families that need none."""
    del fields
    return {}


class MtpInput(Enum):
    """Which of its own hidden states an MTP layer reads when it drafts several tokens."""

    NORMED = "normed"  # after the layer's last norm
    UNNORMED = "unnormed"


class Family(Frozen):
    """A model family: how to read its files, and the layer from which its Program is built.

    `layer` returns the operations of one layer. With `scales_embedding`, embeddings are multiplied
    by the square root of their width. `from_gguf` and `from_config` receive a spec with the fields
    that all families share, and read the family's fields from a GGUF file's metadata (keys without
    the architecture) or from a config.json. They refuse unsupported values (`Fields.expect`).

    `model_types` are the family's names in config.json, each with the values that transformers uses
    for missing keys, where these differ from the defaults of the readers. `layer_names` maps
    Hugging Face names of a layer's weights to GGUF names, where they differ from Llama's.
    `dense_names` are other names in models without experts. `gguf_names` maps names in the family's
    GGUF files to names in other families' files. `fused`
    names the parts of matrices that files store as one, for example {"attn_qkv": ("attn_q",
    "attn_k", "attn_v")}.

    `interleaves`: GGUF files have the rows of queries and keys reordered, so that neighbouring
    values are rotated as pairs. `partial_rotary` is config.json's key for the share of each head
    that is rotated; None where transformers always rotates whole heads. `rotated` is the key for
    the rotated width itself.

    `gguf_values` and `config_values` return values that replace a file's values, for keys that
    the readers of all families read.
    `may_lack_values`: GGUF layers that have keys but no values are read as `keys_give_values`.
    `transposes_experts`: stacks of experts in folders are (experts, inputs, outputs).
    `may_norm_heads`: some models of the family have `norms_heads`. `extra_layers` is config.json's
    key for the number of further layers that do not compute the next token, such as layers for
    multi-token prediction. `mtp` tells how a layer for multi-token prediction continues its own
    drafts; None: such layers are left out.
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
