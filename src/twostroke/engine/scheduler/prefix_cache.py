"""Finds, awaits and publishes pages of the prefix cache for the scheduler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from twostroke.core.request import NO_PAGE
from twostroke.engine.kv_cache import PrefixHit
from twostroke.engine.scheduler.kv_cache_manager import held
from twostroke.engine.scheduler.transfers import Transfer, Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.kv_cache import PagePool, PrefixChain, PrefixIndex
    from twostroke.engine.scheduler.queue import WaitingQueue
    from twostroke.engine.scheduler.request_state import RequestState


class PageWatcher(Protocol):
    """Learns which pages are used; it must be quick, because steps wait for it."""

    def found(self, ticket: RequestState, num_places: int) -> None:
        """Take in that a request starts after pages that were there."""

    def computed(self, ticket: RequestState, first: int, last: int) -> None:
        """Take in that a request has computed the pages of these places."""


class PrefixCache:
    """The prefix index, and the missing pages that running requests are about to compute.

    A request whose next missing page is claimed by a running request of better rank waits for it
    instead of computing it twice. That cannot deadlock: a claim ends with its owner, and running
    requests make progress in order of rank. A claim can also belong to a transfer, which brings
    the page from elsewhere. Without an index there is no prefix cache.
    """

    def __init__(self, index: PrefixIndex | None, pool: PagePool) -> None:
        self._index = index
        self._pool, self._page_size = pool, pool.page_size
        self._num_groups = len(pool.groups.windows)
        self._claims: dict[bytes, RequestState | Transfer] = {}
        self.transfers = Transfers(index, pool, self._claims)
        self.watcher: PageWatcher | None = None

    def chain(self, salt: bytes) -> PrefixChain | None:
        """Start the keys of a request."""
        return self._index.chain(salt) if self._index is not None else None

    def match(self, ticket: RequestState) -> PrefixHit | None:
        """Return the known pages of a waiting request, or None if it should wait for more.

        A request that reports on its prompt's rows computes all of them.
        """
        if self._index is None or ticket.chain is None or ticket.request.needs_all_rows:
            return PrefixHit([[] for _ in range(self._num_groups)])
        if self._is_claimed(ticket, ticket.awaited):
            return None
        request = ticket.request
        hit = self._index.match(ticket.chain, request.tokens, request.num_prompt)
        num_useful = self._index.num_reusable(len(request.tokens) - 1, request.num_prompt)
        ticket.awaited = self._awaited(ticket.chain.keys[:num_useful], hit)
        return None if self._is_claimed(ticket, ticket.awaited) else hit

    def wait_s(self, waiting: WaitingQueue) -> float | None:
        """Seconds until a waiting request may start if none runs and only time changes.

        A request that is ready then waits for a transfer, whose end is another change.
        """
        ready = waiting.ready
        owners = [self._claims.get(ticket.awaited or b"") for ticket in ready]
        late_s = [owner.late_s for owner in owners if isinstance(owner, Transfer)]
        if not ready or len(late_s) < len(ready):
            return waiting.wait_s
        return self.transfers.until(min(late_s))

    def num_hit(self, request: Request, chain: PrefixChain) -> int:
        """Return how many tokens of a new request the index knows, and extend its `chain`."""
        if self._index is None:
            return 0
        hit = self._index.match(chain, request.tokens, request.num_prompt)
        return hit.num_places * self._page_size

    def receive(self, request: Request, chain: PrefixChain) -> bool:
        """Index pages for what another engine computed of a request that is about to be added.

        The request finds them when it starts; its last page, if it is not full, is computed again.
        False if there is no room. The caller fills the pages. Extends the request's `chain`.
        """
        if self._index is None:
            return False
        hit = self._index.match(chain, request.tokens, request.num_prompt)
        keys = chain.keys[hit.num_places :]
        self._pool.share(held(hit.pages))
        fits = len(keys) * self._num_groups <= self._pool.num_available
        for group, pages in enumerate(hit.pages):
            added = self._pool.allocate(len(keys)) if fits else []
            if fits:
                self._index.insert(group, keys, added)
            self._pool.release([*(page for page in pages if page != NO_PAGE), *added])
        return fits

    def start(self, ticket: RequestState) -> None:
        """Claim the pages that a request will compute after those that `match` found."""
        if ticket.chain is None:
            ticket.publish_at = sys.maxsize
            return
        ticket.num_published = len(ticket.request.pages[0])
        ticket.publish_at = (ticket.num_published + 1) * self._page_size
        if self.watcher is not None and ticket.num_published:
            self.watcher.found(ticket, ticket.num_published)
        for key in ticket.chain.keys[ticket.num_published :]:
            self._claims.setdefault(key, ticket)

    def publish(self, ticket: RequestState) -> None:
        """Index the pages of a request that have become full."""
        if self._index is None or ticket.chain is None:
            return
        request = ticket.request
        num_full = self._index.num_reusable(request.num_settled, request.num_prompt)
        ticket.chain.extend(request.tokens, num_full)
        first = ticket.num_published
        keys = ticket.chain.keys[first:num_full]
        for group, pages in enumerate(request.pages):
            self._index.insert(group, keys, pages[first:num_full])
        self._drop_claims(keys, ticket)
        if self.watcher is not None and keys:
            self.watcher.computed(ticket, first, num_full)
        ticket.num_published = num_full
        ticket.publish_at = (request.num_settled // self._page_size + 1) * self._page_size

    def stop(self, ticket: RequestState) -> None:
        """Drop the claims of a request that stops running."""
        if ticket.chain is not None:
            self._drop_claims(ticket.chain.keys[ticket.num_published :], ticket)

    def _awaited(self, keys: Sequence[bytes], hit: PrefixHit) -> bytes | None:
        """Return the key of the next missing page, or of a later one that a transfer brings.

        A transfer does not bring pages that a window hides; without those after them, the request
        could start after none of them.
        """
        missing = keys[hit.num_places :]
        if self._pool.groups.has_windows:
            sees_all = None in self._pool.groups.windows
            last = hit.num_known + 1 if sees_all else len(keys)
            for key in keys[hit.num_places : last]:
                if isinstance(self._claims.get(key), Transfer):
                    return key
        return missing[0] if missing else None

    def _is_claimed(self, ticket: RequestState, key: bytes | None) -> bool:
        owner = self._claims.get(key) if key is not None else None
        if isinstance(owner, Transfer):
            return not self.transfers.is_late(owner)
        return owner is not None and owner.rank < ticket.rank

    def _drop_claims(self, keys: Sequence[bytes], ticket: RequestState) -> None:
        for key in keys:
            if self._claims.get(key) is ticket:
                del self._claims[key]
