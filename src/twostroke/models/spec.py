"""What a model file says about its model: sizes and constants, free of any format's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    `dim` is how many of a head's values are rotated. `interleaved` pairs neighbours
    (2i, 2i+1), as GGUF stores the Llama family; otherwise value i is paired with i + dim/2.
    """

    base: float
    dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts from which `twostroke.models` builds a `Program`.

    `architecture` is the key into `models.ARCHITECTURES` ("llama"). Sizes are counts of values;
    `context_length` is in tokens.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope: RopeSpec
    tied_embeddings: bool
