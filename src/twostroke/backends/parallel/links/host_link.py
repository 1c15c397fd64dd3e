"""`HostLink`: what connects ranks on several hosts, over some engine that moves the bytes."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Final, Protocol

from twostroke.backends.parallel.links.rendezvous import Rendezvous
from twostroke.core.errors import BackendError, RanksLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.cpu.records import LinkRecord

_CONNECT_S: Final = 15.0


class LinkEngine(Protocol):
    """One rank's use of an engine such as UCX. Any thread may call `interrupt` and `progress`."""

    record: LinkRecord

    def open(self, host: str) -> bytes:
        """Begin; return what the other ranks need to reach this one, whose address is `host`."""

    def connect(self, parts: Sequence[bytes]) -> None:
        """Reach the other ranks, by what each of them returned from `open`."""

    def interrupt(self) -> None:
        """End the collective that waits, and let each later one fail."""

    def progress(self) -> int:
        """Return a number that changes when bytes move; odd inside a collective."""

    def leave(self) -> None:
        """Drop all connections without waiting for anybody."""

    def close(self) -> None:
        """Give everything back."""


class HostLink:
    """One rank's end; see `Link`. When a rank aborts or is gone, the waits of all ranks end."""

    files = ()

    def __init__(self, kind: str, rank: int, num_ranks: int, host: str, engine: LinkEngine) -> None:
        """Prepare; `host` is the address at which others reach rank 0, which alone needs it."""
        self.kind = kind
        self._rank, self._num_ranks, self._host = rank, num_ranks, host
        self._engine = engine
        self._meeting: Rendezvous | None = None
        self.record = engine.record

    def renew(self) -> str:
        """Return the text with which all ranks join; only on rank 0."""
        self._leave()
        self._meeting = Rendezvous(self._rank, self._num_ranks, self._engine.interrupt)
        return self._meeting.open(self._host)

    def join(self, link: str) -> None:
        """Meet the other ranks and connect to them.

        Raises:
            RanksLostError: some do not come, or cannot be reached.
        """
        if self._rank != 0:
            self._leave()
            self._meeting = Rendezvous(self._rank, self._num_ranks, self._engine.interrupt)
        assert self._meeting is not None
        own_host = self._meeting.enter(link)
        try:
            parts = self._meeting.exchange(self._engine.open(own_host))
            self._engine.connect(parts)
            if self._meeting.has_ended:  # since the exchange: connecting has undone the interrupt
                self._engine.interrupt()
        except RanksLostError:
            raise
        except (BackendError, RuntimeError) as error:  # an interface that is down may return
            raise RanksLostError(f"Rank {self._rank} cannot open the link. {error}") from None
        self._greet()

    def begin(self) -> None:
        """Do nothing: who has joined is connected."""

    def abort(self) -> None:
        """End all waits of all ranks."""
        self._engine.interrupt()
        if (meeting := self._meeting) is not None:  # another thread may leave it now
            meeting.end()

    def progress(self) -> int:
        """Return a number that changes when bytes move; odd inside a collective."""
        return self._engine.progress()

    def close(self) -> None:
        """Give everything back; no collective may run. Closing twice does no harm."""
        self._leave()
        self._engine.close()

    def _leave(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        self._engine.leave()

    def _greet(self) -> None:
        """Gather one byte of each rank: engines connect with the first message."""
        count, record = self._num_ranks, self.record
        own, everybody = (ctypes.c_uint8 * 1)(self._rank), (ctypes.c_uint8 * count)()
        team, sizes = (
            (ctypes.c_int32 * count)(*range(count)),
            (ctypes.c_int64 * count)(*[1] * count),
        )
        timer = threading.Timer(_CONNECT_S, self.abort)
        timer.daemon = True
        timer.start()
        try:
            failed = record.all_gather(record.context, team, count, own, everybody, sizes)
        finally:
            timer.cancel()
        if failed or list(everybody) != list(range(count)):
            reason = f"Rank {self._rank} cannot exchange messages with all others over the link."
            raise RanksLostError(reason)
