"""Where models come from, and how their files are read and checked."""

from __future__ import annotations

from twostroke.weights.catalogue import CATALOGUE, PackagedModel
from twostroke.weights.load import load_path
from twostroke.weights.model import GgufTokenizer, JsonTokenizer, LoadedModel
from twostroke.weights.pull import Progress, Watcher
from twostroke.weights.sources import (
    ModelListing,
    list_models,
    load,
    pull,
    remove,
    resolve,
    verify,
)

__all__ = [
    "CATALOGUE",
    "GgufTokenizer",
    "JsonTokenizer",
    "LoadedModel",
    "ModelListing",
    "PackagedModel",
    "Progress",
    "Watcher",
    "list_models",
    "load",
    "load_path",
    "pull",
    "remove",
    "resolve",
    "verify",
]
