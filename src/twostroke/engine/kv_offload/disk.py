"""The disk tier: a file for each page, renamed into place and verified when it is read."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from twostroke.core.errors import UsageError
from twostroke.core.files import open_regular_file, write_text
from twostroke.core.message_text import counted_noun
from twostroke.engine.kv_offload.disk_index import PREFIX_BYTES, DiskIndex, Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from twostroke.engine.kv_offload.tier import KvCacheSpec, PageValue

_logger = logging.getLogger("twostroke.cache")

_MAGIC: Final = b"TSPAGE01"
_HEADER: Final = struct.Struct(
    "<8s32sQfI4sI"
)  # magic, name, bytes, saved_s, index, previous, checksum
HEADER_BYTES: Final = _HEADER.size
_CHECKED_BYTES: Final = _HEADER.size - 4  # the checksum covers them, and the page
_PART_SUFFIX: Final = ".part"  # of files that are being written
_PART_AGE_S: Final = 600.0  # after which such a file is left over from a crash
_WRITE_PAUSE_S: Final = 60.0  # after a failed write
_RESCAN_S: Final = 600.0  # between scans for files of other servers
_MAX_PROBED_PAGES: Final = 4
_FREED_RATIO: Final = 0.05  # of the limit, freed together when the folder is full
ABOUT: Final = "about.json"


class DiskTier:
    """Stores KV pages on disk: the `OffloadTier` with files `FOLDER/SPEC/ab/cd...`.

    A file is named as its page. Several servers may share a folder: pages of the same name have the
    same content, and a file is renamed into place when it is complete. A spec is what determines
    the bytes of a page besides its tokens (`KvCacheSpec`). Each server keeps the pages of all specs
    together below `max_bytes`.
    """

    title = "disk"

    def __init__(self, folder: Path, spec: KvCacheSpec, max_bytes: int, model: str) -> None:
        """Store KV pages in a folder, which is created if necessary.

        `model` is the model's name, which `twostroke cache` shows.

        Raises:
            UsageError: the folder cannot be created or read.
        """
        self._root = folder
        self._folder = folder / spec.digest.hex()[:16]
        self._about = json.dumps({"name": model, **asdict(spec)}, default=asdict)
        self._page_bytes = spec.page_bytes
        self._index = DiskIndex(max_bytes)
        self._lock = threading.Lock()
        self._write_again_s = 0.0
        self._scanned_s = 0.0
        self._num_written = 0
        try:
            self._make_folder()
        except OSError as error:
            if not self._folder.is_dir() and not folder.is_dir():
                reason = f"{folder} cannot be used: {error.strerror}."
                raise UsageError(reason, field="page_cache") from None
            self._pause_writing(error)
        self._scanner = threading.Thread(target=self._scan, name="twostroke-scan", daemon=True)
        self._scanner.start()

    @property
    def is_writable(self) -> bool:
        """Whether offered KV pages are written now: no write to the disk has failed recently."""
        return time.time() >= self._write_again_s

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return the names of KV pages that have a file in the folder."""
        return {name for name in names if self._path(name).exists()}

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Fill a KV page from its file, and return whether that worked; remove a damaged file."""
        path = self._path(name)
        try:
            fault = read_page(path, name, page)
            if fault is None:
                return True
            _logger.warning("A damaged page was removed from the page cache: %s %s", path, fault)
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning("A page cannot be read: %s: %s.", path, error.strerror)
        with self._lock:
            self._index.remove(name)
        return False

    def offer(self, name: bytes, page: memoryview[Any], value: PageValue) -> bool:
        """Write a KV page that is not stored, unless a write to the disk has failed recently.

        Returns whether the page was written.
        """
        keep_until_s = value.keep_until_s
        if not self.is_writable:
            return False
        if HEADER_BYTES + len(page) > self._index.max_bytes:
            return False
        path = self._path(name)
        with self._lock:
            is_known = name in self._index.entries
            if is_known:
                self._index.use(name, value.saved_s, keep_until_s)
        try:
            if is_known or path.exists():
                os.utime(path, (value.used_s, max(keep_until_s, path.stat().st_mtime)))
                return False
            self._make_room(len(page))
            self._write(path, name, page, value)
            os.utime(path, (value.used_s, keep_until_s))
        except FileNotFoundError:  # another server has removed it
            with self._lock:
                self._index.remove(name)
            return False
        except OSError as error:
            self._pause_writing(error)
            return False
        with self._lock:
            entry = Entry(
                num_bytes=_HEADER.size + len(page),
                saved_s=value.saved_s,
                index=value.index,
                used_s=keep_until_s,
                previous=value.previous_name[:PREFIX_BYTES],
            )
            self._index.add(name, entry)
        return True

    def probe(self) -> float:
        """Measure the shortest time, in seconds, to read a stored KV page from the disk.

        The operating system's page cache is avoided. Returns 0 if no page could be read.
        """
        page = memoryview(bytearray(self._page_bytes))
        times = []
        with suppress(OSError):
            num_bytes = HEADER_BYTES + len(page)  # a snapshot has another size
            paths = (path for path in self._folder.glob("??/*") if path.stat().st_size == num_bytes)
            for path in itertools.islice(paths, _MAX_PROBED_PAGES):
                with open_regular_file(path) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began_s = time.perf_counter()
                read_page(path, bytes(32), page)
                times.append(time.perf_counter() - began_s)
        return min(times, default=0.0)

    def size(self) -> tuple[int, int]:
        """Return the number of KV pages on disk, of all models and formats, and their bytes."""
        with self._lock:
            return len(self._index.entries), self._index.num_bytes

    def wait(self) -> None:
        """Wait for the end of the folder's scan, which begins when the tier is opened."""
        self._scanner.join()

    def close(self) -> None:
        """Do nothing: the disk tier keeps no file open."""

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / text[2:]

    def _make_folder(self) -> None:
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        write_text(self._folder / ABOUT, self._about)

    def _write(self, path: Path, name: bytes, page: memoryview[Any], value: PageValue) -> None:
        self._num_written += 1
        try:
            path.parent.mkdir(0o700, exist_ok=True)
        except FileNotFoundError:  # the folder was removed meanwhile
            self._make_folder()
            path.parent.mkdir(0o700, exist_ok=True)
        part = (
            path.parent / f"{os.getpid()}-{threading.get_ident()}-{self._num_written}{_PART_SUFFIX}"
        )
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                num_bytes = os.writev(descriptor, (header_of(name, page, value), page))
                if num_bytes != _HEADER.size + len(page):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
            part.rename(path)
        except BaseException:  # also after Ctrl-C: no part of a page may stay on the disk
            with suppress(OSError):
                part.unlink()
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Remove files of the least valuable KV pages until `num_bytes` more fit in the limit."""
        if time.monotonic() - self._scanned_s > _RESCAN_S:
            self._scan()
        with self._lock:
            evicted = self._index.surplus(time.time(), num_bytes)
            if evicted:
                room = max(num_bytes, int(self._index.max_bytes * _FREED_RATIO))
                evicted = self._index.surplus(time.time(), room)
            for name in evicted:
                self._index.remove(name)
        for name in evicted:
            text = name.hex()
            for spec_folder in self._root.glob("*/"):
                (spec_folder / text[:2] / text[2:]).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Index all page files in the folder by their headers, whichever server wrote them."""
        self._scanned_s = time.monotonic()
        names: set[bytes] = set()
        with suppress(OSError):
            for path in stored_pages(self._root):
                name = bytes.fromhex(path.parent.name + path.name)
                names.add(name)
                with self._lock:
                    is_known = name in self._index.entries
                if not is_known and (entry := entry_of(path)) is not None:
                    with self._lock:
                        self._index.add(name, entry)
            with self._lock:
                for name in self._index.entries.keys() - names:
                    self._index.remove(name)

    def _pause_writing(self, error: OSError) -> None:
        self._write_again_s = time.time() + _WRITE_PAUSE_S
        _logger.warning(
            "The page cache cannot be written (%s: %s); it is read, and tried again in %.0f s.",
            self._root,
            error.strerror,
            _WRITE_PAUSE_S,
        )


