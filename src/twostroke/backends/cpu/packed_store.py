"""Stores packed weights in files, so that later starts map them instead of packing again.

A file has the packed matrices of one model, or of one rank's part of it, then a checksum of each
block, then a trailer that identifies the contents. Files are written in the background after a
load, and renamed when they are complete. A file is used only after its checksums were verified.
This is done once after each boot of the machine, and again whenever a part of the file has to be
read from the disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np
from msgspec.structs import asdict

from twostroke.backends.cpu import mapped_file
from twostroke.core.errors import TwostrokeError
from twostroke.core.files import try_lock
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_nodes, num_cores
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.message_text import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

MIN_KEPT_BYTES: Final = 256 << 20  # smaller models are packed in less than 0.2 s
_VERSION: Final = 1  # raise it when `weights.kernel_rows` or a format's `to_kernel` changes
_PAGE: Final = 4096  # the sums begin at a multiple of it
_BLOCK_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 1 << 24
_TRAILER: Final = struct.Struct("<8s32s")
_MAGIC: Final = b"TSPACKED"
MIN_CLOSE_WAIT_S: Final = 3.0  # for a file that is being written
_MAX_THREADS: Final = 8
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_logger = logging.getLogger("twostroke.engine")


class PackedStore:
    """A folder of packed weights of at most `max_bytes`; least recently used files go first."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *,
        max_bytes: int | None = None,
        min_bytes: int = MIN_KEPT_BYTES,
    ) -> None:
        """Use the packed weights in `folder`, which is created when the first file is written.

        Args:
            folder: the folder of all models' packed weights.
            source: a text that changes when the model's files change.
            max_bytes: the most bytes of all files; None for half of the space that is free or used
                by these files.
            min_bytes: packed weights that are smaller are not stored.
        """
        self._folder, self._source = folder, source
        self._max_bytes, self._min_bytes = max_bytes, min_bytes

    def path_of(self, library_path: Path, descriptions: Iterable[str], identity: str) -> Path:
        """Return the path of the file for some matrices, packed by a native library.

        Args:
            library_path: the library. Another build of it may pack in another way.
            descriptions: name, format and shape of each matrix, in their order in memory.
            identity: the `weights_identity` of the matrices.
        """
        digest = hashlib.sha256()
        for part in (_VERSION, _file_digest(library_path), self._source, identity, *descriptions):
            digest.update(f"{part}\n".encode())
        return self._folder / f"{digest.hexdigest()}.packed"

    def open(self, path: Path, num_bytes: int) -> MappedWeights | None:
        """Map and check the file at `path`, which must have `num_bytes` of packed weights.

        Returns None if there is no such file. A damaged file is deleted, with a warning.
        """
        if not self._keeps(num_bytes):
            return None
        try:
            mapping = mapped_file.map_file(path, _file_bytes(num_bytes))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._discard(path, f"cannot be used: {error}")
            return None
        weights = MappedWeights(mapping, num_bytes)
        if not self._has_good_sums(path, mapping, num_bytes):
            weights.close()
            self._discard(path, "is damaged")
            return None
        mapping.populate()
        return weights

    def write_later(self, path: Path, address: int, num_bytes: int) -> PackedWriter | None:
        """Start to write packed weights from memory to the file at `path`, in the background.

        The weights must stay at `address` until the writer is closed. Returns None if weights of
        this size are not stored.
        """
        if not self._keeps(num_bytes):
            return None
        return PackedWriter(self, path, address, num_bytes)

    def make_room(self, path: Path, num_bytes: int) -> None:
        """Delete the least recently used files, so that a file of `num_bytes` may be written.

        Partly written files of processes that have ended are deleted, too.

        Raises:
            TwostrokeError: the limit or the disk is too small for the file.
        """
        for part in self._folder.glob(".*.part"):
            if part != _part_of(path):
                _remove_if_abandoned(part)
        kept_files = []
        for file in self._folder.glob("*.packed"):
            with suppress(OSError):  # another process may delete it now
                kept_files.append((_last_use(file), file.stat().st_size, file))
        used = sum(size for _, size, _ in kept_files)
        free = shutil.disk_usage(self._folder).free
        limit = (free + used) // 2 if self._max_bytes is None else self._max_bytes
        if num_bytes > min(limit, free + used):
            raise TwostrokeError(
                f"they take {format_bytes(num_bytes)}, and {format_bytes(min(limit, free + used))} "
                "may be used (--packed-cache)"
            )
        for _, size, file in sorted(kept_files):
            if used + num_bytes <= limit and num_bytes <= free:
                break
            file.unlink(missing_ok=True)
            _record_of(file).unlink(missing_ok=True)
            used, free = used - size, free + size

    def _has_good_sums(self, path: Path, mapping: mapped_file.Mapping, num_bytes: int) -> bool:
        """Whether a mapped file has the contents that were written.

        The checksums are not computed again if they were verified since the machine booted, the
        file has not changed since then, and all of it is still in memory. As a side effect, the
        time of the file's check record is set to now, the time of the last use.
        """
        file, record = mapping.array(), CheckRecord.of(mapping)
        if not _has_seal(file, num_bytes, path.stem):
            return False
        record_path = _record_of(path)
        was_checked = record is not None and record == CheckRecord.read(record_path)
        if not was_checked or not mapping.is_in_memory:
            if not _equals_sums(file, num_bytes):
                return False
            if record is not None:
                record.write(record_path)
        with suppress(OSError):
            os.utime(record_path if record is not None else path)
        return True

    def _keeps(self, num_bytes: int) -> bool:
        """Whether packed weights of this size are stored on this machine.

        With several NUMA nodes they are not: each thread packs the matrices that it will read into
        the memory of its node, but all of a mapped file would be on one node.
        """
        return num_bytes >= self._min_bytes and len(memory_nodes()) <= 1

    def _discard(self, path: Path, fault: str) -> None:
        _logger.warning(
            "The file of packed weights %s: %s. The weights are packed again.", fault, path
        )
        with suppress(OSError):
            path.unlink()
            _record_of(path).unlink()


