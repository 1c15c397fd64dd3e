"""The disk under a download: locks, free space, checksums, progress, errors of a full disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from twostroke.core.errors import DownloadError
from twostroke.core.files import locks, megabytes
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20  # left free by a download


class ModelFolder(Frozen):
    """A folder for models; users move it with the environment variable `variable`."""

    folder: Path
    variable: str = "TWOSTROKE_CACHE"

    def need(self, name: str, num_bytes: int) -> None:
        """Raise DownloadError unless `num_bytes` more fit onto its disk."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + _SPARE_BYTES:
            raise DownloadError(
                f"{name!r} needs {megabytes(num_bytes + _SPARE_BYTES)} of disk space, and "
                f"{str(self.folder)!r} has {megabytes(free)} left. Free some space, or set "
                f"{self.variable} to a folder on another disk."
            )

    @contextmanager
    def filling(self, name: str, kept: Callable[[], str]) -> Iterator[None]:
        """Download the model `name` into it.

        `kept` says what is left of the download when it is interrupted or the disk fails.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Interrupted. {kept()}") from None
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
            reason = "The disk is full" if full else error.strerror or str(error)
            raise DownloadError(
                f"{name!r} cannot be written to {str(self.folder)!r}: {reason}. {kept()} Free some "
                f"space there, or set {self.variable} to a folder that you can write to."
            ) from None


@contextmanager
def locked(path: Path, watch: Watcher) -> Iterator[None]:
    """Hold the lock file at `path`; `watch` sees if another process holds it.

    The empty file stays: to remove it would be a race.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not locks(file.fileno()):
            watch(DownloadProgress("wait"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file at `path`."""
    if not path.exists():
        return False
    with path.open("ab") as file:
        return not locks(file.fileno())


def file_sha256(path: Path, watch: Watcher, before: int = 0, total_bytes: int | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    If it is one of several, `before` bytes of `total_bytes` were checked before it.
    """
    digest, done = hashlib.sha256(), before
    total = path.stat().st_size if total_bytes is None else total_bytes
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            watch(DownloadProgress("verify", done, total))
    return digest.hexdigest()


class DownloadProgress(Frozen):
    """The state of a download or a check.

    `phase` is "choose" (`note` names the choice), "wait" (another process fetches the same model),
    "download", "unpack" or "verify". `total_bytes` is None while it is not known.
    """

    phase: str
    done_bytes: int = 0
    total_bytes: int | None = None
    note: str | None = None


Watcher: TypeAlias = "Callable[[DownloadProgress], None]"
# Takes the path of a file's beginning, and the file's name for errors. Returns the model's family,
# None if the beginning is too short; raises ModelFormatError if the model cannot run here.
Inspect: TypeAlias = "Callable[[Path, str], str | None]"


def ignore(progress: DownloadProgress) -> None:
    """Watch nothing."""
    del progress
