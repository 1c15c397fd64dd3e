"""`PoolAccess`: what threads that move pages do with an engine's pool and prefix cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    from twostroke.backends.interface import PageMemory
    from twostroke.core.request import Request
    from twostroke.engine.counters import TierTotals
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler import Scheduler
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Lease, Transfer


class PoolAccess:
    """Transfers into an engine's pages and leases of them; any thread may call its methods.

    A transfer goes through these steps. A function in `on_submit` calls `expect` for a request that
    was just queued, which claims its missing pages before it can start. `narrow` says which pages
    to bring. `take` gives some of them to fill through `memory`, `arrive` publishes those that are
    filled, and so on; each page that arrives is of use at once. `end` must follow, whatever
    happened. `give_up` lets requests compute what has not arrived, while a peer may still write.

    Attributes:
        scheduler: the loop's, for those who are called under its lock.
        memory: None if pages cannot be moved; then nothing else may be called.
        on_submit: called under the loop's lock with a request that waits, so they must be quick.
            One that begins a transfer returns true; what it leaves of the pages may be brought by
            those after it, once it calls `submitted`.
        on_end: called under the lock with each request that ends.
        count: returns the counts of tiers.
        flush: waits so many seconds until used pages are written to tiers; false if not all are.
        on_close: called before the pages are gone, to end all transfers; false if they cannot be.
        lock: the loop's. Who holds it sees no step begin or end.
    """

    def __init__(
        self, scheduler: Scheduler, memory: PageMemory | None, changed: threading.Condition
    ) -> None:
        """Use the loop's lock, `changed`; its loop is woken when a request may start."""
        self.memory = memory
        self.on_submit: list[Callable[[RequestState], bool]] = []
        self.on_end: list[Callable[[Request], None]] = []
        self.on_close: list[Callable[[], bool]] = []
        self.count: Callable[[], tuple[TierTotals, ...]] = tuple
        self.flush: Callable[[float], bool] = lambda _: True
        self.lock = self._changed = changed
        self.scheduler, self._transfers = scheduler, scheduler.prefix_cache.transfers

    @property
    def most_held(self) -> int:
        """How many pages all transfers and leases can hold together; 0 if nothing can be moved."""
        return self._transfers.max_held_pages if self.memory is not None else 0

    def totals(self) -> tuple[TierTotals, ...]:
        """Return the counts of tiers."""
        return self.count()

    def submitted(
        self, ticket: RequestState, after: Callable[[RequestState], bool] | None = None
    ) -> None:
        """Ask those who may bring pages of a request that waits, until one of them does."""
        first = 0 if after is None else self.on_submit.index(after) + 1
        for look in self.on_submit[first:]:
            if ticket.request.finish_reason is not None or look(ticket):
                return

    def ended(self, request: Request) -> None:
        """Tell those who may still bring pages of a request that it has ended."""
        for look in self.on_end:
            look(request)

    def close(self) -> bool:
        """End all transfers and leases; False if something may still use their pages."""
        have_ended = [end() for end in self.on_close]
        return all(have_ended)

    def expect(self, ticket: RequestState, within_s: float = math.inf) -> Transfer | None:
        """See `Transfers.begin`."""
        with self._changed:
            return self._transfers.begin(ticket, within_s)

    def narrow(self, transfer: Transfer, exists: Callable[[PageKey], bool]) -> list[PageKey]:
        """See `Transfers.narrow`."""
        with self._changed:
            wanted = self._transfers.select_missing(transfer, exists)
            self._changed.notify_all()
        return wanted

    def take(self, transfer: Transfer, wanted: Sequence[PageKey]) -> list[int]:
        """See `Transfers.take`; there may be no room now."""
        with self._changed:
            return self._transfers.allocate(transfer, wanted)

    def arrive(self, transfer: Transfer, arrived: Sequence[PageKey]) -> None:
        """See `Transfers.arrive`."""
        with self._changed:
            self._transfers.add_arrived(transfer, arrived)
            self._changed.notify_all()

    def give_up(self, transfer: Transfer) -> None:
        """See `Transfers.drop`."""
        with self._changed:
            self._transfers.drop(transfer)
            self._changed.notify_all()

    def end(self, transfer: Transfer) -> None:
        """See `Transfers.end`."""
        with self._changed:
            self._transfers.end(transfer)
            self._changed.notify_all()

    def touch(self, keys: list[bytes]) -> None:
        """See `Transfers.touch`."""
        with self._changed:
            self._transfers.touch(keys)

    def lease(self, wanted: Iterable[PageKey]) -> Lease:
        """See `Transfers.lease`."""
        with self._changed:
            return self._transfers.lease(wanted)

    def release(self, lease: Lease) -> None:
        """See `Transfers.release`."""
        with self._changed:
            self._transfers.release(lease)
            self._changed.notify_all()
