"""The facts about a model family that other rooms need; each family has a file with its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from twostroke.models.fields import Fields
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program

    Reading = Callable[[Fields, ModelSpec], ModelSpec]


def as_read(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Return the spec as it is: for families without fields of their own."""
    del fields
    return spec


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    `program` builds the Program. `from_gguf` and `from_config` complete a spec, in which all that
    families share is read already, with further fields of a GGUF's metadata (keys without the
    architecture) or of a config.json; they refuse what is not supported (`Fields.expect`).

    `model_types` are the family's names in config.json, each with the values that transformers
    takes for keys that are left out, where these differ from what the readers take. `layer_names`
    is what Hugging Face calls the weights of a layer, where it departs from Llama. `fused` names
    stacks of rows that files keep as one matrix: {"attn_qkv": ("attn_q", "attn_k", "attn_v")}.

    `interleaves` says that GGUF files have the rows of queries and keys reordered for rotation in
    neighbouring pairs, `partial_rotary` that config.json's `partial_rotary_factor` counts, which
    transformers ignores elsewhere.
    """

    program: Callable[[ModelSpec], Program]
    model_types: Mapping[str, Mapping[str, Any]]
    from_gguf: Reading = as_read
    from_config: Reading = as_read
    layer_names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaves: bool = False
    partial_rotary: bool = False
