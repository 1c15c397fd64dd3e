"""Finds models by name, fetches them, and manages the models on this machine."""

from __future__ import annotations

from twostroke.model.hub.catalogue import CATALOGUE, PackagedModel
from twostroke.model.hub.disk import DownloadProgress, Watcher
from twostroke.model.hub.inventory import (
    Leftover,
    find,
    find_draft,
    forget_missing,
    leftovers,
    list_models,
    local_draft,
    pull,
    remove,
    remove_leftover,
    resolve,
    unused,
    use,
    verify,
)
from twostroke.model.hub.records import ModelRecord

__all__ = [
    "CATALOGUE",
    "DownloadProgress",
    "Leftover",
    "ModelRecord",
    "PackagedModel",
    "Watcher",
    "find",
    "find_draft",
    "forget_missing",
    "leftovers",
    "list_models",
    "local_draft",
    "pull",
    "remove",
    "remove_leftover",
    "resolve",
    "unused",
    "use",
    "verify",
]
