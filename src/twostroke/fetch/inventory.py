"""What is in the cache: listed, verified, removed; and what broken downloads have left there."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import (
    DownloadError,
    ModelFormatError,
    ModelNotFoundError,
    UsageError,
    nearest,
)
from twostroke.fetch.catalogue import CATALOGUE, PackagedModel
from twostroke.fetch.disk import is_locked
from twostroke.fetch.hub.cache import drop_partial, find_partials, forget
from twostroke.fetch.hub.client import HubClient
from twostroke.fetch.lookup import cache_path, look_up
from twostroke.fetch.progress import file_sha256, ignore
from twostroke.fetch.pull import ARRIVING, is_cached, lock_path
from twostroke.fetch.sources import find_record, records_of
from twostroke.fetch.store import (
    Record,
    StoredFile,
    hub_records,
    models_folder,
    read_sidecar,
    sidecar,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.fetch.progress import Watcher

_DAY_S = 86400


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A model that can be named: in the catalogue, in the cache, or both.

    `path` is None for one that has not been pulled.
    `last_used` is in seconds since 1970, None where nobody knows.
    """

    name: str
    title: str
    family: str | None
    number_format: str | None
    file_bytes: int
    licence: str | None
    source: tuple[str, ...]
    path: Path | None
    last_used: float | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an interrupted download has left: a file or folder, and its size."""

    path: Path
    num_bytes: int


def list_models() -> list[ModelListing]:
    """Return the catalogue, in its order, and behind it whatever else the cache holds.

    A model of which only some files are left is listed as one that is not here.
    """
    listings = [_of_package(model) for model in CATALOGUE.values()]
    known = {model.file_name for model in CATALOGUE.values()}
    for path in sorted(models_folder().glob("*.gguf")):
        record = read_sidecar(path) if path.name not in known else None
        if record is not None:
            listings.append(_of_record(record))
    listings += [_of_record(record) for record in hub_records() if record.is_there]
    return listings


def find(name: str) -> ModelListing:
    """Return what is known of the model that `name` stands for.

    Raises:
        ModelNotFoundError: no such model, or none that was pulled or stands in the catalogue.
        UsageError: a path: what is known of it is in the file.
    """
    found = look_up(name)
    if isinstance(found, PackagedModel) and found.name in CATALOGUE:
        return _of_package(found)
    return _of_record(_pulled(name))


def verify(name: str, watch: Watcher | None = None) -> None:
    """Hash a pulled model again; ModelFormatError if it is not what was once fetched."""
    record = _pulled(name)
    total, done = record.num_bytes, 0
    for file in record.files:
        if not file.sha256:
            raise ModelFormatError(
                f"The cache holds no checksum of {name!r}: remove it and pull it again."
            )
        try:
            digest = file_sha256(file.path, watch or ignore, done, total)
        except OSError as error:
            raise ModelFormatError(
                f"{str(file.path)!r} cannot be read: {error.strerror}."
            ) from None
        if digest != file.sha256:
            advice = f"run 'twostroke models remove {name}' and pull it again"
            if not file.ours:
                advice = f"delete {str(file.path.resolve())!r} and pull it again"
            raise ModelFormatError(
                f"{file.path.name!r} does not match its checksum, it is damaged: {advice}."
            )
        done += file.num_bytes


def remove(name: str) -> int:
    """Delete a pulled model from the cache and return the bytes that this frees.

    Of the hub's cache, which other programs use as well, only what was fetched for Twostroke goes,
    and only what no other pulled model needs.
    """
    record = _pulled(name)
    if record.snapshot is None:
        freed = record.path.stat().st_size
        record.path.unlink()
        record.file.unlink(missing_ok=True)
        return freed
    others = {
        file.path for other in hub_records() if other.file != record.file for file in other.files
    }
    record.file.unlink()
    ours = [file.path for file in record.files if file.ours and file.path not in others]
    return sum(forget(path, record.snapshot) for path in ours if path.is_symlink() or path.exists())


def unused(days: float) -> list[ModelListing]:
    """Return the pulled models that were neither loaded nor pulled for so many days.

    Raises:
        UsageError: fewer than none, which would be all models, or no number.
    """
    if not days >= 0:
        raise UsageError(f"Models can be unused for 0 days or more, not {days:g}: check --unused.")
    limit = time.time() - days * _DAY_S
    return [one for one in list_models() if one.path and (one.last_used or 0) < limit]


def leftovers() -> list[Leftover]:
    """Return what interrupted downloads have left; not that of downloads which still run."""
    folder, found = models_folder(), []
    for path in sorted(folder.glob(f"{ARRIVING}*")):
        name = path.name.removeprefix(ARRIVING)
        if path.is_dir() and not is_locked(lock_path(folder / name)):
            found.append(Leftover(path, sum(_sizes(path))))
    found += [Leftover(path, path.stat().st_size) for path in find_partials(_hub_roots())]
    return found


def drop(leftover: Leftover) -> None:
    """Delete what an interrupted download has left."""
    if leftover.path.is_dir():
        shutil.rmtree(leftover.path)
    else:
        drop_partial(leftover.path)


def forget_missing() -> int:
    """Delete the records of models that have gone from the hub's cache; return how many."""
    gone = [record for record in hub_records() if not record.path.exists()]
    for record in gone:
        record.file.unlink(missing_ok=True)
    return len(gone)


def _pulled(name: str) -> Record:
    """Return the record of a model that was pulled; a user's own files have none."""
    found = look_up(name)
    if isinstance(found, Path):
        raise UsageError(
            f"{name!r} is a file of your own: only pulled models are shown, verified and removed.",
            param="model",
        )
    if isinstance(found, PackagedModel):
        record = _of_cached(found)
    else:
        there = (record for record in records_of(found) if record.is_there)
        record = find_record(found) or next(there, None)
    if record is None:
        hint = nearest(name, (one.name for one in list_models() if one.path))
        raise ModelNotFoundError(f"Model {name!r} is not in the cache.{hint}")
    return record


def _of_cached(model: PackagedModel) -> Record | None:
    """Return the record of a packaged model; where it is lost, the catalogue knows it."""
    path = cache_path(model)
    try:
        size = path.stat().st_size
    except OSError:
        return None
    known = read_sidecar(path)
    sha256 = model.sha256 or (known.files[0].sha256 if known else "")
    files = (StoredFile(path, size, sha256),)
    return Record(sidecar(path), model.name, model.title, path, files, licence=model.licence)


def _of_package(model: PackagedModel) -> ModelListing:
    path = cache_path(model)
    record = read_sidecar(path)
    here = is_cached(model, path)
    return ModelListing(
        name=model.name,
        title=model.title,
        family=model.architecture,
        number_format=model.number_format,
        file_bytes=model.file_bytes or 0,
        licence=model.licence,
        source=tuple(f"pypi:{part.requirement}:{part.member}" for part in model.parts),
        path=path if here else None,
        last_used=record.last_used if record and here else None,
    )


def _of_record(record: Record) -> ModelListing:
    return ModelListing(
        name=record.name,
        title=record.title,
        family=record.family,
        number_format=record.number_format,
        file_bytes=record.num_bytes,
        licence=record.licence,
        source=record.source,
        path=record.path if record.is_whole else None,
        last_used=record.last_used,
    )


def _hub_roots() -> set[Path]:
    """Return the hub's cache folders: the one that is set, and those of pulled models."""
    roots = {record.snapshot.parents[2] for record in hub_records() if record.snapshot}
    with suppress(DownloadError):  # its client is not installed
        roots.add(HubClient().cache_folder)
    return roots


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.stat().st_size
