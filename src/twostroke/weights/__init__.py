"""Where models come from, and how their files are read and checked."""

from __future__ import annotations

from twostroke.weights.catalogue import CATALOGUE, PackagedModel
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
from twostroke.weights.sources import load, pull, resolve

__all__ = [
    "CATALOGUE",
    "GgufTokenizer",
    "JsonTokenizer",
    "Leftover",
    "LoadedModel",
    "ModelListing",
    "PackagedModel",
    "Progress",
    "Watcher",
    "drop",
    "find",
    "forget_missing",
    "leftovers",
    "list_models",
    "load",
    "load_path",
    "pull",
    "release_tensors",
    "remove",
    "resolve",
    "unused",
    "verify",
]
