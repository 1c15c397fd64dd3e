"""Lists, verifies and removes models, and cleans up after unfinished downloads."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, UsageError, nearest
from twostroke.fetch.catalogue import CATALOGUE
from twostroke.fetch.disk import is_locked
from twostroke.fetch.names import look_up
from twostroke.fetch.progress import file_sha256, ignore
from twostroke.fetch.records import ModelRecord, file_size, stored_records
from twostroke.fetch.sources import find_record

if TYPE_CHECKING:
    from twostroke.fetch.progress import Watcher

_DAY_S = 86400


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an unfinished download has left: a file or a folder."""

    path: Path
    num_bytes: int


def list_models() -> list[ModelRecord]:
    """Return the catalogue, then whatever else is in the cache, whole or in part."""
    known = [record for model in CATALOGUE.values() if (record := find_record(model))]
    paths = {record.path for record in known}
    others = [record for record in stored_records() if record.path not in paths]
    return [*known, *(record for record in others if record.is_partly_here)]


def find(name: str) -> ModelRecord:
    """Return what is known of the model that `name` means.

    Raises:
        ModelNotFoundError: there is no such model in the catalogue or in the cache.
        UsageError: it is a user's own file.
    """
    model = CATALOGUE.get(name.lower())
    record = find_record(model) if model else None
    return record or _fetched(name)


def verify(name: str, watch: Watcher = ignore) -> None:
    """Hash a model's files again; ModelFormatError if one differs from what was fetched."""
    record, done = _fetched(name), 0
    for file in record.files:
        try:
            digest = file_sha256(file.path, watch, done, record.num_bytes)
        except OSError as error:
            message = f"{str(file.path)!r} cannot be read: {error.strerror}."
            raise ModelFormatError(message) from None
        if digest != file.sha256:
            advice = f"run 'twostroke models remove {name}'"
            if not file.ours:
                advice = f"delete {str(file.path.resolve())!r}"
            raise ModelFormatError(
                f"{file.path.name!r} does not match its checksum: {advice}, and pull it again."
            )
        done += file.num_bytes


def remove(name: str) -> int:
    """Delete a model from the cache and return the bytes that this frees.

    In the hub's cache, which other programs use too, only files go that were fetched for Twostroke
    and that no other model here needs.
    """
    record = _fetched(name)
    record.file.unlink(missing_ok=True)
    if record.snapshot is None:
        freed = file_size(record.path) or 0
        record.path.unlink()
        return freed
    needed = {file.path for other in stored_records() for file in other.files}
    ours = [file.path for file in record.files if file.ours and file.path not in needed]
    freed = sum(_remove_link(path, record.snapshot) for path in ours)
    _prune(record.snapshot.parents[1])
    return freed


def unused(days: float) -> list[ModelRecord]:
    """Return the models that were not used for `days`; UsageError for less than 0."""
    if not days >= 0:
        raise UsageError(f"--unused must be 0 days or more, not {days:g}.")
    limit = time.time() - days * _DAY_S
    return [one for one in list_models() if one.is_here and (one.last_used or 0) < limit]


def leftovers() -> list[Leftover]:
    """Return what unfinished downloads have left, except those that are still running."""
    from twostroke.fetch.hub import cache_folder
    from twostroke.fetch.packages import unfinished

    found = [
        Leftover(folder, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        for folder, lock in unfinished()
        if not is_locked(lock)
    ]
    roots = {record.snapshot.parents[2] for record in stored_records() if record.snapshot}
    for root in sorted(filter(None, {*roots, cache_folder()})):
        for path in sorted(root.glob("models--*/blobs/*.incomplete")):
            lock = root / ".locks" / path.parents[1].name / f"{path.stem}.lock"
            if len(path.stem) == 64 and not is_locked(lock):  # the client's own are not renewed
                found.append(Leftover(path, path.stat().st_size))
    return found


def drop(leftover: Leftover) -> None:
    """Delete what an unfinished download has left."""
    if leftover.path.is_dir():
        shutil.rmtree(leftover.path)
        return
    leftover.path.unlink(missing_ok=True)
    _prune(leftover.path.parents[1])


def forget_missing() -> None:
    """Delete the records of models whose files have gone."""
    for record in stored_records():
        if not record.is_partly_here:
            record.file.unlink()


def _fetched(name: str) -> ModelRecord:
    """Return the record of a model that is here, at least in part."""
    found = look_up(name)
    if isinstance(found, Path):
        raise UsageError(
            f"{name!r} is your own file: only fetched models can be shown, verified and removed.",
        )
    record = find_record(found)
    if record is None or not record.is_partly_here:
        hint = nearest(name, (one.name for one in list_models() if one.is_here))
        raise ModelNotFoundError(f"Model {name!r} is not in the cache.{hint}")
    return record


def _remove_link(link: Path, snapshot: Path) -> int:
    """Remove a file of a snapshot, and its blob if no other snapshot links to it."""
    if not link.is_symlink():
        freed = file_size(link) or 0
        link.unlink(missing_ok=True)
        return freed
    blob = link.parent / link.readlink()
    link.unlink()
    others = (path for path in snapshot.parent.rglob("*") if path.is_symlink())
    if any(path.readlink().name == blob.name for path in others):
        return 0
    freed = file_size(blob) or 0
    blob.unlink(missing_ok=True)
    return freed


def _prune(repo: Path) -> None:
    """Remove the empty folders of a repository in the hub's cache; all of it if no file is left."""
    for folder in sorted((path for path in repo.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    snapshots = repo / "snapshots"
    for ref in [path for path in (repo / "refs").rglob("*") if path.is_file()]:
        if not (snapshots / ref.read_text().strip()).is_dir():
            ref.unlink()
    if not any(path.is_file() or path.is_symlink() for path in repo.rglob("*")):
        shutil.rmtree(repo)
