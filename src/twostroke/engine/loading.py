"""From a model's name to its files on this machine, and to its checked weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke import fetch
from twostroke.weights import load_path, peek_family

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.fetch import Watcher
    from twostroke.weights import LoadedModel


def pull(name: str, watch: Watcher | None = None) -> Path:
    """Fetch the model called `name`, unless it is here, and return its path.

    Raises:
        ModelNotFoundError: the name is not known.
        ModelFormatError: the model cannot run here; at most some megabytes were fetched.
        DownloadError: it cannot be fetched whole.
    """
    return fetch.pull(name, peek_family, watch)


def load(name: str) -> LoadedModel:
    """Map and check the model called `name`, which must be here (see `pull`).

    Raises:
        ModelNotFoundError: it is not here, or the name is not known.
        ModelFormatError: it cannot be read, or it cannot run here.
    """
    found = fetch.use(name)
    return load_path(found.path, found.name, found.licence)
