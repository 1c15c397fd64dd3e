"""A model file mapped into memory: read-only views without copies, whose memory can be freed."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import MemoryLimitError, ModelFormatError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from twostroke.model.quant import Bytes

# An access also maps the pages around it, up to this size; they are freed together.
_FAULT_BYTES = max(1 << 19, mmap.PAGESIZE)


_NUM_START_BYTES = 64
# The first bytes of other kinds of files, in lower case, and advice for users.
_OTHER_FILES = {
    b"version https://git-lfs": "it is a pointer of Git LFS; fetch the file itself (git lfs pull)",
    b"<!doctype": "it is a web page; the download went wrong",
    b"<html": "it is a web page; the download went wrong",
    b"<?xml": "it is an XML document; the download went wrong",
    b"pk\x03\x04": "it is a ZIP archive, as of PyTorch; only GGUF and safetensors are read",
    b"\x80\x02": "it is a pickle of PyTorch; only GGUF and safetensors are read",
    b"\x1f\x8b": "it is compressed by gzip; unpack it first",
    b"gguf": "it is a GGUF file; its name must end with .gguf",
    b"tjgg": "it is a file of an old version of llama.cpp; convert the model again",
    b"lmgg": "it is a file of an old version of llama.cpp; convert the model again",
    b"fmgg": "it is a file of an old version of llama.cpp; convert the model again",
    b"algg": "it is an adapter (LoRA) of an old version of llama.cpp",
}


class MappedFile:
    """A model file mapped into memory; views of its bytes keep the mapping alive.

    If another process shortens the file while it is mapped, this process ends with SIGBUS, as with
    every memory-mapped reader. Twostroke itself replaces model files only by renaming.
    """

    __slots__ = ("_array", "_mmap", "modified_ns", "name", "path")

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Map the file at `path`; errors call the file `name` (default: the path's last part).

        Raises:
            ModelNotFoundError: there is no such file.
            ModelFormatError: the file is empty or cannot be read.
            MemoryLimitError: the limit of the address space is too low for the file.
        """
        self.path = path
        self.name = name or path.name
        if path.exists() and not path.is_file():  # a pipe would block
            raise self.fault("cannot be read: it is not a regular file")
        try:
            with path.open("rb") as file:
                self.modified_ns = os.fstat(file.fileno()).st_mtime_ns
                self._mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"There is no file {str(path)!r}.") from None
        except ValueError:
            raise self.fault("is empty") from None
        except OSError as error:
            if error.errno == errno.ENOMEM:
                size = path.stat().st_size
                raise MemoryLimitError(
                    f"{self.name!r} needs {size / 1e6:,.0f} MB of address space: raise the limit "
                    "(ulimit -v), or use a smaller model."
                ) from None
            raise self.fault(f"cannot be read: {error.strerror}") from None
        self._array = np.frombuffer(self._mmap, dtype=np.uint8)

    @property
    def size(self) -> int:
        """Return the file's size in bytes."""
        return self._array.size

    @property
    def buffer(self) -> mmap.mmap:
        """Return the mapping of the file, for `struct.unpack_from`; slicing it would copy."""
        return self._mmap

    def fault(self, text: str) -> ModelFormatError:
        """Return a ModelFormatError whose message is this file's name, followed by `text`."""
        return ModelFormatError(f"{self.name!r} {text}.")

    def wrong_kind(self, kind: str, default_reason: str) -> ModelFormatError:
        """Return the error that this file is not of the expected kind, such as "GGUF".

        If the file's first bytes identify another kind of file, the error names that kind;
        otherwise it gives `default_reason`.
        """
        start = self._mmap[:_NUM_START_BYTES].lstrip().lower()
        for prefix, reason in _OTHER_FILES.items():
            if start.startswith(prefix):
                return self.fault(f"is not a {kind} file: {reason}")
        return self.fault(f"is not a {kind} file: {default_reason}")

    def view(self, start: int, num_bytes: int) -> Bytes:
        """Return `num_bytes` bytes of the file from `start` as a read-only uint8 view."""
        return self._array[start : start + num_bytes]

    def release(self, views: Iterable[Bytes]) -> None:
        """Free the memory pages under views of the file; a later access reads the file again.

        Views of other memory are ignored. Adjacent ranges are freed in one system call, since each
        call interrupts all threads.
        """
        begin = end = 0
        for first, last in sorted(filter(None, map(self._memory_range, views))):
            if first > end:
                self._drop(begin, end)
                begin = first
            end = max(end, last)
        self._drop(begin, end)

    def _memory_range(self, view: Bytes) -> tuple[int, int] | None:
        """Return the byte range of the file, in whole memory pages, that contains a view.

        None if the view is of other memory.
        """
        start = view.ctypes.data - self._array.ctypes.data
        if not view.nbytes or not 0 <= start <= start + view.nbytes <= self.size:
            return None
        first = start - start % _FAULT_BYTES
        return first, min(self.size, -(-(start + view.nbytes) // _FAULT_BYTES) * _FAULT_BYTES)

    def _drop(self, begin: int, end: int) -> None:
        if end > begin:
            self._mmap.madvise(mmap.MADV_DONTNEED, begin, end - begin)
