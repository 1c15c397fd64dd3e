"""`SharedLink`: a link by memory that the ranks of one machine share."""

from __future__ import annotations

import ctypes
import mmap
import os

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.records import LinkRecord
from twostroke.core.errors import MemoryLimitError
from twostroke.core.message_text import counted_noun


class SharedLink:
    """A link between ranks on one machine by shared memory; a `Link`.

    The memory is an anonymous file, which is freed when the last rank ends.
    """

    kind = "shared"

    def __init__(self, rank: int, num_ranks: int, level: str, file: int, num_bytes: int) -> None:
        """Map the link's shared memory: `num_bytes` of the open anonymous file `file`.

        The link takes ownership of the file, and closes it.
        """
        self._library = load_library(level)
        self._file = file
        self._num_bytes = num_bytes
        self._memory = mmap.mmap(file, num_bytes)
        start = (ctypes.c_char * num_bytes).from_buffer(self._memory)
        self._address = ctypes.addressof(start)
        del start  # a remaining reference would prevent closing the memory
        self.record = LinkRecord(
            rank=rank, num_ranks=num_ranks, shared=self._address, shared_bytes=num_bytes
        )

    @classmethod
    def create(cls, num_ranks: int, level: str, num_bytes: int) -> SharedLink:
        """Create the link's shared memory, on rank 0; untouched pages take no physical memory.

        Raises:
            MemoryLimitError: there is too little memory.
        """
        file = os.memfd_create("twostroke", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            return cls(0, num_ranks, level, file, num_bytes)
        except OSError:
            os.close(file)
            ranks_share = counted_noun(num_ranks, "rank shares", "ranks share")
            reason = f"No memory for {num_bytes / 1e6:.0f} MB that {ranks_share}."
            raise MemoryLimitError(reason) from None

    @property
    def files(self) -> tuple[int, ...]:
        """Return the open file of the shared memory, which rank processes must inherit."""
        return (self._file,)

    def renew(self) -> str:
        """Return the text by which ranks join: the shared memory's file descriptor and size."""
        return f"{self._file}:{self._num_bytes}"

    def join(self, link: str) -> None:
        """Do nothing, because a rank joins the link by mapping its memory."""
        del link

    def begin(self) -> None:
        """Reset the barriers and channels in the shared memory, before ranks run collectives."""
        self._library.ts_link_reset(self._address)

    def abort(self) -> None:
        """End all waits of all ranks in collectives."""
        if self._address:
            self._library.ts_link_abort(self._address)

    def progress(self) -> int:
        """Return 0: a link by shared memory cannot stall, because waiting ranks also poll."""
        return 0

    def close(self) -> None:
        """Unmap the link's shared memory; may be called twice."""
        if self._address:
            self._address = 0
            self._memory.close()
            os.close(self._file)


def join_shared(rank: int, num_ranks: int, level: str, link: str) -> SharedLink:
    """Return the link of a rank that has inherited the open file of the shared memory.

    `link`: the text that `SharedLink.renew` returned on rank 0.
    """
    file, num_bytes = map(int, link.split(":"))
    return SharedLink(rank, num_ranks, level, file, num_bytes)
