"""The disk during a download: locks, free space, checksums, progress, errors of a full disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from twostroke.core.errors import DownloadError
from twostroke.core.files import try_lock
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20  # left free by a download


class ModelFolder(Frozen):
    """The folder on disk to which models are downloaded.

    Users can choose another folder with the environment variable `variable`.
    """

    folder: Path
    variable: str = "TWOSTROKE_CACHE"

    def require_space(self, name: str, num_bytes: int) -> None:
        """Raise DownloadError unless the disk of the model folder has `num_bytes` free bytes."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + _SPARE_BYTES:
            raise DownloadError(
                f"{name!r} needs {format_bytes(num_bytes + _SPARE_BYTES)} of disk space, and "
                f"{str(self.folder)!r} has {format_bytes(free)} left. Free some space, or set "
                f"{self.variable} to a folder on another disk."
            )

    @contextmanager
    def report_failures(self, name: str, describe_kept: Callable[[], str]) -> Iterator[None]:
        """Turn disk errors and Ctrl-C during a download into messages for the user.

        `describe_kept` returns a sentence about the received part of the model, from which a later
        download continues.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Interrupted. {describe_kept()}") from None
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
            reason = "The disk is full" if full else error.strerror or str(error)
            raise DownloadError(
                f"{name!r} cannot be written to {str(self.folder)!r}: {reason}. {describe_kept()} "
                f"Free some space there, or set {self.variable} to a folder that you can write to."
            ) from None


@contextmanager
def locked(path: Path, watch: Watcher) -> Iterator[None]:
    """Hold the lock file of a download during the block; wait while another process holds it.

    A wait is reported to `watch`. The empty lock file is not deleted afterwards, because that would
    be a race.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not try_lock(file.fileno()):
            watch(DownloadProgress("wait"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file of a download, that is, whether the download runs."""
    if not path.exists():
        return False
    with path.open("ab") as file:
        return not try_lock(file.fileno())


def file_sha256(
    path: Path, watch: Watcher, bytes_before: int = 0, total_bytes: int | None = None
) -> str:
    """Return the SHA-256 of a file in hexadecimal, and report the progress to `watch`.

    If the file is one of several, `bytes_before` of `total_bytes` were checked before it.
    """
    digest = hashlib.sha256()
    done_bytes = bytes_before
    total = path.stat().st_size if total_bytes is None else total_bytes
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            watch(DownloadProgress("verify", done_bytes, total))
    return digest.hexdigest()


class DownloadProgress(Frozen):
    """The progress of a model's download, or of the check of its files.

    `phase` is "choose" (`note` names the choice), "wait" (another process fetches the same model),
    "download", "unpack" or "verify". `total_bytes` is None if unknown.
    """

    phase: str
    done_bytes: int = 0
    total_bytes: int | None = None
    note: str | None = None


Watcher: TypeAlias = "Callable[[DownloadProgress], None]"
# Called with the path of an incomplete file, and the file's name for errors. Returns the model's
# family, None if the file is too short; raises ModelFormatError if the model cannot run here.
Inspect: TypeAlias = "Callable[[Path, str], str | None]"


def ignore_progress(progress: DownloadProgress) -> None:
    """Do nothing with a report of download progress: the default for callers that show none."""
    del progress