def header_of(name: bytes, page: memoryview[Any], value: PageValue) -> bytes:
    """Return the header of a stored KV page's file."""
    previous = value.previous_name[:PREFIX_BYTES]
    header = _HEADER.pack(_MAGIC, name, len(page), value.saved_s, value.index, previous, 0)
    checked = header[:_CHECKED_BYTES]
    return checked + zlib.crc32(page, zlib.crc32(checked)).to_bytes(4, "little")


def read_page(path: Path, name: bytes, page: memoryview[Any]) -> str | None:
    """Fill a KV page from its file, and verify the file.

    Returns None if the file is valid, and otherwise words for an error message that say how the
    file is damaged.

    Raises:
        OSError: the file cannot be read.
    """
    header = bytearray(_HEADER.size)
    with open_regular_file(path, follows_links=False) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != len(header) + len(page):
            return f"has {counted_noun(num_bytes, 'byte')} instead of {len(header) + len(page)}."
        if os.preadv(file.fileno(), [header, page], 0) != num_bytes:
            return "ended early."
    magic, stored_name, *_, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or stored_name != name:
        return "is of another page."
    if zlib.crc32(page, zlib.crc32(header[:_CHECKED_BYTES])) != checksum:
        return "has a wrong checksum."
    return None


def entry_of(path: Path) -> Entry | None:
    """Return the index entry of a stored KV page from its file's header.

    None if the file cannot be read.
    """
    try:
        with open_regular_file(path, follows_links=False) as file:
            header = file.read(_HEADER.size)
            file_stat = os.fstat(file.fileno())
    except OSError:
        return None
    if len(header) < _HEADER.size:
        return Entry(num_bytes=file_stat.st_size, saved_s=0.0, index=0, used_s=file_stat.st_mtime)
    _, _, _, saved_s, index, previous, _ = _HEADER.unpack(header)
    return Entry(
        num_bytes=file_stat.st_size,
        saved_s=max(0.0, saved_s),
        index=index,
        used_s=file_stat.st_mtime,
        previous=previous if any(previous) else b"",
    )


def stored_pages(root: Path) -> Iterator[Path]:
    """Yield the files of KV pages in a folder; remove files whose writing was never finished."""
    for path in root.glob("*/??/*"):
        if path.name.endswith(_PART_SUFFIX):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _PART_AGE_S:
                    path.unlink()
        elif len(path.name) == 62:
            with suppress(ValueError):
                bytes.fromhex(path.parent.name + path.name)
                yield path
