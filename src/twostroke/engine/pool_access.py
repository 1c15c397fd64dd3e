"""`PoolAccess`: how threads that transfer KV pages use an engine's page pool and prefix cache."""

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
    """Lets threads copy KV pages into and out of an engine's page pool.

    KV offload and disaggregation use it. Any thread may call the methods.

    A transfer into the pool has these steps:

    1. A function in `on_submit` calls `begin` for a request that was just queued. This reserves
       the transfer of its missing pages before the request can start.
    2. `select_missing` returns the keys of the pages to fetch.
    3. `allocate` allocates pages for some keys. Their data is written through `memory`.
    4. `add_arrived` publishes written pages, so that requests can use them. Steps 3 and 4 repeat.
    5. In models with recurrent layers, `allocate_state` allocates a slot for the snapshot that the
       transfer brings, its data is written through `state_memory`, and `add_state` publishes it.
    6. `end` ends the transfer, also after an error.

    `drop` lets requests compute the missing pages, although another engine may still write to the
    transfer's pages. To read pages from the pool, hold a `lease` on them.

    Attributes:
        scheduler: the engine loop's scheduler, for callers that hold the lock.
        memory: the memory of the pages; None if pages cannot be transferred. No method may be
            called then.
        state_memory: the memory of the slots for recurrent states; None without such states.
        on_submit: functions that are called under the lock with each waiting request. They must
            return quickly. A function that starts a transfer returns True, and the functions after
            it are not called. It calls `on_request_queued` later, so that those functions can start
            transfers of pages that are still missing.
        on_end: functions that are called under the lock with each request that ends.
        count: returns the counts of the KV offload tiers.
        flush: waits up to a number of seconds until used pages are written to the tiers; returns
            False if some pages are not written by then.
        on_close: functions that are called before the pages are freed, and end all transfers. They
            return False if a transfer cannot be ended.
        lock: the engine loop's lock. No step begins or ends while a thread holds it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: PageMemory | None,
        changed: threading.Condition,
        state_memory: PageMemory | None = None,
    ) -> None:
        """Give threads access to the scheduler's page pool, and to the pages' bytes in `memory`.

        `changed` is the loop's lock; it is notified when a request may start. `state_memory` has
        the bytes of the slots for recurrent states.
        """
        self.memory = memory
        self.state_memory = state_memory
        self.on_submit: list[Callable[[RequestState], bool]] = []
        self.on_end: list[Callable[[Request], None]] = []
        self.on_close: list[Callable[[], bool]] = []
        self.count: Callable[[], tuple[TierTotals, ...]] = tuple
        self.flush: Callable[[float], bool] = lambda _: True
        self.lock = changed
        self._changed = changed
        self.scheduler = scheduler
        self._transfers = scheduler.prefix_cache.transfers

    @property
    def max_held_pages(self) -> int:
        """The maximum number of KV pages that transfers and leases hold together.

        It is 0 if pages cannot be transferred.
        """
        return self._transfers.max_held_pages if self.memory is not None else 0

    def totals(self) -> tuple[TierTotals, ...]:
        """Return the counts of the KV offload tiers, an entry for each tier."""
        return self.count()

    def on_request_queued(
        self, state: RequestState, after: Callable[[RequestState], bool] | None = None
    ) -> None:
        """Call the functions in `on_submit` for a queued request until one starts a KV transfer.

        With `after`, only the functions that follow `after` in `on_submit` are called.
        """
        first = 0 if after is None else self.on_submit.index(after) + 1
        for start_transfer in self.on_submit[first:]:
            if state.request.finish_reason is not None or start_transfer(state):
                return

    def on_request_end(self, request: Request) -> None:
        """Call the functions in `on_end`, which stop KV transfers, for an ended request."""
        for end_transfer in self.on_end:
            end_transfer(request)

    def close(self) -> bool:
        """End all transfers and leases of KV pages.

        Returns False if another engine or a tier may still access the pages.
        """
        have_ended = [end_all() for end_all in self.on_close]
        return all(have_ended)

    def begin(self, state: RequestState, within_s: float = math.inf) -> Transfer | None:
        """Begin a KV transfer for a queued request; see `Transfers.begin`.

        The transfer copies pages into this engine's pool from a KV offload tier or another engine.
        It claims the pages that the request lacks: requests that need them wait until they arrive,
        or until the claims expire after `within_s` seconds. Returns None if no page is missing, or
        if the request cannot use transferred pages.
        """
        with self._changed:
            return self._transfers.begin(state, within_s)

    def select_missing(
        self,
        transfer: Transfer,
        exists: Callable[[PageKey], bool],
        has_state: Callable[[bytes], bool] = lambda _: False,
    ) -> list[PageKey]:
        """Return the keys of the KV pages to fetch; see `Transfers.select_missing`.

        `exists` says whether the source has a page, and `has_state` whether it has the snapshot
        after the page with a key. Claims on other pages are dropped. The keys are in the order of
        the sequence; empty if nothing is worth fetching.
        """
        with self._changed:
            keys = self._transfers.select_missing(transfer, exists, has_state)
            self._changed.notify_all()
        return keys

    def allocate(self, transfer: Transfer, keys: Sequence[PageKey]) -> list[int]:
        """Allocate KV pages of the pool for the first of `keys`; see `Transfers.allocate`.

        Returns the page indices, fewer than `keys` if room is short. The caller then writes the
        pages' data through `memory`.
        """
        with self._changed:
            return self._transfers.allocate(transfer, keys)

    def add_arrived(self, transfer: Transfer, keys: Sequence[PageKey]) -> None:
        """Publish KV pages that a transfer has written; see `Transfers.add_arrived`.

        Requests find the pages with these `keys` from now on, and the transfer's claims on them
        end.
        """
        with self._changed:
            self._transfers.add_arrived(transfer, keys)
            self._changed.notify_all()

    def allocate_state(self, transfer: Transfer) -> int:
        """Allocate a slot for a transfer's snapshot; `NO_STATE` if there is no room."""
        with self._changed:
            return self._transfers.allocate_state(transfer)

    def add_state(self, transfer: Transfer) -> None:
        """Publish the snapshot that a transfer has written; see `Transfers.add_state`."""
        with self._changed:
            self._transfers.add_state(transfer)
            self._changed.notify_all()

    def drop(self, transfer: Transfer) -> None:
        """Let requests compute the KV pages that a transfer lacks; see `Transfers.drop`.

        The transfer keeps its pages until `end`, since its source may still write to them.
        """
        with self._changed:
            self._transfers.drop(transfer)
            self._changed.notify_all()

    def end(self, transfer: Transfer) -> None:
        """End a KV transfer and release its pages; see `Transfers.end`."""
        with self._changed:
            self._transfers.end(transfer)
            self._changed.notify_all()

    def touch(self, keys: list[bytes]) -> None:
        """Mark a sequence's cached KV pages, given by their keys, as used now.

        They are then evicted later, the first page of the sequence last.
        """
        with self._changed:
            self._transfers.touch(keys)

    def lease(self, keys: Iterable[PageKey]) -> Lease:
        """Keep cached KV pages from eviction while they are read; see `Transfers.lease`.

        Keys of pages that are not cached, or for which there is no room, are left out of the lease.
        """
        with self._changed:
            return self._transfers.lease(keys)

    def lease_state(self, key: bytes) -> Lease | None:
        """Keep a snapshot from eviction while it is read; see `Transfers.lease_state`.

        `key` is the key of the last page before the snapshot. Returns None if there is no such
        snapshot, or no room.
        """
        with self._changed:
            return self._transfers.lease_state(key)

    def num_pages_before(self, keys: Sequence[bytes], num_pages: int) -> int:
        """Return the length in pages of a sequence's longest snapshot; see `Transfers`.

        `keys` are the page keys of the sequence. Only snapshots shorter than `num_pages` pages
        count. The caller holds the lock.
        """
        return self._transfers.num_pages_before(keys, num_pages)

    def release(self, lease: Lease) -> None:
        """End a lease on cached KV pages or on a snapshot; see `Transfers.release`."""
        with self._changed:
            self._transfers.release(lease)
            self._changed.notify_all()
