"""Files and folders that get their names only when they are whole and have passed."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.files import locks, megabytes, place_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Yield a hidden path beside `out`; the file there becomes `out` after the block.

    If the block fails or is interrupted, the hidden file is removed, and `out` stays as it was.

    Raises:
        UsageError: another process makes it.
        TwostrokeError: the disk cannot be written.
    """
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    with _told(out), alone(out.with_name(f".{out.name}.lock"), out):
        try:
            if out.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            part.touch()  # to fail now, not after the work
            yield part
            place_file(part, out)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which becomes `out` after the block; as `unfinished`.

    Raises:
        UsageError: `out` is there already, or another process makes it.
        TwostrokeError: the disk cannot be written.
    """
    if out.exists():
        raise UsageError(f"{str(out)!r} is there already.", field="out")
    part = out.with_name(f".{out.name}.part")
    with _told(out), alone(out.with_name(f".{out.name}.lock"), out):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            yield part
            part.replace(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def alone(path: Path, out: Path) -> Iterator[None]:
    """Be the only process that makes `out`, by a lock file at `path`.

    Raises:
        UsageError: another process makes it.
    """
    with path.open("ab") as file:
        taken = not locks(file.fileno())
        # The other one may have removed the file just before it was locked here.
        if taken or not os.fstat(file.fileno()).st_nlink:
            raise UsageError(f"Another command writes {str(out)!r} now.", field="out")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _told(out: Path) -> Iterator[None]:
    """Say of each failure that `out` was not written."""
    try:
        yield
    except OSError as error:
        raise TwostrokeError(f"{str(out)!r} cannot be written: {error.strerror}.") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. {str(out)!r} was not written. Run the same command to continue."
        ) from None


def need(path: Path, num_bytes: float) -> None:
    """Raise TwostrokeError if the disk of the file `path` has fewer bytes free."""
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        needed, left = megabytes(int(num_bytes)), megabytes(free)
        raise TwostrokeError(f"The file needs {needed}, and the disk has {left} left.")
