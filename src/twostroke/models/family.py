"""What the project must know of a model family: each says it once, in its own file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from twostroke.models.fields import Fields
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program

    Reading = Callable[[Fields, ModelSpec, Collection[str]], ModelSpec]


def as_read(fields: Fields, spec: ModelSpec, weights: Collection[str]) -> ModelSpec:
    """Return the spec as it is: for families of which a file says nothing special."""
    del fields, weights
    return spec


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    `program` builds the Program. `from_gguf` and `from_config` complete a spec whose sizes are
    read already with what a GGUF's metadata (keys as in the file) or a config.json says besides;
    they get the canonical names of the weights, too. `model_types` are its names in config.json,
    `layer_names` what Hugging Face calls the weights of a layer where it departs from Llama.
    `fused` names stacks of rows that files keep as one matrix: {"attn_qkv": ("attn_q", "attn_k",
    "attn_v")}. `interleaves` says that GGUF files have the rows of queries and keys reordered for
    rotation in neighbouring pairs.
    """

    program: Callable[[ModelSpec], Program]
    model_types: tuple[str, ...]
    from_gguf: Reading = as_read
    from_config: Reading = as_read
    layer_names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaves: bool = False
