"""Transfers of KV cache pages into the pool, and leases on pages while other readers use them.

Pages arrive from a KV offload tier or from a prefill engine. Leases protect pages while decode
engines fetch them and while they are written to tiers.

In models with recurrent layers, a transfer also brings a snapshot: the recurrent state after the
last page that it brings. Without the snapshot the pages cannot be used.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.core.request import NO_PAGE, NO_STATE
from twostroke.engine.scheduler.recurrent_states import hit_with_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twostroke.engine.kv_cache import PagePool, PrefixIndex, StatePool
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler.request_state import RequestState


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer of KV pages that a waiting request lacks, from an offload tier or another engine.

    `Transfers` describes how transfers work.

    Attributes:
        previous_keys: keys of the request's pages before the missing ones.
        keys: keys of the missing pages, in order. Requests wait for the pages that are still
            claimed.
        expires_at_s: time at which the claims are dropped, on the scheduler's clock.
        missing: pages that have not arrived yet, after `select_missing` has chosen them.
        pages: the pages of the pool that the transfer holds, by key.
        num_pages: how many of the request's first pages will be cached after the transfer; None
            until `select_missing` has chosen the pages.
        missing_state: page key of the snapshot that has not arrived yet; None without one.
        state_slot: the slot for the snapshot that the transfer holds, or `NO_STATE`.
        is_dropped: whether its claims are gone, so that no request waits for it any more.
    """

    previous_keys: list[bytes]
    keys: list[bytes]
    expires_at_s: float = math.inf
    missing: set[PageKey] = field(default_factory=set)
    pages: dict[PageKey, int] = field(default_factory=dict)
    num_pages: int | None = None
    missing_state: bytes | None = None
    state_slot: int = NO_STATE
    is_dropped: bool = False

    @property
    def first_page(self) -> int:
        """The index of the transfer's first KV page in the waiting request's page lists."""
        return len(self.previous_keys)

    @property
    def is_complete(self) -> bool:
        """Whether all pages and the snapshot that `select_missing` has chosen have arrived."""
        return not self.missing and self.missing_state is None

    def may_reach(self, keys: Sequence[bytes]) -> bool:
        """Whether a request with the page keys `keys` can use the snapshot at the transfer's end.

        True also before `select_missing`, when the end is not known yet.
        """
        end = self.num_pages
        if end is None:
            return True
        last = self.keys[end - 1 - self.first_page : end - self.first_page]
        return end <= len(keys) and [*keys[end - 1 : end]] == last


@dataclass(slots=True, eq=False)
class Lease:
    """A lease on cached KV pages, or on a snapshot, while another thread or engine reads them.

    They are not evicted, and keep their content, until the lease is released. `state_slot` is the
    slot of the snapshot, or `NO_STATE`.
    """

    pages: dict[PageKey, int]
    state_slot: int = NO_STATE


