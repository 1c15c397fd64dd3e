"""Reads and checks the files of models: GGUF, safetensors, and trained heads."""

from __future__ import annotations

from twostroke.model.weights.heads import (
    HeadsFacts,
    LoadedHeads,
    load_heads,
    numbers_table,
    target_identity,
)
from twostroke.model.weights.load import load_path, peek_family
from twostroke.model.weights.model import (
    GgufTokenizer,
    JsonTokenizer,
    LoadedModel,
    release_tensors,
    weights_identity,
)

__all__ = [
    "GgufTokenizer",
    "HeadsFacts",
    "JsonTokenizer",
    "LoadedHeads",
    "LoadedModel",
    "load_heads",
    "load_path",
    "numbers_table",
    "peek_family",
    "release_tensors",
    "target_identity",
    "weights_identity",
]
