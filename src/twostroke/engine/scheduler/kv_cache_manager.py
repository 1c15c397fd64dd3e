"""Takes pages for running requests in every cache group, and gives them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.request import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.kv_cache import PagePool, PrefixHit
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
