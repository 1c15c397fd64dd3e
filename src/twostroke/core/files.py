"""Files: safe reads with a size limit, atomic replacement, locks, and large outputs."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from twostroke.core.errors import ModelFormatError, TwostrokeError, UsageError
from twostroke.core.message_text import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_JSON_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 17
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, which editors on Windows write


class IrregularFileError(OSError):
    """A path that must be a regular file is a folder, pipe, socket, device or link."""


def open_regular_file(path: Path, *, follows_links: bool = True) -> BinaryIO:
    """Open a regular file to read its bytes; a pipe is refused, since opening one may block.

    Pipes in /dev and /proc, which a shell opens for `<(command)`, are accepted. Without
    `follows_links`, a symbolic link is refused.

    Raises:
        IrregularFileError: the path is not a regular file.
        OSError: the file is missing, or cannot be opened.
    """
    if path.parts[:2] in {("/", "dev"), ("/", "proc")}:
        return path.open("rb")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and not follows_links):
            raise _irregular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return os.fdopen(descriptor, "rb")


def is_there(path: Path) -> bool:
    """Return whether a path exists, even as a folder, a pipe or a link to a missing file.

    Loaders ask this about optional files of a model: a path that exists but is not a regular file
    is an error, and must not count as absent.
    """
    return os.path.lexists(path)


def read_regular_file(path: Path) -> bytes:
    """Return the bytes of a regular file; raise the errors of `open_regular_file`."""
    with open_regular_file(path) as file:
        return file.read()


def _irregular(path: Path) -> IrregularFileError:
    try:
        mode = path.lstat().st_mode
    except OSError:
        mode = 0
    kinds = {
        stat.S_IFDIR: "it is a folder",
        stat.S_IFIFO: "it is a pipe",
        stat.S_IFSOCK: "it is a socket",
        stat.S_IFLNK: "it is a symbolic link",
    }
    kind = kinds.get(stat.S_IFMT(mode), "it is a device")
    return IrregularFileError(errno.EINVAL, f"{kind}, not a file", str(path))


def read_at_most(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the remaining bytes of an open file, at most `max_bytes`.

    The file is read in chunks, since a single read reserves memory for all of `max_bytes`.
    """
    chunks: list[bytes] = []
    while max_bytes > 0 and (chunk := file.read(min(max_bytes, _CHUNK_BYTES))):
        chunks.append(chunk)
        max_bytes -= len(chunk)
    return b"".join(chunks)


def read_small_file(path: Path) -> bytes:
    """Return the bytes of a small file, such as JSON, without a byte order mark.

    Raises ModelFormatError if the file cannot be read, or has more than `MAX_JSON_BYTES`.
    """
    try:
        with open_regular_file(path) as file:
            raw = read_at_most(file, MAX_JSON_BYTES + 1)
    except OSError as error:
        name = path.name or str(path)  # "." has no name
        raise ModelFormatError(f"{name!r} cannot be read: {error.strerror}.") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path.name!r} is larger than {MAX_JSON_BYTES} bytes.")
    return raw.removeprefix(BYTE_ORDER_MARK)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically: readers see the old text or the new text."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def move_into_place(part: Path, path: Path) -> None:
    """Rename a finished temporary file to its final path, so that a power failure cannot lose it.

    The data and the folder are flushed to disk.
    """
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def file_size(path: Path) -> int | None:
    """Return a file's size in bytes; None if it does not exist or cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False if another process holds its lock.

    `descriptor` is the file's descriptor.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Write an output file so that it appears complete or not at all.

    Yields a hidden path beside the output file `out`, which is renamed to `out` after the block. If
    the block fails or is interrupted, the hidden file is removed, and `out` stays as it was.
    A symbolic link stays, and its target is replaced. A device or a pipe, such as /dev/stdout, is
    never replaced: the finished bytes are written to it.

    Raises:
        UsageError: another process is writing `out`.
        TwostrokeError: the disk cannot be written.
    """
    if _is_stream(out):
        with _write_errors(out), _stream_output(out) as part:
            yield part
        return
    target = Path(os.path.realpath(out))
    part = target.with_name(f".{target.stem}.part{target.suffix}")
    with _write_errors(out), exclusive_output(target.with_name(f".{target.name}.lock"), out):
        try:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            part.touch()  # to fail now, not after the work
            yield part
            move_into_place(part, target)
        finally:
            part.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    """Return whether a path is a device, a pipe, or an open file of this process."""
    if path.parts[:2] == ("/", "proc") or path.parts[:3] == ("/", "dev", "fd"):
        return True
    if str(path) in {"/dev/stdout", "/dev/stderr"}:  # the shell may have opened a regular file
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _stream_output(out: Path) -> Iterator[Path]:
    """Yield a temporary path; after the block, its bytes are written to the device `out`."""
    import shutil  # slow to import
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / f"output{out.suffix}"
        part.touch()
        yield part
        # Appending keeps the earlier lines of a regular file that is the standard output.
        with part.open("rb") as source, out.open("ab", buffering=0) as stream:
            shutil.copyfileobj(source, stream)


@contextmanager
def atomic_output_folder(out: Path) -> Iterator[Path]:
    """Write an output folder so that it appears complete or not at all.

    Yields a hidden folder beside `out`, which is renamed to `out` after the block. If the block
    fails or is interrupted, the hidden folder is removed.

    Raises:
        UsageError: `out` exists already, or another process is writing it.
        TwostrokeError: the disk cannot be written.
    """
    if out.exists():
        raise UsageError(f"{str(out)!r} is there already.", field="out")
    import shutil  # slow to import

    part = out.with_name(f".{out.name}.part")
    with _write_errors(out), exclusive_output(out.with_name(f".{out.name}.lock"), out):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            yield part
            part.replace(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def exclusive_output(path: Path, out: Path) -> Iterator[None]:
    """Hold a lock file during the block, so that no other process writes the output `out`.

    `path` is the lock file.

    Raises:
        UsageError: another process holds the lock.
    """
    with path.open("ab") as file:
        is_locked = not try_lock(file.fileno())
        # The other process may have removed the file just before it was locked here.
        if is_locked or not os.fstat(file.fileno()).st_nlink:
            raise UsageError(f"Another command writes {str(out)!r} now.", field="out")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    """Make errors and Ctrl-C in the block say that the output file `out` was not written."""
    try:
        yield
    except OSError as error:
        raise TwostrokeError(f"{str(out)!r} cannot be written: {error.strerror}.") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. {str(out)!r} was not written. Run the same command to continue."
        ) from None


def require_disk_space(path: Path, num_bytes: float) -> None:
    """Check, before a file is written, that its disk has `num_bytes` bytes free.

    Raises TwostrokeError if the disk of the file `path` has fewer.
    """
    import shutil

    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        needed, left = format_bytes(int(num_bytes)), format_bytes(free)
        raise TwostrokeError(f"The file needs {needed}, and the disk has {left} left.")
