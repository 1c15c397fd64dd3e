"""Where models come from, and how their files are read and checked."""

from __future__ import annotations

from twostroke.weights.catalogue import CATALOGUE, PackagedModel
from twostroke.weights.heads import (
    HeadsFacts,
    LoadedHeads,
    load_heads,
    numbers_table,
    target_identity,
)
from twostroke.weights.inventory import (
    Leftover,
    ModelListing,
    drop,
    find,
    forget_missing,
    leftovers,
    list_models,
    remove,
    unused,
    verify,
)
from twostroke.weights.load import load_path
from twostroke.weights.model import GgufTokenizer, JsonTokenizer, LoadedModel, release_tensors
from twostroke.weights.progress import Progress, Watcher
from twostroke.weights.sources import find_draft, known_draft, load, pull, resolve

__all__ = [
    "CATALOGUE",
    "GgufTokenizer",
    "HeadsFacts",
    "JsonTokenizer",
    "Leftover",
    "LoadedHeads",
    "LoadedModel",
    "ModelListing",
    "PackagedModel",
    "Progress",
    "Watcher",
    "drop",
    "find",
    "find_draft",
    "forget_missing",
    "known_draft",
    "leftovers",
    "list_models",
    "load",
    "load_heads",
    "load_path",
    "numbers_table",
    "pull",
    "release_tensors",
    "remove",
    "resolve",
    "target_identity",
    "unused",
    "verify",
]
