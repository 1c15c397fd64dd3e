"""Pages in a folder: a file for each, which appears whole and is checked when it is read."""

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
from twostroke.engine.kv_offload.disk_index import TAG_BYTES, DiskIndex, Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from twostroke.engine.kv_offload.tier import KvCacheSpec, PageValue

_logger = logging.getLogger("twostroke.cache")

_MAGIC: Final = b"TSPAGE01"
_HEADER: Final = struct.Struct(
    "<8s32sQfI4sI"
)  # magic, name, bytes, saved_s, place, before, checksum
HEADER_BYTES: Final = _HEADER.size
_CHECKED: Final = _HEADER.size - 4  # the checksum covers what stands before it, and the page
_PART: Final = ".part"  # of names of files that are not whole
_PART_S: Final = 600.0  # after which nobody writes such a file any more
_PAUSE_S: Final = 60.0  # between tries to write after a failure
_RESCAN_S: Final = 600.0  # between looks for what other servers have written
_NUM_PROBED: Final = 4
_FREE_SHARE: Final = 0.05  # of the bytes, freed together when there are too many
ABOUT: Final = "about.json"


class DiskTier:
    """Implements `Tier` with the files `FOLDER/kind/ab/cd...`, by the names of their pages.

    Several servers may use a folder: files have their content's name, appear by renaming and vanish
    by unlinking. All kinds together have at most `most_bytes`, and each server keeps to that.
    """

    title = "disk"

    def __init__(self, folder: Path, kind: KvCacheSpec, most_bytes: int, model: str) -> None:
        """Use a folder, which is made if it is not there; `model` is what people call the model.

        Raises:
            UsageError: it cannot be made or read.
        """
        self._root, self._folder = folder, folder / kind.digest.hex()[:16]
        self._about = json.dumps({"name": model, **asdict(kind)}, default=asdict)
        self._page_bytes = kind.page_bytes
        self._ledger = DiskIndex(most_bytes)
        self._lock = threading.Lock()
        self._resume_s = self._scanned_s = 0.0  # when to write again; when the folder was read
        self._count = 0
        try:
            self._make_folder()
        except OSError as error:
            if not self._folder.is_dir() and not folder.is_dir():
                reason = f"{folder} cannot be used: {error.strerror}."
                raise UsageError(reason, field="page_cache") from None
            self._pause(error)
        self._scanner = threading.Thread(target=self._scan, name="twostroke-scan", daemon=True)
        self._scanner.start()

    @property
    def is_writable(self) -> bool:
        """Whether pages that are offered are written now."""
        return time.time() >= self._resume_s

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return those of the names that have a file."""
        return {name for name in names if self._path(name).exists()}

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Read a page; a damaged file is removed."""
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
            self._ledger.remove(name)
        return False

    def offer(self, name: bytes, page: memoryview[Any], worth: PageValue) -> bool:
        """Write a page that is not there, unless a write failed a moment ago."""
        until_s = worth.until_s
        if not self.is_writable:
            return False
        path = self._path(name)
        with self._lock:
            is_known = name in self._ledger.entries
            if is_known:
                self._ledger.use(name, worth.saved_s, until_s)
        try:
            if is_known or path.exists():
                os.utime(path, (worth.used_s, max(until_s, path.stat().st_mtime)))
                return False
            self._make_room(len(page))
            self._write(path, name, page, worth)
            os.utime(path, (worth.used_s, until_s))
        except FileNotFoundError:  # another server has removed it
            with self._lock:
                self._ledger.remove(name)
            return False
        except OSError as error:
            self._pause(error)
            return False
        with self._lock:
            num_bytes = _HEADER.size + len(page)
            before = worth.before[:TAG_BYTES]
            entry = Entry(num_bytes, worth.saved_s, worth.place, until_s, before=before)
            self._ledger.add(name, entry)
        return True

    def probe(self) -> float:
        """Read some pages that the system has forgotten; return the fewest seconds for one."""
        page, times = memoryview(bytearray(self._page_bytes)), []
        with suppress(OSError):
            for path in itertools.islice(self._folder.glob("??/*"), _NUM_PROBED):
                with open_regular_file(path) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began_s = time.perf_counter()
                read_page(path, bytes(32), page)
                times.append(time.perf_counter() - began_s)
        return min(times, default=0.0)

    def size(self) -> tuple[int, int]:
        """Return the pages and bytes of all kinds."""
        with self._lock:
            return len(self._ledger.entries), self._ledger.num_bytes

    def wait(self) -> None:
        """Wait until the folder was read."""
        self._scanner.join()

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / text[2:]

    def _make_folder(self) -> None:
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        write_text(self._folder / ABOUT, self._about)

    def _write(self, path: Path, name: bytes, page: memoryview[Any], worth: PageValue) -> None:
        self._count += 1
        try:
            path.parent.mkdir(0o700, exist_ok=True)
        except FileNotFoundError:  # the folder was cleaned meanwhile
            self._make_folder()
            path.parent.mkdir(0o700, exist_ok=True)
        part = path.parent / f"{os.getpid()}-{threading.get_ident()}-{self._count}{_PART}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                written = os.writev(descriptor, (header_of(name, page, worth), page))
                if written != _HEADER.size + len(page):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
            part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least valuable pages if `num_bytes` more would be too many."""
        if time.monotonic() - self._scanned_s > _RESCAN_S:
            self._scan()
        with self._lock:
            gone = self._ledger.surplus(time.time(), num_bytes)
            if gone:
                free = max(num_bytes, int(self._ledger.most_bytes * _FREE_SHARE))
                gone = self._ledger.surplus(time.time(), free)
            for name in gone:
                self._ledger.remove(name)
        for name in gone:
            text = name.hex()
            for kind in self._root.glob("*/"):
                (kind / text[:2] / text[2:]).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Take in what the folder has, also of other servers and other models."""
        self._scanned_s = time.monotonic()
        found: set[bytes] = set()
        with suppress(OSError):
            for path in stored_pages(self._root):
                name = bytes.fromhex(path.parent.name + path.name)
                found.add(name)
                with self._lock:
                    is_known = name in self._ledger.entries
                if not is_known and (entry := entry_of(path)) is not None:
                    with self._lock:
                        self._ledger.add(name, entry)
            with self._lock:
                for name in self._ledger.entries.keys() - found:
                    self._ledger.remove(name)

    def _pause(self, error: OSError) -> None:
        self._resume_s = time.time() + _PAUSE_S
        _logger.warning(
            "The page cache cannot be written (%s: %s); it is read, and tried again in %.0f s.",
            self._root,
            error.strerror,
            _PAUSE_S,
        )


