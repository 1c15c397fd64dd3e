"""Files: JSON is read within a limit, files are replaced in one step, and locked."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_JSON_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 17
_CHECKSUM, _CHECKSUM_BYTES = "checksum", 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, which editors on Windows write


class IrregularFileError(OSError):
    """A path names a folder, a pipe, a socket, a device or a link where a file should be."""


def open_regular_file(path: Path, *, follows_links: bool = True) -> BinaryIO:
    """Open a file to read its bytes, and never wait for the writer of a pipe.

    Without `follows_links`, a symbolic link is refused, too. Pipes in /dev and /proc, which a shell
    opens for `<(command)`, are read.

    Raises:
        IrregularFileError: it is not a regular file.
        OSError: it is missing, or cannot be opened.
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
    """Return whether anything has this name, also a folder, a pipe or a link that leads nowhere.

    An optional file that is there and is no file is damaged, and must not count as left out.
    """
    return os.path.lexists(path)


def read_regular_file(path: Path) -> bytes:
    """Return the bytes of a file; raises as `open_regular_file`."""
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
    why = kinds.get(stat.S_IFMT(mode), "it is a device")
    return IrregularFileError(errno.EINVAL, f"{why}, not a file", str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; ModelFormatError if there is none."""
    value = _parse(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name!r} is damaged: it is not a JSON object.")
    return value


def read_at_most(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the rest of an open file, but no more than the first `max_bytes`.

    A read reserves memory for its limit, and a pipe has no size that could be its limit: chunks
    keep the memory small.
    """
    chunks: list[bytes] = []
    while max_bytes > 0 and (chunk := file.read(min(max_bytes, _CHUNK_BYTES))):
        chunks.append(chunk)
        max_bytes -= len(chunk)
    return b"".join(chunks)


def read_small_file(path: Path) -> bytes:
    """Return a file's bytes; ModelFormatError if it cannot be read, or is too large."""
    try:
        with open_regular_file(path) as file:
            raw = read_at_most(file, MAX_JSON_BYTES + 1)
    except OSError as error:
        name = path.name or str(path)  # of "." there is none
        raise ModelFormatError(f"{name!r} cannot be read: {error.strerror}.") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path.name!r} is larger than {MAX_JSON_BYTES} bytes.")
    return raw.removeprefix(BYTE_ORDER_MARK)


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one step: readers see the old text or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace a small file by a JSON object, in one step."""
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def write_checked_json(path: Path, values: Mapping[str, object]) -> None:
    """As `write_json`, with a checksum of name and values, which `read_checked_json` compares."""
    write_json(path, {**values, _CHECKSUM: _checksum(path, values)})


def read_checked_json(path: Path) -> dict[str, Any]:
    """Return values that `write_checked_json` wrote, or all of a file without a checksum.

    Raises:
        ModelFormatError: the file cannot be read, has another file's name, or its values have
            changed since they were written.
    """
    values = read_json(path)
    checksum = values.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(path, values):
        raise ModelFormatError(f"{path.name!r} is damaged: its values differ from its checksum.")
    return values


def _checksum(path: Path, values: Mapping[str, object]) -> str:
    text = json.dumps([path.name, values], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_CHECKSUM_BYTES).hexdigest()


def _parse(path: Path) -> Any:
    try:
        return json.loads(read_small_file(path))
    except (ValueError, RecursionError):
        raise ModelFormatError(f"{path.name!r} is damaged: it is not JSON.") from None


def place_file(part: Path, path: Path) -> None:
    """Give a whole file its name, so that neither is lost with the power."""
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def file_size(path: Path) -> int | None:
    """Return a file's size, None if it cannot be seen."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def megabytes(num_bytes: int) -> str:
    """Return a size as people read it."""
    if num_bytes >= 10**13:
        return f"{num_bytes / 1e12:,.1f} TB"
    if 0 < num_bytes < 10**6:
        return f"{num_bytes / 1e3:,.0f} KB" if num_bytes >= 1000 else f"{num_bytes} bytes"
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**10 else f"{num_bytes / 1e6:,.0f} MB"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locks(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