class Transfers:
    """KV transfers into a page pool and leases on its pages, guarded by the engine loop's lock.

    A transfer claims page keys as a running request does, but has no priority key: every request
    that misses such a page waits until the page arrives or the claim is dropped. A claim is dropped
    when the transfer fails or expires; the request then computes the page.

    Transfers and leases together hold at most `max_held_pages` pages: the pages that the longest
    request does not need. So the most urgent running request always has enough pages. They hold at
    most `max_held_states` slots for recurrent states, which running requests never need.
    """

    def __init__(
        self,
        index: PrefixIndex | None,
        pool: PagePool,
        claims: dict[bytes, RequestState | Transfer],
        states: StatePool | None = None,
    ) -> None:
        self._prefix_index = index
        self._pool = pool
        self._states = states
        self._claims = claims
        self.max_held_pages = 0
        self.num_held_pages = 0
        self.max_held_states = 0
        self.num_held_states = 0
        self._claiming: list[Transfer] = []
        self._clock: Callable[[], float] = time.monotonic

    def limit(
        self,
        max_tokens: int,
        token_budget: int,
        clock: Callable[[], float],
        num_running_slots: int = 0,
    ) -> None:
        """Limit the pages of transfers and leases so that the longest request always fits.

        The longest request has `max_tokens` tokens, and steps have at most `token_budget`. `clock`
        returns seconds, for expiries. Running requests take at most `num_running_slots` slots for
        recurrent states.
        """
        if self._states is not None:
            self.max_held_states = max(0, self._states.num_slots - num_running_slots)
        num_needed = self._pool.groups.num_needed(max_tokens, token_budget)
        self.max_held_pages = max(0, self._pool.num_pages - num_needed)
        self._clock = clock

    def begin(self, state: RequestState, within_s: float = math.inf) -> Transfer | None:
        """Claim the KV pages of a waiting request that are neither cached nor claimed already.

        The claims expire after `within_s` seconds. Returns None if there are no such pages, and if
        the request cannot use them: it already runs, must compute all rows of its prompt, or there
        is no prefix cache or no room for transfers.
        """
        request, chain = state.request, state.chain
        can_use = self._prefix_index is not None and not request.needs_all_rows
        has_room = self.max_held_pages > 0 and (self._states is None or self.max_held_states > 0)
        if chain is None or not can_use or state.is_running or not has_room:
            return None
        hit = self._index.match(chain, request.tokens, request.num_prompt)
        num_cached = first = hit.num_pages
        if self._states is not None:
            first = hit_with_snapshot(self._index, self._states, chain.keys, hit).num_pages
        end = self._index.num_reusable(len(request.tokens) - 1, request.num_prompt)
        while first < end and chain.keys[first] in self._claims:
            first += 1
        keys = chain.keys[first:end]
        if not keys:
            return None
        self.touch(chain.keys[:num_cached])
        transfer = Transfer(chain.keys[:first], keys, self._clock() + within_s)
        for key in keys:
            self._claims.setdefault(key, transfer)
        self._claiming.append(transfer)
        return transfer

    def select_missing(
        self,
        transfer: Transfer,
        exists: Callable[[PageKey], bool],
        has_state: Callable[[bytes], bool] = lambda _: False,
    ) -> list[PageKey]:
        """Choose the KV pages that a transfer fetches, and drop its claims on other pages.

        Returns the keys of the chosen pages, in order. `exists` says whether the source of the
        transfer has a page. The chosen pages extend the request's cached prefix to the first page
        that the source lacks. Pages that are cached already, and pages before a sliding window, are
        not fetched. In models with recurrent layers, the prefix ends at the last page after which a
        snapshot is cached, or after which the source has a snapshot (`has_state`): the transfer
        then fetches the snapshot, too.
        """
        keys, first, index = transfer.keys, transfer.first_page, self._index
        num_pages, first_read = index.reachable(keys, first, exists)
        while self._states is not None and num_pages:
            key = keys[num_pages - 1]
            is_cached = self._states.find(key) != NO_STATE
            if is_cached or has_state(key):
                reachable, first_read = index.reachable(keys[:num_pages], first, exists)
                if reachable == num_pages:
                    transfer.missing_state = None if is_cached else key
                    break
            num_pages -= 1
        transfer.num_pages = first + num_pages
        transfer.missing = {
            (group, key)
            for group, start in enumerate(first_read)
            for key in keys[max(0, start - first) : num_pages]
            if not index.contains((group, key))
        }
        needed = {key for _, key in transfer.missing} | {transfer.missing_state}
        self._drop_claims((key for key in keys if key not in needed), transfer)
        num_groups = len(first_read)
        candidates = [(group, key) for key in keys[:num_pages] for group in range(num_groups)]
        return [page_key for page_key in candidates if page_key in transfer.missing]

    def allocate(self, transfer: Transfer, page_keys: Sequence[PageKey]) -> list[int]:
        """Allocate KV pages of the pool for the first of the `page_keys`, until there is no room.

        Returns the page indices, sorted. Only the transfer may write to them until it ends. If room
        is short, the transfer first releases pages that have arrived: requests find them through
        the index unless they are evicted.
        """
        if len(page_keys) > self.max_held_pages - self.num_held_pages:
            arrived = [key for key in transfer.pages if key not in transfer.missing]
            self._release_pages(transfer, arrived)
        room = min(self.max_held_pages - self.num_held_pages, self._pool.num_available)
        pages = sorted(self._pool.allocate(max(0, min(len(page_keys), room))))
        transfer.pages.update(zip(page_keys, pages, strict=False))
        self.num_held_pages += len(pages)
        return pages

    def add_arrived(self, transfer: Transfer, arrived: Sequence[PageKey]) -> None:
        """Index KV pages that a transfer has written, so that requests find them.

        `arrived` has the keys of these pages. The transfer's claims on these pages end.
        """
        for group, key in arrived:
            self._index.insert(group, [key], [transfer.pages[group, key]])
        transfer.missing.difference_update(arrived)
        missing = {key for _, key in transfer.missing} | {transfer.missing_state}
        self._drop_claims([key for _, key in arrived if key not in missing], transfer)

    def allocate_state(self, transfer: Transfer) -> int:
        """Allocate a slot for the snapshot that a transfer brings; `NO_STATE` if there is no room.

        Only the transfer may write to the slot until it ends.
        """
        assert self._states is not None
        if self._states.num_extra >= self.max_held_states or not self._states.num_available:
            return NO_STATE
        transfer.state_slot = self._states.allocate()
        self._count_held_state(1)
        return transfer.state_slot

    def add_state(self, transfer: Transfer) -> None:
        """Keep the snapshot that a transfer has written, so that requests find it."""
        key, num_pages = transfer.missing_state, transfer.num_pages
        assert self._states is not None
        assert key is not None
        assert num_pages is not None
        keys = [*transfer.previous_keys, *transfer.keys]
        self._states.keep(
            transfer.state_slot,
            key,
            num_pages * self._pool.page_size,
            self._states.longest_before(keys, num_pages),
        )
        transfer.missing_state = None
        if key not in {missing_key for _, missing_key in transfer.missing}:
            self._drop_claims([key], transfer)

    def drop(self, transfer: Transfer) -> None:
        """Drop a transfer's claims, so that requests compute the KV pages that have not arrived.

        The transfer keeps its pages until `end`, because the source may still write to them.
        """
        self._drop_claims(transfer.keys, transfer)
        transfer.is_dropped = True
        if transfer in self._claiming:
            self._claiming.remove(transfer)

    def has_expired(self, transfer: Transfer) -> bool:
        """Whether a KV transfer's time is over; if so, drop its claims on pages."""
        if transfer.expires_at_s > self._clock():
            return False
        self.drop(transfer)
        return True

    def seconds_until(self, expires_at_s: float) -> float | None:
        """Return the seconds until a KV transfer expires at `expires_at_s`; None for never."""
        return None if expires_at_s == math.inf else max(0.0, expires_at_s - self._clock())

    def end(self, transfer: Transfer) -> None:
        """Release all KV pages of a transfer that has stopped writing, and drop its claims."""
        self.drop(transfer)
        if transfer.state_slot != NO_STATE:
            self._release_state(transfer.state_slot)
            transfer.state_slot = NO_STATE
        if transfer.pages:
            self._release_pages(transfer, list(transfer.pages))
            self.touch([*transfer.previous_keys, *transfer.keys])

    def lease(self, page_keys: Iterable[PageKey]) -> Lease:
        """Return a lease on cached KV pages, so that they can be read without being evicted.

        Keys of pages that are not cached are ignored. No page is added once transfers and leases
        hold `max_held_pages`.
        """
        lease = Lease({})
        for key in page_keys:
            page = self._index.find(key)
            if page != NO_PAGE and self.num_held_pages < self.max_held_pages:
                self._pool.share([page])
                lease.pages[key] = page
                self.num_held_pages += 1
        return lease

    def lease_state(self, key: bytes) -> Lease | None:
        """Return a lease on the snapshot with this page key; None without one, or without room."""
        slot = NO_STATE if self._states is None else self._states.find(key)
        if slot == NO_STATE:
            return None
        assert self._states is not None
        if self._states.num_extra >= self.max_held_states:
            return None
        self._states.share(slot)
        self._count_held_state(1)
        return Lease({}, slot)

    def num_pages_before(self, keys: Sequence[bytes], num_pages: int) -> int:
        """Return the length in pages of the longest cached snapshot before page `num_pages`.

        `keys` are the page keys of the sequence. The result is less than `num_pages`, and 0 if
        there is no such snapshot.
        """
        return 0 if self._states is None else self._states.longest(keys, num_pages - 1)[0]

    def release(self, lease: Lease) -> None:
        """End a lease on KV pages or on a snapshot, after the last read."""
        if lease.state_slot != NO_STATE:
            self._release_state(lease.state_slot)
            lease.state_slot = NO_STATE
        pages = list(lease.pages.values())
        lease.pages = {}
        self.num_held_pages -= len(pages)
        self._pool.release(pages)

    def touch(self, keys: list[bytes]) -> None:
        """Mark a sequence's cached KV pages as used now, so that they are evicted later.

        The sequence's first page is evicted last.
        """
        columns = zip(*self._index.hit(keys).pages, strict=True)
        pages = [page for column in columns for page in column if page != NO_PAGE]
        self._pool.share(pages)
        self._pool.release(pages)

    @property
    def _index(self) -> PrefixIndex:
        assert self._prefix_index is not None, "transfers and leases need a prefix cache"
        return self._prefix_index

    def _release_state(self, slot: int) -> None:
        assert self._states is not None
        self._count_held_state(-1)
        self._states.release(slot)

    def _count_held_state(self, change: int) -> None:
        assert self._states is not None
        self.num_held_states += change
        self._states.num_extra += change

    def _release_pages(self, transfer: Transfer, keys: Sequence[PageKey]) -> None:
        pages = [transfer.pages.pop(key) for key in keys]
        self.num_held_pages -= len(pages)
        self._pool.release(pages)

    def _drop_claims(self, keys: Iterable[bytes], transfer: Transfer) -> None:
        for key in keys:
            if self._claims.get(key) is transfer:
                del self._claims[key]
