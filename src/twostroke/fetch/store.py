"""What the cache remembers of each model: a small JSON file with its files and their checksums."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core import env
from twostroke.core.errors import ModelFormatError
from twostroke.core.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model; `ours` says that it was fetched for Twostroke, and not found there."""

    path: Path
    num_bytes: int
    sha256: str
    ours: bool = True


@dataclass(frozen=True, slots=True)
class Record:
    """A model that was fetched: `path` is what is loaded, `asked` are the names that led to it.

    `number_format` is its quantization, `family` its architecture, as far as they are known.
    `snapshot` is the folder in the hub's cache, None for other models.
    """

    file: Path
    name: str
    title: str
    path: Path
    files: tuple[StoredFile, ...]
    source: tuple[str, ...] = ()
    licence: str | None = None
    family: str | None = None
    number_format: str | None = None
    asked: tuple[str, ...] = ()
    snapshot: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def is_whole(self) -> bool:
        """Whether all its files are there, by their sizes."""
        return bool(self.files) and all(_size(file.path) == file.num_bytes for file in self.files)

    @property
    def is_there(self) -> bool:
        """Whether any of its files is there."""
        return any(file.path.exists() for file in self.files)

    @property
    def last_used(self) -> float | None:
        """When it was last loaded or fetched, in seconds since 1970."""
        try:
            return self.file.stat().st_mtime
        except OSError:
            return None

    def touch(self) -> None:
        """Note that it is used now; a cache that cannot be written forgets it."""
        try:
            os.utime(self.file, (time.time(), time.time()))
        except OSError:
            return

    def write(self) -> None:
        """Write it down, whole or not at all."""
        values: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "source": list(self.source),
            "file_bytes": self.num_bytes,
            "sha256": self.files[0].sha256,
            "licence": self.licence,
            "family": self.family,
            "format": self.number_format,
        }
        if self.snapshot is not None:
            values |= {
                "path": str(self.path),
                "snapshot": str(self.snapshot),
                "asked": list(self.asked),
                "files": [
                    {
                        "path": str(file.path),
                        "bytes": file.num_bytes,
                        "sha256": file.sha256,
                        "ours": file.ours,
                    }
                    for file in self.files
                ],
            }
        write_json(self.file, values)


def models_folder() -> Path:
    """Return where models of packages lie, each with its record beside it."""
    return env.cache_dir() / "models"


def hub_folder() -> Path:
    """Return where the records of models in the hub's cache lie."""
    return models_folder() / "hub"


def sidecar(path: Path) -> Path:
    """Return where the record of the packaged model at `path` is."""
    return path.with_name(f"{path.name}.json")


def read_sidecar(path: Path) -> Record | None:
    """Return the record of the packaged model at `path`, or None if it is lost."""
    record = read_record(sidecar(path))
    if record is None or record.snapshot is not None:
        return None
    return replace(record, path=path)


def hub_records() -> Iterator[Record]:
    """Yield the records of models in the hub's cache, also of those that are gone from there."""
    for file in sorted(hub_folder().glob("*.json")):
        record = read_record(file)
        if record is not None and record.snapshot is not None:
            yield record


def read_record(file: Path) -> Record | None:
    """Return what a record says, or None if it is damaged or not there."""
    try:
        return _record(file, read_json(file))
    except (ModelFormatError, KeyError, TypeError, ValueError):
        return None


def _record(file: Path, values: dict[str, Any]) -> Record:
    snapshot = values.get("snapshot")
    path = Path(values["path"]) if snapshot else file.with_name(file.name.removesuffix(".json"))
    if snapshot:
        files = tuple(
            StoredFile(Path(one["path"]), int(one["bytes"]), str(one["sha256"]), bool(one["ours"]))
            for one in values["files"]
        )
    else:
        size = int(values.get("file_bytes", 0)) or _size(path) or 0
        files = (StoredFile(path, size, str(values.get("sha256", ""))),)
    return Record(
        file=file,
        name=str(values["name"]),
        title=str(values.get("title", path.name)),
        path=path,
        files=files,
        source=tuple(str(one) for one in values.get("source", ())),
        licence=_text(values.get("licence")),
        family=_text(values.get("family")),
        number_format=_text(values.get("format")),
        asked=tuple(str(one) for one in values.get("asked", ())),
        snapshot=Path(snapshot) if snapshot else None,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