def header_of(name: bytes, page: memoryview[Any], worth: PageValue) -> bytes:
    """Return what stands before a page in its file."""
    before = worth.before[:TAG_BYTES]
    head = _HEADER.pack(_MAGIC, name, len(page), worth.saved_s, worth.place, before, 0)[:_CHECKED]
    return head + zlib.crc32(page, zlib.crc32(head)).to_bytes(4, "little")


def read_page(path: Path, name: bytes, page: memoryview[Any]) -> str | None:
    """Fill a page from a file; return what is wrong with the file, or None.

    Raises:
        OSError: it cannot be read.
    """
    head = bytearray(_HEADER.size)
    with open_regular_file(path, follows_links=False) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != len(head) + len(page):
            return f"has {num_bytes} bytes instead of {len(head) + len(page)}."
        if os.preadv(file.fileno(), [head, page], 0) != num_bytes:
            return "ended early."
    magic, its_name, *_, checksum = _HEADER.unpack(head)
    if magic != _MAGIC or its_name != name:
        return "is of another page."
    if zlib.crc32(page, zlib.crc32(head[:_CHECKED])) != checksum:
        return "has a wrong checksum."
    return None


def entry_of(path: Path) -> Entry | None:
    """Return what is known of a file without reading its page; None if it is not one."""
    try:
        with open_regular_file(path, follows_links=False) as file:
            head = file.read(_HEADER.size)
            facts = os.fstat(file.fileno())
    except OSError:
        return None
    if len(head) < _HEADER.size:
        return Entry(facts.st_size, 0.0, 0, facts.st_mtime)
    _, _, _, saved_s, place, before, _ = _HEADER.unpack(head)
    before = before if any(before) else b""
    return Entry(facts.st_size, max(0.0, saved_s), place, facts.st_mtime, before=before)


def stored_pages(root: Path) -> Iterator[Path]:
    """Yield the files with pages; files that were never finished are removed."""
    for path in root.glob("*/??/*"):
        if path.name.endswith(_PART):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _PART_S:
                    path.unlink()
        elif len(path.name) == 62:
            with suppress(ValueError):
                bytes.fromhex(path.parent.name + path.name)
                yield path
