"""The record of each fetched model: a small JSON file with its names, files and checksums."""

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
    """A file of a model; `ours` is false if another program had fetched it before."""

    path: Path
    num_bytes: int = msgspec.field(name="bytes")
    sha256: str | None
    ours: bool = True


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was fetched, or that can be fetched by a short name.

    `path` is what is loaded: a GGUF file or a folder. `asked` are the names that users typed.
    `snapshot` is its folder in the hub's cache, None for a packaged model.
    """

    name: str
    title: str
    path: Path
    files: tuple[StoredFile, ...]
    source: tuple[str, ...] = ()
    licence: str | None = None
    family: str | None = None
    number_format: str | None = msgspec.field(name="format", default=None)
    asked: tuple[str, ...] = ()
    snapshot: Path | None = None
    good_for: str | None = None

    @property
    def file(self) -> Path:
        """Where this record is kept."""
        if self.snapshot is None:
            return self.path.with_name(f"{self.path.name}.json")
        repo = self.snapshot.parent.parent.name.removeprefix("models--")
        entry = self.path.relative_to(self.snapshot).as_posix().replace("/", "--")
        return hub_folder() / f"{repo}--{self.snapshot.name[:12]}--{entry.strip('.')}.json"

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def is_here(self) -> bool:
        """Whether all its files are here, by their sizes: hashing them takes too long."""
        return all(file_size(file.path) == file.num_bytes for file in self.files)

    @property
    def is_partly_here(self) -> bool:
        """Whether some of its files are here."""
        return any(file.path.exists() for file in self.files)

    @property
    def last_used(self) -> float | None:
        """When it was last loaded or fetched, in seconds since 1970."""
        return self.file.stat().st_mtime if self.file.exists() else None

    def touch(self) -> None:
        """Note that it is used now, where the cache can be written."""
        if os.access(self.file, os.W_OK):
            os.utime(self.file)

    def write(self) -> None:
        """Write it to its file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        raw = msgspec.json.encode(self, enc_hook=str)
        write_checked_json(self.file, msgspec.json.decode(raw))


def models_folder() -> Path:
    """Return the folder of packaged models, each with its record next to it."""
    return env.cache_dir() / "models"


def hub_folder() -> Path:
    """Return the folder with the records of models in the hub's cache."""
    return models_folder() / "hub"


def stored_records() -> Iterator[ModelRecord]:
    """Yield the records of fetched models, even of those whose files have gone."""
    for file in sorted([*models_folder().glob("*.gguf.json"), *hub_folder().glob("*.json")]):
        record = _read(file)
        if record is not None:
            yield record


def record_of_package(model: PackagedModel) -> ModelRecord | None:
    """Return the record of a packaged model, None if it is neither here nor in the catalogue."""
    path = models_folder() / model.file_name
    if model.file_bytes is None:
        return _read(path.with_name(f"{path.name}.json"))
    return new_record(model, StoredFile(path, model.file_bytes, model.sha256))


def new_record(model: PackagedModel, file: StoredFile) -> ModelRecord:
    """Return the record of a packaged model whose file is `file`."""
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
    """Return the places that a model may come from, in the order in which they are asked."""
    hub = () if model.hub is None else (str(model.hub),)
    return (*hub, *(f"pypi:{part.requirement}:{part.path}" for part in model.parts))


def _read(file: Path) -> ModelRecord | None:
    """Return a record, None if it is missing or damaged; the log names a damaged one."""
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
def _warn(file: Path, reason: str) -> None:
    """Say once that a record is left out."""
    _logger.warning(
        "The record %s of a model is left out: %s Pull the model again, or delete the record.",
        file,
        reason,
    )


def _decode_path(kind: type, value: Any) -> Any:
    return kind(value)
