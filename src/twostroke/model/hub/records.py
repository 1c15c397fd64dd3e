"""The record of each downloaded model: a small JSON file with names, files and checksums."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.core import env
from twostroke.core.errors import ModelFormatError
from twostroke.core.files import file_size
from twostroke.core.json_io import read_checked_json, write_checked_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.model.hub.catalogue import PackagedModel


_logger = logging.getLogger("twostroke.fetch")


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a downloaded model, with its size and checksum.

    `is_ours` is false if another program had downloaded the file before; then removing the model
    leaves the file.
    """

    path: Path
    num_bytes: int = msgspec.field(name="bytes")
    sha256: str | None
    is_ours: bool = msgspec.field(name="ours", default=True)


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a model that was downloaded, or that can be downloaded by a short name.

    `path` is the GGUF file or folder to load. `requested_names` are the names that users typed.
    `snapshot` is the model's folder in the hub's cache, None for a packaged model.
    """

    name: str
    title: str
    path: Path
    files: tuple[StoredFile, ...]
    source: tuple[str, ...] = ()
    licence: str | None = None
    family: str | None = None
    number_format: str | None = msgspec.field(name="format", default=None)
    requested_names: tuple[str, ...] = msgspec.field(name="asked", default=())
    snapshot: Path | None = None
    good_for: str | None = None

    @property
    def file(self) -> Path:
        """The path of the JSON file in which this record is stored."""
        if self.snapshot is None:
            return self.path.with_name(f"{self.path.name}.json")
        repo = self.snapshot.parent.parent.name.removeprefix("models--")
        entry = self.path.relative_to(self.snapshot).as_posix().replace("/", "--")
        return hub_folder() / f"{repo}--{self.snapshot.name[:12]}--{entry.strip('.')}.json"

    @property
    def num_bytes(self) -> int:
        """The size of the model's files in bytes."""
        return sum(file.num_bytes for file in self.files)

    @property
    def is_here(self) -> bool:
        """Whether all files of the model exist with the right sizes.

        Their checksums are not computed, since that would take too long.
        """
        return all(file_size(file.path) == file.num_bytes for file in self.files)

    @property
    def is_partly_here(self) -> bool:
        """Whether some of the model's files exist."""
        return any(file.path.exists() for file in self.files)

    @property
    def last_used(self) -> float | None:
        """The time of the model's last load or download, in seconds since 1970; None if unknown."""
        return self.file.stat().st_mtime if self.file.exists() else None

    def touch(self) -> None:
        """Store the present time as the model's last use; do nothing if the cache is read-only."""
        if os.access(self.file, os.W_OK):
            os.utime(self.file)

    def write(self) -> None:
        """Write the model's record to its JSON file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        raw = msgspec.json.encode(self, enc_hook=str)
        write_checked_json(self.file, msgspec.json.decode(raw))


def models_folder() -> Path:
    """Return the cache folder for downloaded models of the catalogue and of Python packages.

    Beside a model `NAME.gguf` is its record `NAME.gguf.json` (`ModelRecord`).
    """
    return env.cache_dir() / "models"


def hub_folder() -> Path:
    """Return the folder with the records of models that are in the hub's cache."""
    return models_folder() / "hub"


def stored_records() -> Iterator[ModelRecord]:
    """Yield the records of downloaded models, including models whose files no longer exist."""
    for file in sorted([*models_folder().glob("*.gguf.json"), *hub_folder().glob("*.json")]):
        record = _read_record(file)
        if record is not None:
            yield record


def record_of_package(model: PackagedModel) -> ModelRecord | None:
    """Return the stored record of a packaged model, or a new one from the catalogue.

    It is None if the model is neither downloaded nor in the catalogue.
    """
    path = models_folder() / model.file_name
    if model.file_bytes is None:
        return _read_record(path.with_name(f"{path.name}.json"))
    return new_record(model, StoredFile(path, model.file_bytes, model.sha256))


def new_record(model: PackagedModel, file: StoredFile) -> ModelRecord:
    """Return a new record, not written yet, of a packaged model whose file is `file`."""
    return ModelRecord(
        name=model.name,
        title=model.title,
        path=file.path,
        files=(file,),
        source=sources_of(model),
        licence=model.licence,
        family=model.family,
        number_format=model.number_format,
        good_for=model.good_for,
    )


def sources_of(model: PackagedModel) -> tuple[str, ...]:
    """Return the sources of a catalogue model (hub, package), in the order they are tried."""
    hub = () if model.hub is None else (str(model.hub),)
    return (*hub, *(f"pypi:{part.requirement}:{part.path}" for part in model.parts))


def _read_record(file: Path) -> ModelRecord | None:
    """Return a model's record from its file; None if the file is missing or damaged.

    A damaged record is logged.
    """
    try:
        if not file.exists():
            return None
        record = msgspec.convert(read_checked_json(file), ModelRecord, dec_hook=_decode_path)
        if record.snapshot is None:  # its folder may have moved
            path = file.with_suffix("")
            (stored,) = record.files
            stored = msgspec.structs.replace(stored, path=path)
            record = msgspec.structs.replace(record, path=path, files=(stored,))
        return record if record.file == file else None
    except (OSError, ValueError, ModelFormatError) as error:
        _warn(file, str(error))
        return None


@cache
def _warn(path: Path, reason: str) -> None:
    """Log once that a model's record at `path` is damaged and ignored, with the reason."""
    _logger.warning(
        "The record %s of a model is left out: %s Pull the model again, or delete the record.",
        path,
        reason,
    )


def _decode_path(kind: type, value: Any) -> Any:
    return kind(value)
