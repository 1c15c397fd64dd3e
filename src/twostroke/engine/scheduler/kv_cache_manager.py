"""The KV cache pages of requests: allocation, prefix caching, and pages of steps in flight.

A request has one page list for each cache group of the model. The lists have the same length, and
the page at index i of each list holds the same `page_size` tokens. In the list of a group with a
sliding window, `NO_PAGE` replaces pages that no later row reads.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Protocol

from twostroke.core.request import NO_PAGE
from twostroke.engine.kv_cache import PrefixHit
from twostroke.engine.scheduler.recurrent_states import hit_with_snapshot
from twostroke.engine.scheduler.transfers import Transfer, Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.engine.kv_cache import PagePool, PrefixChain, PrefixIndex
    from twostroke.engine.scheduler.queue import WaitingQueue
    from twostroke.engine.scheduler.recurrent_states import RecurrentStates
    from twostroke.engine.scheduler.request_state import RequestState


class KvCacheManager:
    """Allocates and releases the KV pages of running requests in every cache group."""

    def __init__(
        self, pool: PagePool, token_budget: int, states: RecurrentStates | None = None
    ) -> None:
        """Manage the KV pages of `pool`, for steps of at most `token_budget` tokens.

        `states`: the recurrent states of requests, for models that have them.
        """
        self._states = states
        self._pool = pool
        self._groups = pool.groups
        self._num_groups = len(pool.groups.windows)
        self._token_budget = token_budget

    @property
    def can_grow(self) -> bool:
        """Whether a running request can grow: each cache group can get another page."""
        return self._pool.num_available >= self._num_groups

    def grow(self, request: Request, num_pages: int) -> int:
        """Append up to `num_pages` new KV pages to each of a request's page lists.

        Returns the number of pages appended to each list, fewer if the pool is short of pages.
        """
        num_pages = min(num_pages, self._pool.num_available // self._num_groups)
        for pages in request.pages:
            pages.extend(self._pool.allocate(num_pages))
        return num_pages

    def num_spare(self, num_running: int) -> int:
        """Return how many pages a page list may get beyond the reserve of running requests.

        The reserve is one page for each list of `num_running` requests, so that they can grow.
        Draft tokens use spare pages.
        """
        return max(0, self._pool.num_available // self._num_groups - num_running)

    def release_out_of_window(self, state: RequestState) -> None:
        """Release a request's KV pages that lie before the sliding window of their cache group.

        No later row reads these pages. A page that another request with the same prompt could find
        in the prefix cache is evicted in the usual order; other pages are evicted first.
        """
        request, groups = state.request, self._groups
        first_needed = groups.first_read_pages(request.num_settled)
        first_reusable = groups.first_read_pages(state.num_indexed * groups.page_size)
        for pages, needed, reusable in zip(
            request.pages, first_needed, first_reusable, strict=True
        ):
            for index in range(needed - 1, -1, -1):
                page = pages[index]
                if page == NO_PAGE:
                    break
                pages[index] = NO_PAGE
                is_reusable = reusable <= index < state.num_indexed
                self._pool.release_out_of_window(page, is_reusable=is_reusable)
        state.update_at = min(state.update_at, groups.next_release(request.num_settled))

    def release(self, request: Request) -> None:
        """Release all KV pages of a request; its last pages are evicted before its first pages.

        Its recurrent state is released as well.
        """
        if self._states is not None:
            self._states.release(request)
        page_lists = request.pages
        pages = page_lists[0]
        if len(page_lists) > 1 or self._groups.has_windows:
            columns = zip(*page_lists, strict=True)
            pages = [page for column in columns for page in column if page != NO_PAGE]
        self._pool.release(pages)
        request.pages = []

    def num_reserved(self, request: Request) -> int:
        """Return how many more KV pages a running request needs for its uncomputed tokens."""
        return self._groups.num_missing(
            len(request.pages[0]), request.num_computed, len(request.tokens), self._token_budget
        )

    def total_reserved(self, running: Sequence[RequestState]) -> int:
        """Return how many more KV pages all running requests need for their uncomputed tokens."""
        return sum([self.num_reserved(state.request) for state in running])

    def num_victims(
        self,
        state: RequestState,
        hit: PrefixHit,
        *,
        running: Sequence[RequestState],
        num_reserved: int,
        max_running: int,
    ) -> int | None:
        """Return how many running requests must be preempted so that a waiting request can start.

        `hit` is the waiting request's cached prefix. `running` is sorted by priority key, and the
        last requests are preempted first. Returns None if preempting all less urgent requests does
        not free enough pages. The requests that keep running keep `num_reserved` pages: the pages
        that their tokens still need, and one in each cache group to grow into. Without this
        reserve, a request could start, be preempted soon, and compute its tokens twice. If all
        running requests are preempted, the waiting request fits: `Scheduler.add` refuses larger
        requests.

        After `max_running` was lowered, more requests than this limit may run. At most one of them
        is preempted because of the limit, so that not all pages are lost at once.
        """
        max_running = max(max_running, len(running))
        num_needed = self._num_needed(state.request, hit) + num_reserved
        num_left_over = self._pool.num_available - num_needed
        for num_victims in range(len(running) + 1):
            num_left = len(running) - num_victims
            if not num_left or (num_left_over >= 0 and num_left < max_running):
                return num_victims
            victim = running[num_left - 1]
            is_urgent = state.request.priority < victim.request.priority
            if not is_urgent or victim.priority_key < state.priority_key:
                return None
            num_left_over += self._num_freed(victim.request, hit)
            num_left_over += self.num_reserved(victim.request)
        return None

    def _num_needed(self, request: Request, hit: PrefixHit) -> int:
        """Return how many of the pool's available pages a waiting request takes when it starts.

        Counts cached pages of its prefix `hit` that no request references, and pages for its other
        tokens.
        """
        pool, num_pages = self._pool, hit.num_pages
        num_shared = sum(not pool.num_references(page) for page in all_pages(hit.pages))
        return num_shared + self._groups.num_missing(
            num_pages, num_pages * pool.page_size, len(request.tokens), self._token_budget
        )

    def _num_freed(self, victim: Request, hit: PrefixHit) -> int:
        """Return how many KV pages become available if a running request is preempted.

        Pages of the prefix `hit` do not count, since the request that replaces the victim uses
        them.
        """
        pool = self._pool
        unshared = {page for page in all_pages(victim.pages) if pool.num_references(page) == 1}
        return len(unshared) - sum(page in unshared for page in all_pages(hit.pages))


def all_pages(pages: list[list[int]]) -> list[int]:
    """Return a request's KV pages of all cache groups in one list, without `NO_PAGE`."""
    return [page for group in pages for page in group if page != NO_PAGE]


