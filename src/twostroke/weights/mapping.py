"""A model file mapped into memory: read-only views without copies, and pages given back."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError, ModelNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.quant import Bytes

# Touching a page maps those around it as well, up to what the page cache holds in one piece:
# they go together.
_FAULT_BYTES = max(1 << 19, mmap.PAGESIZE)


class MappedFile:
    """A whole file as memory; views keep it alive.

    A file that another process shortens while it is mapped ends this process (SIGBUS), as with
    every memory-mapped reader: Twostroke itself only ever replaces model files by renaming.
    """

    __slots__ = ("_array", "_mmap", "path")

    def __init__(self, path: Path) -> None:
        """Map the file at `path`.

        ModelNotFoundError if there is none, ModelFormatError if it is empty or unreadable.
        """
        self.path = path
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise ModelFormatError(f"{path.name!r} cannot be read: it is no regular file.")
        try:
            with path.open("rb") as file:
                self._mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"There is no file {str(path)!r}.") from None
        except ValueError:
            raise ModelFormatError(f"{path.name!r} is empty.") from None
        except OSError as error:
            raise ModelFormatError(f"{path.name!r} cannot be read: {error.strerror}.") from None
        self._array = np.frombuffer(self._mmap, dtype=np.uint8)

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self._array.size

    @property
    def buffer(self) -> mmap.mmap:
        """The mapping itself: slicing copies, `struct` reads in place."""
        return self._mmap

    def view(self, start: int, num_bytes: int) -> Bytes:
        """Return `num_bytes` bytes from `start` as a read-only uint8 view."""
        return self._array[start : start + num_bytes]

    def release(self, view: Bytes) -> bool:
        """Give back the memory pages under `view`; they are read again when next touched.

        Returns False, and does nothing, for bytes that do not lie in this file.
        """
        start = view.ctypes.data - self._array.ctypes.data
        if not 0 <= start <= start + view.nbytes <= self.size:
            return False
        first = start - start % _FAULT_BYTES
        end = min(self.size, -(-(start + view.nbytes) // _FAULT_BYTES) * _FAULT_BYTES)
        if view.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._mmap.madvise(mmap.MADV_DONTNEED, first, end - first)
        return True
