"""The pages of running requests: allocation, prefix caching, and release after steps in flight."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Protocol

from twostroke.core.request import NO_PAGE
from twostroke.engine.kv_cache import PrefixHit
from twostroke.engine.scheduler.transfers import Transfer, Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.engine.kv_cache import PagePool, PrefixChain, PrefixIndex
    from twostroke.engine.scheduler.queue import WaitingQueue
    from twostroke.engine.scheduler.request_state import RequestState


class KvCacheManager:
    """Keeps each request's lists of pages equally long, and empty where no window reaches."""

    def __init__(self, pool: PagePool, token_budget: int) -> None:
        self._pool = pool
        self._groups = pool.groups
        self._num_groups = len(pool.groups.windows)
        self._token_budget = token_budget

    @property
    def can_grow(self) -> bool:
        """Whether every list of a request could get another page."""
        return self._pool.num_available >= self._num_groups

    def grow(self, request: Request, num_places: int) -> int:
        """Append up to `num_places` new pages to each list; return how many."""
        num_places = min(num_places, self._pool.num_available // self._num_groups)
        for pages in request.pages:
            pages.extend(self._pool.allocate(num_places))
        return num_places

    def num_spare(self, num_running: int) -> int:
        """Return how many places remain if each running request keeps one to grow into."""
        return max(0, self._pool.num_available // self._num_groups - num_running)

    def release_passed(self, ticket: RequestState) -> None:
        """Release pages that no later row reads, and note when the next ones are due.

        Pages that a request with the same prompt would look for age as usual; the others are the
        first to be evicted.
        """
        request, groups = ticket.request, self._groups
        firsts = groups.first_seen(request.num_settled)
        sought_from = groups.first_seen(ticket.num_known * groups.page_size)
        for pages, first, sought in zip(request.pages, firsts, sought_from, strict=True):
            for place in range(first - 1, -1, -1):
                page = pages[place]
                if page == NO_PAGE:
                    break
                pages[place] = NO_PAGE
                is_sought = sought <= place < ticket.num_known
                self._pool.release_passed(page, is_sought=is_sought)
        ticket.due_at = min(ticket.due_at, groups.next_passed(request.num_settled))

    def give_back(self, request: Request) -> None:
        """Release all pages of a request; the last ones will be evicted first."""
        pages = request.pages[0]
        if len(request.pages) > 1 or self._groups.has_windows:
            places = zip(*request.pages, strict=True)
            pages = [page for place in places for page in place if page != NO_PAGE]
        self._pool.release(pages)
        request.pages = []

    def num_reserved(self, request: Request) -> int:
        """Return how many pages a running request may still take before it needs to draw."""
        num_places, num_tokens = len(request.pages[0]), len(request.tokens)
        return self._groups.num_missing(
            num_places, request.num_computed, num_tokens, self._token_budget
        )

    def reserve(self, running: Sequence[RequestState]) -> int:
        """Return how many pages running requests may still take before they need to draw."""
        return sum([self.num_reserved(ticket.request) for ticket in running])

    def num_victims(
        self,
        ticket: RequestState,
        hit: PrefixHit,
        running: Sequence[RequestState],
        num_reserved: int,
        most_running: int,
    ) -> int | None:
        """Return how many of the last running requests to preempt so that `ticket` can start.

        Only less urgent ones are preempted; None if that is not enough. Running requests keep the
        pages that their tokens still need and one a group to grow into (`num_reserved` in all): a
        request that is soon preempted computes its tokens twice. When nothing runs, anything fits
        that the scheduler let in.
        """
        room = self._pool.num_available - self._num_taken(ticket.request, hit) - num_reserved
        for num_victims in range(len(running) + 1):
            num_left = len(running) - num_victims
            if not num_left or (room >= 0 and num_left < most_running):
                return num_victims
            victim = running[num_left - 1]
            is_urgent = ticket.request.priority < victim.request.priority
            if not is_urgent or victim.rank < ticket.rank:
                return None
            room += self._num_own(victim.request, hit) + self.num_reserved(victim.request)
        return None

    def _num_taken(self, request: Request, hit: PrefixHit) -> int:
        """Return how many of the available pages a new request with a hit would take."""
        pool, num_places = self._pool, hit.num_places
        num_shared = sum(not pool.num_references(page) for page in held(hit.pages))
        return num_shared + self._groups.num_missing(
            num_places, num_places * pool.page_size, len(request.tokens), self._token_budget
        )

    def _num_own(self, request: Request, hit: PrefixHit) -> int:
        """Return how many pages a new request with a hit would gain by preempting another."""
        pool = self._pool
        own = {page for page in held(request.pages) if pool.num_references(page) == 1}
        return len(own) - sum(page in own for page in held(hit.pages))


def held(pages: list[list[int]]) -> list[int]:
    """Return the pages of all groups."""
    return [page for group in pages for page in group if page != NO_PAGE]


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


class InFlightSteps:
    """Keeps the plans of steps until their commit, and pages until no step uses them.

    Attributes:
        steps: each plan with the owners of its slices, the oldest first.
        ended: requests that have ended, with pages that steps in flight use.
    """

    def __init__(self, holdings: KvCacheManager) -> None:
        self.steps: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self.ended: list[RequestState] = []
        self._holdings = holdings
        self._must_land = False  # because a request waits for the pages of others

    def __len__(self) -> int:
        return len(self.steps)

    def let_preempt(self) -> bool:
        """Whether requests may lose their pages now; if not, all steps must land first."""
        self._must_land = bool(self.steps)
        return not self._must_land

    def must_land(self) -> bool:
        """Whether they must land before another step is planned."""
        self._must_land = self._must_land and bool(self.steps)
        return self._must_land

    def land(self, plan: StepPlan) -> list[RequestState]:
        """Take out the oldest step, which has this plan; return the owners of its slices."""
        oldest, owners = self.steps.popleft()
        assert plan.slices is oldest.slices, "steps are committed in the order of their plans"
        return owners

    def give_back(self, ticket: RequestState) -> None:
        """Release the pages of a request that stops running, now or after the last step."""
        if ticket.request.is_in_flight:
            self.ended.append(ticket)
        else:
            self._holdings.give_back(ticket.request)

    def release_ended(self) -> None:
        """Release the pages of ended requests that no step in flight uses any more."""
        for ticket in [t for t in self.ended if not t.request.is_in_flight]:
            self.ended.remove(ticket)
            self._holdings.give_back(ticket.request)