class PageWatcher(Protocol):
    """The interface of an observer of the KV pages that requests use or compute.

    KV offload implements it. The methods must be quick, because steps wait for them.
    """

    def on_prefix_hit(self, state: RequestState, num_pages: int) -> None:
        """Take note that a request starts with its first `num_pages` KV pages from the cache."""

    def on_computed(self, state: RequestState, first: int, end: int) -> None:
        """Take note that a request has computed its KV pages from index `first` up to `end`."""


class PrefixCache:
    """The cached prefixes of prompts, and claims on KV pages that are about to be computed.

    A running request claims the pages that it will compute. A waiting request whose next missing
    page is claimed by a more urgent running request waits for that page, so that it is not computed
    twice. That cannot deadlock: a claim ends with its owner, and running requests make progress in
    order of priority. A claim may also belong to a `Transfer`, which brings the page from a KV
    offload tier or from another engine. Without a prefix index there is no prefix cache: no request
    finds cached pages.
    """

    def __init__(
        self, index: PrefixIndex | None, pool: PagePool, states: RecurrentStates | None = None
    ) -> None:
        self._index = index
        self._states = states
        self._pool = pool
        self._page_size = pool.page_size
        self._num_groups = len(pool.groups.windows)
        if states is not None and index is not None:
            groups = range(self._num_groups)
            states.pool.has_page = lambda key: any(index.contains((group, key)) for group in groups)
        self._claims: dict[bytes, RequestState | Transfer] = {}
        self.transfers = Transfers(
            index, pool, self._claims, None if states is None else states.pool
        )
        self.watcher: PageWatcher | None = None

    def chain(self, salt: bytes) -> PrefixChain | None:
        """Return an empty chain of page keys for a new request; None without a prefix cache.

        Requests share pages only if they have the same `salt`, which differs between tenants.
        """
        return self._index.chain(salt) if self._index is not None else None

    def match(self, state: RequestState) -> PrefixHit | None:
        """Return the cached KV pages to start a waiting request with; None if it should wait.

        A request waits while a more urgent request or a KV transfer brings its next missing page.
        The hit is empty for a request that wants log-probabilities or hidden states of its prompt,
        since it must compute all rows.
        """
        if self._index is None or state.chain is None or state.request.needs_all_rows:
            return PrefixHit([[] for _ in range(self._num_groups)])
        if self._is_claimed(state, state.awaited_key):
            return None
        request = state.request
        hit = self._index.match(state.chain, request.tokens, request.num_prompt)
        num_usable = self._index.num_reusable(len(request.tokens) - 1, request.num_prompt)
        if self._states is not None:
            return self._match_snapshot(state, state.chain.keys[:num_usable], hit)
        state.awaited_key = self._next_awaited(state.chain.keys[:num_usable], hit)
        return None if self._is_claimed(state, state.awaited_key) else hit

    def wait_s(self, waiting: WaitingQueue) -> float | None:
        """Return the seconds until a waiting request may start if none runs; None for never.

        If every ready request waits for a KV transfer, this is the time until the first transfer
        expires. A page that arrives sooner notifies the engine loop.
        """
        ready = waiting.ready
        owners = [self._claims.get(state.awaited_key or b"") for state in ready]
        expiries_s = [owner.expires_at_s for owner in owners if isinstance(owner, Transfer)]
        if not ready or len(expiries_s) < len(ready):
            return waiting.wait_s
        return self.transfers.seconds_until(min(expiries_s))

    def num_cached_tokens(self, request: Request, chain: PrefixChain) -> int:
        """Return how many of a new request's tokens have cached KV pages; extend its `chain`."""
        if self._index is None:
            return 0
        hit = self._index.match(chain, request.tokens, request.num_prompt)
        if self._states is not None:
            hit = self._hit_with_snapshot(chain.keys, hit)
        return hit.num_pages * self._page_size

    def receive(self, request: Request, chain: PrefixChain) -> bool:
        """Index KV pages for the tokens of a new request that another engine prefilled.

        Returns False if the pool has no room for the pages. The caller fills the pages and adds the
        request to the scheduler; the request finds the pages when it starts. If its last page is
        not full, the request computes this page again. Extends `chain`.
        """
        if self._index is None:
            return False
        hit = self._index.match(chain, request.tokens, request.num_prompt)
        keys = chain.keys[hit.num_pages :]
        self._pool.share(all_pages(hit.pages))
        fits = len(keys) * self._num_groups <= self._pool.num_available
        for group, pages in enumerate(hit.pages):
            added = self._pool.allocate(len(keys)) if fits else []
            if fits:
                self._index.insert(group, keys, added)
            self._pool.release([*(page for page in pages if page != NO_PAGE), *added])
        return fits

    def start(self, state: RequestState) -> None:
        """Claim the KV pages that a request will compute, after its cached pages from `match`."""
        if state.chain is None:
            state.publish_at = sys.maxsize
            return
        state.num_published = len(state.request.pages[0])
        state.publish_at = (state.num_published + 1) * self._page_size
        if self.watcher is not None and state.num_published:
            self.watcher.on_prefix_hit(state, state.num_published)
        for key in state.chain.keys[state.num_published :]:
            self._claims.setdefault(key, state)

    def publish(self, state: RequestState) -> None:
        """Index KV pages of a request that have become full, so that other requests share them."""
        if self._index is None or state.chain is None:
            return
        request = state.request
        num_full = self._index.num_reusable(request.num_settled, request.num_prompt)
        state.chain.extend(request.tokens, num_full)
        first = state.num_published
        keys = state.chain.keys[first:num_full]
        for group, pages in enumerate(request.pages):
            self._index.insert(group, keys, pages[first:num_full])
        self._drop_claims(keys, state)
        if self.watcher is not None and keys:
            self.watcher.on_computed(state, first, num_full)
        state.num_published = num_full
        state.publish_at = (request.num_settled // self._page_size + 1) * self._page_size

    def stop(self, state: RequestState) -> None:
        """Drop a request's claims on KV pages, because it stops running."""
        if state.chain is not None:
            self._drop_claims(state.chain.keys[state.num_published :], state)

    def _match_snapshot(
        self, state: RequestState, keys: list[bytes], hit: PrefixHit
    ) -> PrefixHit | None:
        """Return the longest cached prefix that ends with a snapshot of the recurrent state.

        Returns None if a more urgent request is about to compute a longer shared prefix, or a KV
        transfer brings a longer prefix and its snapshot. The more urgent request is then asked to
        keep a snapshot where the two prompts part. Otherwise, if more pages are cached than the
        returned prefix has, this request keeps a snapshot after the last cached page.
        """
        cached_prefix = self._hit_with_snapshot(keys, hit)
        for num_pages in range(len(keys), cached_prefix.num_pages, -1):
            key = keys[num_pages - 1]
            if self._is_claimed(state, key):
                owner = self._claims[key]
                if not isinstance(owner, Transfer):
                    owner.snapshot_pages.add(num_pages)
                elif not owner.may_reach(keys):
                    continue
                state.awaited_key = key
                return None
        state.awaited_key = None
        state.parted_after = hit.num_pages if hit.num_pages > cached_prefix.num_pages else 0
        return cached_prefix

    def _hit_with_snapshot(self, keys: list[bytes], hit: PrefixHit) -> PrefixHit:
        """Shorten a cached prefix to its longest part that ends with a snapshot."""
        assert self._index is not None
        assert self._states is not None
        return hit_with_snapshot(self._index, self._states.pool, keys, hit)

    def _next_awaited(self, keys: Sequence[bytes], hit: PrefixHit) -> bytes | None:
        """Return the key of a request's next missing KV page, for which it may wait.

        If a KV transfer brings a later page, return the later page's key: a transfer brings no
        pages that lie before a sliding window, and the request can start only after the later
        pages. None if no page is missing.
        """
        missing = keys[hit.num_pages :]
        if self._pool.groups.has_windows:
            has_full_attention = None in self._pool.groups.windows
            end = hit.num_indexed + 1 if has_full_attention else len(keys)
            for key in keys[hit.num_pages : end]:
                if isinstance(self._claims.get(key), Transfer):
                    return key
        return missing[0] if missing else None

    def _is_claimed(self, state: RequestState, key: bytes | None) -> bool:
        """Whether a waiting request should wait for a KV page, given its key (None for no page).

        It should wait if a more urgent running request or a KV transfer has claimed the page.
        """
        owner = self._claims.get(key) if key is not None else None
        if isinstance(owner, Transfer):
            return not self.transfers.has_expired(owner)
        return owner is not None and owner.priority_key < state.priority_key

    def _drop_claims(self, keys: Sequence[bytes], state: RequestState) -> None:
        for key in keys:
            if self._claims.get(key) is state:
                del self._claims[key]


class StepsInFlight:
    """Steps that are planned but not committed, and the KV pages of ended requests that they use.

    Attributes:
        steps: the plan of each step with the owners of its slices, the oldest first.
        ended_requests: requests that have ended but whose pages are used by steps in flight.
    """

    def __init__(self, kv_cache: KvCacheManager) -> None:
        self.steps: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self.ended_requests: list[RequestState] = []
        self._kv_cache = kv_cache
        self._must_drain = False  # a request waits for the pages of another

    def __len__(self) -> int:
        return len(self.steps)

    def may_preempt(self) -> bool:
        """Return whether a running request may be preempted now: only if no step is in flight.

        A step in flight uses KV pages of running requests. If False is returned, `must_drain`
        becomes True, and the scheduler plans no step until all steps in flight are committed.
        """
        self._must_drain = bool(self.steps)
        return not self._must_drain

    def must_drain(self) -> bool:
        """Whether all steps in flight must be committed before another step is planned.

        This is so after `may_preempt` has refused to preempt a request.
        """
        self._must_drain = self._must_drain and bool(self.steps)
        return self._must_drain

    def pop_oldest(self, plan: StepPlan) -> list[RequestState]:
        """Remove the oldest step in flight, whose plan must be `plan`.

        Returns the request states to which the step's slices belong.
        """
        oldest, owners = self.steps.popleft()
        assert plan.slices is oldest.slices, "steps are committed in the order of their plans"
        return owners

    def release(self, state: RequestState) -> None:
        """Release the KV pages of a request that stops running.

        Pages of steps in flight are kept until these steps are committed.
        """
        if state.request.is_in_flight:
            self.ended_requests.append(state)
        else:
            self._kv_cache.release(state.request)

    def release_ended(self) -> None:
        """Release the KV pages of ended requests that no step in flight uses any more."""
        for state in [state for state in self.ended_requests if not state.request.is_in_flight]:
            self.ended_requests.remove(state)
            self._kv_cache.release(state.request)
