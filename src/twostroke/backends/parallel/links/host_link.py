"""`HostLink`: connects ranks on several hosts, over an engine such as UCX that moves bytes."""

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
    """One rank's connections to ranks on other hosts, by a library such as UCX or Gloo.

    Any thread may call `interrupt` and `progress`.
    """

    record: LinkRecord

    def open(self, host: str) -> bytes:
        """Open this rank's end of the link, at address `host`.

        Returns the bytes that `connect` needs on the other ranks to reach this rank.
        """

    def connect(self, parts: Sequence[bytes]) -> None:
        """Connect to the other ranks; `parts`: the bytes that `open` returned on each rank."""

    def interrupt(self) -> None:
        """End a rank's wait in a collective, and make all later collectives fail."""

    def progress(self) -> int:
        """Return a counter that changes when the engine moves bytes; odd inside a collective."""

    def leave(self) -> None:
        """Close the connections to all ranks, without waiting for the ranks."""

    def close(self) -> None:
        """Free the link engine's memory."""


class HostLink:
    """One rank's end of a link between hosts; see `Link` for its use.

    If a rank aborts the link or is lost, all waits in collectives end on all ranks.
    """

    files = ()

    def __init__(self, kind: str, rank: int, num_ranks: int, host: str, engine: LinkEngine) -> None:
        """Prepare one rank's end of the link; `join` connects it.

        `host`: the address at which other hosts reach rank 0; only used on rank 0.
        """
        self.kind = kind
        self._rank, self._num_ranks, self._host = rank, num_ranks, host
        self._engine = engine
        self._rendezvous: Rendezvous | None = None
        self.record = engine.record

    def renew(self) -> str:
        """Start a new rendezvous on rank 0, and return the text by which all ranks join it."""
        self._leave()
        self._rendezvous = Rendezvous(self._rank, self._num_ranks, self._engine.interrupt)
        return self._rendezvous.open(self._host)

    def join(self, link: str) -> None:
        """Exchange addresses with the other ranks, and connect to them.

        `link`: the text that `renew` returned on rank 0.

        Raises:
            RanksLostError: some ranks do not arrive in time, or cannot be reached.
        """
        if self._rank != 0:
            self._leave()
            self._rendezvous = Rendezvous(self._rank, self._num_ranks, self._engine.interrupt)
        assert self._rendezvous is not None
        own_host = self._rendezvous.enter(link)
        try:
            parts = self._rendezvous.exchange(self._engine.open(own_host))
            self._engine.connect(parts)
            if self._rendezvous.has_ended:  # after the exchange; `connect` undoes an interrupt
                self._engine.interrupt()
        except RanksLostError:
            raise
        except (
            BackendError,
            RuntimeError,
        ) as error:  # may be temporary, such as a network interface that is down
            raise RanksLostError(f"Rank {self._rank} cannot open the link. {error}") from None
        self._gather_rank_numbers()

    def begin(self) -> None:
        """Do nothing, because `join` has already allowed collectives."""

    def abort(self) -> None:
        """End all waits of all ranks in collectives over the link."""
        self._engine.interrupt()
        if (rendezvous := self._rendezvous) is not None:  # another thread may set it to None
            rendezvous.end()

    def progress(self) -> int:
        """Return a counter that changes when the link moves bytes; odd inside a collective."""
        return self._engine.progress()

    def close(self) -> None:
        """Free the link's connections and memory, while no collective runs; may be called twice."""
        self._leave()
        self._engine.close()

    def _leave(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
        self._engine.leave()

    def _gather_rank_numbers(self) -> None:
        """Exchange a byte between all ranks to test the link, and to make engines connect.

        Engines such as UCX connect with the first message.
        """
        count, record = self._num_ranks, self.record
        own_number, numbers = (ctypes.c_uint8 * 1)(self._rank), (ctypes.c_uint8 * count)()
        team = (ctypes.c_int32 * count)(*range(count))
        sizes = (ctypes.c_int64 * count)()
        sizes[:] = [1] * count
        timer = threading.Timer(_CONNECT_S, self.abort)
        timer.daemon = True
        timer.start()
        try:
            failed = record.all_gather(record.context, team, count, own_number, numbers, sizes)
        finally:
            timer.cancel()
        if failed or list(numbers) != list(range(count)):
            reason = f"Rank {self._rank} cannot exchange messages with all others over the link."
            raise RanksLostError(reason)
