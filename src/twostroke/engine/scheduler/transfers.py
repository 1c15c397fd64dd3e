"""Pages that come from elsewhere, and pages that others read: what they hold of the pool."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.core.request import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twostroke.engine.kv_cache import PagePool, PrefixIndex
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler.request_state import RequestState


@dataclass(slots=True, eq=False)
class Transfer:
    """Missing pages of a request that waits, on their way here: `Transfers` explains.

    Attributes:
        before: the keys of the request's places before those that are missing.
        keys: of the missing places, in order. Requests wait for those that are still claimed.
        late_s: when the claims are dropped, on the scheduler's clock.
        wanted: the pages that have not arrived, once `narrow` has said which are needed.
        pages: those that it holds.
        is_dropped: whether nobody waits for it any more.
    """

    before: list[bytes]
    keys: list[bytes]
    late_s: float = math.inf
    wanted: set[PageKey] = field(default_factory=set)
    pages: dict[PageKey, int] = field(default_factory=dict)
    is_dropped: bool = False

    @property
    def first_place(self) -> int:
        """The place of the first key in the request."""
        return len(self.before)


@dataclass(slots=True, eq=False)
class Lease:
    """Pages that are read elsewhere: they keep their content until the lease is released."""

    pages: dict[PageKey, int]


class Transfers:
    """The transfers and leases of a pool; the scheduler's owner guards it.

    A transfer claims keys as a running request does, but is not in the order of ranks: every
    request that misses such a key waits, until its page arrives or the claim is dropped. A claim is
    dropped when the transfer fails or is late; the request then computes the page.

    Transfers and leases together hold at most `most_held` pages: those that the pool has beyond the
    longest request. So the best-ranked running request never lacks a page because of them.
    """

    def __init__(
        self,
        index: PrefixIndex | None,
        pool: PagePool,
        claims: dict[bytes, RequestState | Transfer],
    ) -> None:
        self._index, self._pool, self._claims = index, pool, claims
        self.most_held = self.num_held = 0
        self._claiming: list[Transfer] = []
        self._clock: Callable[[], float] = time.monotonic

    def limit(self, most_tokens: int, token_budget: int, clock: Callable[[], float]) -> None:
        """Leave the pages that one request of `most_tokens` needs."""
        needed = self._pool.groups.num_needed(most_tokens, token_budget)
        self.most_held, self._clock = max(0, self._pool.num_pages - needed), clock

    def begin(self, ticket: RequestState, within_s: float = math.inf) -> Transfer | None:
        """Claim what the index and the claims of others leave of a waiting request's pages.

        The claims end after `within_s` seconds at the latest. None if nothing is left.
        """
        request, chain = ticket.request, ticket.chain
        is_of_use = self._index is not None and not request.needs_all_rows and not ticket.is_running
        if chain is None or not is_of_use or not self.most_held:
            return None
        hit = self._known.match(chain, request.tokens, request.num_prompt)
        num_useful = self._known.num_reusable(len(request.tokens) - 1, request.num_prompt)
        first, last = hit.num_places, num_useful
        while first < last and chain.keys[first] in self._claims:
            first += 1
        keys = chain.keys[first:last]
        if not keys:
            return None
        self.touch(chain.keys[: hit.num_places])
        transfer = Transfer(chain.keys[:first], keys, self._clock() + within_s)
        for key in keys:
            self._claims.setdefault(key, transfer)
        self._claiming.append(transfer)
        return transfer

    def narrow(self, transfer: Transfer, exists: Callable[[PageKey], bool]) -> list[PageKey]:
        """Return which pages to bring, in the order of places; drop the claims on other places.

        They are those of the most places that a request can start after, given what `exists`
        elsewhere. The index may have some of them in groups with a window.
        """
        keys, first, index = transfer.keys, transfer.first_place, self._known
        num_places, firsts = index.reachable(keys, first, exists)
        transfer.wanted = {
            (group, key)
            for group, start in enumerate(firsts)
            for key in keys[max(0, start - first) : num_places]
            if not index.knows((group, key))
        }
        needed = {key for _, key in transfer.wanted}
        self._drop((key for key in keys if key not in needed), transfer)
        num_groups = len(firsts)
        every = [(group, key) for key in keys[:num_places] for group in range(num_groups)]
        return [one for one in every if one in transfer.wanted]

    def take(self, transfer: Transfer, wanted: Sequence[PageKey]) -> list[int]:
        """Return pages for the first of the `wanted` keys, for as many as there is room.

        Only the transfer may write to them, until it ends. They are in ascending order. Pages that
        have arrived are let go if that makes room: requests find them as long as they are not
        evicted.
        """
        if len(wanted) > self.most_held - self.num_held:
            self._let_go(transfer, [key for key in transfer.pages if key not in transfer.wanted])
        count = min(len(wanted), self.most_held - self.num_held, self._pool.num_available)
        pages = sorted(self._pool.allocate(max(0, count)))
        transfer.pages.update(zip(wanted, pages, strict=False))
        self.num_held += len(pages)
        return pages

    def arrive(self, transfer: Transfer, arrived: Sequence[PageKey]) -> None:
        """Index pages that were taken and are written now, and drop the claims on whole places."""
        for group, key in arrived:
            self._known.insert(group, [key], [transfer.pages[group, key]])
        transfer.wanted.difference_update(arrived)
        missing = {key for _, key in transfer.wanted}
        self._drop([key for _, key in arrived if key not in missing], transfer)

    def drop(self, transfer: Transfer) -> None:
        """Let requests compute what has not arrived; the transfer still holds its pages."""
        self._drop(transfer.keys, transfer)
        transfer.is_dropped = True
        if transfer in self._claiming:
            self._claiming.remove(transfer)

    def is_late(self, transfer: Transfer) -> bool:
        """Whether a transfer's time is over; its claims are then dropped."""
        if transfer.late_s > self._clock():
            return False
        self.drop(transfer)
        return True

    def until(self, late_s: float) -> float | None:
        """Return the seconds until a transfer is late; None if it never is."""
        return None if late_s == math.inf else max(0.0, late_s - self._clock())

    def end(self, transfer: Transfer) -> None:
        """Take back all pages of a transfer, to which nobody writes any more, and its claims."""
        self.drop(transfer)
        if transfer.pages:
            self._let_go(transfer, list(transfer.pages))
            self.touch([*transfer.before, *transfer.keys])

    def lease(self, wanted: Iterable[PageKey]) -> Lease:
        """Keep those of the `wanted` pages that the index has, as far as there is room."""
        lease = Lease({})
        for key in wanted:
            page = self._known.find(key)
            if page != NO_PAGE and self.num_held < self.most_held:
                self._pool.share([page])
                lease.pages[key] = page
                self.num_held += 1
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease; nobody reads its pages any more."""
        pages, lease.pages = list(lease.pages.values()), {}
        self.num_held -= len(pages)
        self._pool.release(pages)

    def touch(self, keys: list[bytes]) -> None:
        """Make the known first pages of a sequence the last to be evicted, the first one last."""
        places = zip(*self._known.hit(keys).pages, strict=True)
        pages = [page for place in places for page in place if page != NO_PAGE]
        self._pool.share(pages)
        self._pool.release(pages)

    @property
    def _known(self) -> PrefixIndex:
        assert self._index is not None, "without a prefix cache nothing is brought"
        return self._index

    def _let_go(self, transfer: Transfer, keys: Sequence[PageKey]) -> None:
        pages = [transfer.pages.pop(key) for key in keys]
        self.num_held -= len(pages)
        self._pool.release(pages)

    def _drop(self, keys: Iterable[bytes], transfer: Transfer) -> None:
        for key in keys:
            if self._claims.get(key) is transfer:
                del self._claims[key]
