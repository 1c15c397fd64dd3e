"""What fetching needs of the disk: locks, free space, durable names."""

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

_SPARE_BYTES = 16 << 20  # left free beside what a download needs


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for models, `variable` being what moves it elsewhere."""

    folder: Path
    variable: str = "TWOSTROKE_CACHE"

    def need(self, name: str, num_bytes: int) -> None:
        """Raise DownloadError unless `num_bytes` more fit onto its disk."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + _SPARE_BYTES:
            raise DownloadError(
                f"{name!r} needs {mega(num_bytes + _SPARE_BYTES)} of disk space to be fetched, "
                f"{str(self.folder)!r} has {mega(free)}: free some, or set {self.variable} to a "
                "folder elsewhere."
            )

    def error(
        self,
        name: str,
        error: OSError,
        kept: str = "what has arrived is kept ('twostroke models clean' drops it)",
    ) -> DownloadError:
        """Return the sentence for a failure of the disk; `kept` says what is left there."""
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return DownloadError(
                f"The disk is full: {name!r} could not be written to {str(self.folder)!r}; {kept}. "
                f"Free some space, or set {self.variable} to a folder elsewhere."
            )
        return DownloadError(
            f"{name!r} could not be written to {str(self.folder)!r}: {error.strerror or error}; "
            f"set {self.variable} to a folder that can be written."
        )


@contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `path`, calling `wait` once if another process has it.

    The empty file stays, since removing it would be a race.
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
    """Whether somebody holds the lock file at `path`."""
    try:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mega(num_bytes: int) -> str:
    """Return a size as people read it."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**10 else f"{num_bytes / 1e6:,.0f} MB"
