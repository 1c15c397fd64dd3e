"""The disk under a download: locks, free space, and what to say when it is full."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.errors import DownloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_SPARE_BYTES = 16 << 20  # left free by a download


@dataclass(frozen=True, slots=True)
class Place:
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

    def error(self, name: str, error: OSError, kept: str) -> DownloadError:
        """Return the error for a write that failed; `kept` is a sentence about what is left."""
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return DownloadError(
                f"The disk is full: {name!r} does not fit into {str(self.folder)!r}. {kept} "
                f"Free some space, or set {self.variable} to a folder on another disk."
            )
        return DownloadError(
            f"{name!r} cannot be written to {str(self.folder)!r}: {error.strerror or error}. "
            f"Set {self.variable} to a folder that you can write to."
        )


@contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `path`; calls `wait` if another process holds it.

    The empty file stays: to remove it would be a race.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file at `path`."""
    if not path.exists():
        return False
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def place_file(part: Path, path: Path) -> None:
    """Give a whole file its name, so that neither is lost with the power."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def megabytes(num_bytes: int) -> str:
    """Return a size as people read it."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**10 else f"{num_bytes / 1e6:,.0f} MB"