class CheckRecord(Frozen):
    """The status that a file had when its checksums were verified.

    If the file's status still equals its record, the checksums need not be verified again.

    Attributes:
        boot: identifies the boot of the operating system. A machine that lost its power may have
            lost pages that were never written to its disk.
        device, inode, size, changed_ns: the file's status. Each write to a file, and each change of
            its name or owner, changes `changed_ns`, which no program can set.
    """

    boot: str
    device: int
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, mapping: mapped_file.Mapping) -> Self | None:
        """Return the record of a mapped file as it is now.

        None if the system does not identify its boot.
        """
        try:
            boot = _BOOT_ID.read_text("ascii").strip()
        except (OSError, ValueError):
            return None
        status = mapping.status
        return cls(boot, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the record at `path`; None if it is missing or damaged."""
        try:
            return msgspec.convert(read_checked_json(path), cls)
        except (TwostrokeError, msgspec.MsgspecError):
            return None

    def write(self, path: Path) -> None:
        """Write the record to `path`; without it, the next start checks the file again."""
        with suppress(OSError):
            write_checked_json(path, asdict(self))


class MappedWeights:
    """The packed weights of a file that is mapped into memory."""

    def __init__(self, mapping: mapped_file.Mapping, num_bytes: int) -> None:
        """Use a mapping whose first `num_bytes` bytes are packed weights."""
        self._mapping = mapping
        self.num_bytes = num_bytes

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """Return all bytes of the file; the array must not be used after `close`."""
        return self._mapping.array()

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self._mapping.address

    @property
    def has_huge_pages(self) -> bool:
        """Whether the operating system maps the file in huge pages.

        If not, reading the weights in each step takes longer than from other memory.
        """
        return self._mapping.has_huge_pages()

    def copy_to(self, address: int) -> None:
        """Copy the packed weights to memory at `address`."""
        source, target = self.bytes[: self.num_bytes], _bytes_at(address, self.num_bytes)

        def copy(start: int) -> None:
            target[start : start + _WRITE_BYTES] = source[start : start + _WRITE_BYTES]

        _in_threads(copy, range(0, self.num_bytes, _WRITE_BYTES))

    def move_to(self, address: int) -> None:
        """Move the packed weights to `address`, in place of the memory that is there.

        The rest of the file is unmapped. `close` does nothing afterwards: the weights are freed
        together with the memory at `address`.
        """
        self._mapping.move_to(address, self.num_bytes)

    def close(self) -> None:
        """Unmap the file."""
        self._mapping.close()


class PackedWriter:
    """Writes packed weights to a file in a thread, then maps the file.

    `take` returns the mapping once it exists. The process can then use it in place of its own copy
    of the weights, and shares the memory with other processes.
    """

    def __init__(self, store: PackedStore, path: Path, address: int, num_bytes: int) -> None:
        """Start the thread that writes the file."""
        self._store, self._path = store, path
        self._address, self._num_bytes = address, num_bytes
        self._is_cancelled = threading.Event()
        self._mapped: MappedWeights | None = None
        self._thread = threading.Thread(target=self._write, name="packed weights", daemon=True)
        self._thread.start()

    def take(self) -> MappedWeights | None:
        """Return the mapped file, only once; None unless it is complete and has huge pages."""
        mapped, self._mapped = self._mapped, None
        return mapped

    def close(self, wait_s: float = MIN_CLOSE_WAIT_S) -> None:
        """Wait up to `wait_s` seconds until the file is complete, then give it up.

        Afterwards the writer does not read the weights any more.
        """
        self._thread.join(wait_s)
        self._is_cancelled.set()
        self._thread.join()
        if (mapped := self.take()) is not None:
            mapped.close()

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._write_file() and not self._is_cancelled.is_set():
                self._map()
        except TwostrokeError as error:
            _logger.warning("The packed weights are not kept for the next start: %s.", error)
        except OSError as error:
            _logger.warning(
                "The packed weights are not kept for the next start: %s: %s "
                "(--packed-cache off: no file is written).",
                self._path.parent,
                error.strerror or error,
            )
        except RuntimeError:  # of threads that cannot start, as the process ends without `close`
            if threading.main_thread().is_alive():
                raise

    def _write_file(self) -> bool:
        """Write the file, and return whether it is complete."""
        part = _part_of(self._path)
        with part.open("ab", buffering=0) as file:
            if not try_lock(file.fileno()) or self._path.exists():
                return False  # another process writes the same weights, or has written them
            if not os.path.samestat(os.fstat(file.fileno()), part.stat()):
                return False  # it has renamed this file since, so processes may have mapped it
            try:
                self._store.make_room(self._path, _file_bytes(self._num_bytes))
                file.truncate(0)
                if not self._write_contents(file.fileno()):
                    return False
                part.replace(self._path)
                return True
            finally:
                part.unlink(missing_ok=True)

    def _write_contents(self, descriptor: int) -> bool:
        """Write weights, checksums and trailer; return False if the writer was closed meanwhile."""
        weights = _bytes_at(self._address, self._num_bytes)
        for start in range(0, self._num_bytes, _WRITE_BYTES):
            if self._is_cancelled.is_set():
                return False
            _write_all(descriptor, weights[start : start + _WRITE_BYTES].data)
        _write_all(descriptor, bytes(-self._num_bytes % _PAGE))
        sums = _block_sums(weights, self._is_cancelled)
        if self._is_cancelled.is_set():
            return False
        _write_all(descriptor, sums.tobytes())
        _write_all(descriptor, _TRAILER.pack(_MAGIC, _seal(self._path.stem, sums)))
        return not self._is_cancelled.is_set()

    def _map(self) -> None:
        """Map the file that was written, if its weights are read as fast as from other memory."""
        mapped = self._store.open(self._path, self._num_bytes)
        if mapped is not None and mapped.has_huge_pages:
            self._mapped = mapped
        elif mapped is not None:
            mapped.close()


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.stem}.part")


def _record_of(path: Path) -> Path:
    return path.with_suffix(".checked")


def _last_use(path: Path) -> float:
    """Return when a file was last used, or written."""
    with suppress(OSError):
        return max(path.stat().st_mtime, _record_of(path).stat().st_mtime)
    return path.stat().st_mtime


def _remove_if_abandoned(part: Path) -> None:
    """Delete a partly written file, unless a process is writing it."""
    with suppress(OSError), part.open("rb") as file:
        if try_lock(file.fileno()):
            part.unlink(missing_ok=True)


def _file_bytes(num_bytes: int) -> int:
    """Return the size of the file with `num_bytes` of packed weights."""
    num_sums = -(-num_bytes // _BLOCK_BYTES)
    return num_bytes + -num_bytes % _PAGE + 8 * num_sums + _TRAILER.size


def _has_seal(file: NDArray[np.uint8], num_bytes: int, name: str) -> bool:
    """Whether a file has a valid trailer: it is complete, and its checksums are unchanged.

    `num_bytes`: the size of its packed weights. `name`: the file's name without suffix.
    """
    magic, seal = _TRAILER.unpack(file[-_TRAILER.size :].tobytes())
    return bool(magic == _MAGIC and seal == _seal(name, _stored_sums(file, num_bytes)))


def _equals_sums(file: NDArray[np.uint8], num_bytes: int) -> bool:
    """Whether the packed weights in a file match the checksums that are stored after them."""
    return bool(np.array_equal(_block_sums(file[:num_bytes]), _stored_sums(file, num_bytes)))


def _stored_sums(file: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint64]:
    return file[num_bytes + -num_bytes % _PAGE : -_TRAILER.size].view(np.uint64)


def _seal(name: str, sums: NDArray[np.uint64]) -> bytes:
    return hashlib.sha256(name.encode() + sums.tobytes()).digest()


def _block_sums(
    values: NDArray[np.uint8], is_cancelled: threading.Event | None = None
) -> NDArray[np.uint64]:
    """Return the checksum of each block: the sum of its 64-bit words, modulo 2^64.

    It finds lost pages and changed bits at the speed of the memory. Once `is_cancelled` is set, the
    sums of further blocks are not computed, and the result must not be used.
    """
    words = values.view(np.uint64)
    block = _BLOCK_BYTES // 8
    starts = range(0, words.size, block)
    sums = np.zeros(len(starts), np.uint64)

    def add(start: int) -> None:
        if is_cancelled is None or not is_cancelled.is_set():
            sums[start // block] = words[start : start + block].sum()

    _in_threads(add, starts)
    return sums


def _in_threads(work: Callable[[int], None], items: Sequence[int]) -> None:
    """Call `work` for all items, in as many threads as there are cores; NumPy frees the GIL."""
    num_threads = min(num_cores(), _MAX_THREADS)

    def work_on_part(thread: int) -> None:
        for item in items[thread::num_threads]:
            work(item)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work_on_part, range(num_threads)))


def _bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
