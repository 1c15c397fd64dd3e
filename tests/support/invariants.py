"""Invariants of pages, prefixes and the scheduler, which hold between any two operations."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twostroke.core.request import NO_PAGE, NO_STATE
from twostroke.engine.scheduler.kv_cache_manager import all_pages
from twostroke.engine.scheduler.request_state import priority_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice
    from twostroke.engine.kv_cache import PagePool, PrefixIndex
    from twostroke.engine.scheduler import Scheduler


def check_pool(pool: PagePool, holders: Iterable[Sequence[int]] = ()) -> None:
    """Assert that each page is in one state; `holders` are all lists of pages with references."""
    expected = Counter(page for pages in holders for page in pages)
    counts = {page: count for page, count in enumerate(pool._counts) if count}
    assert counts == dict(expected), f"references {dict(expected)}, counted {counts}"
    free, cached, referenced = set(pool._free), set(pool._cached), set(counts)
    assert len(free) == len(pool._free), "a page is free twice"
    assert len(free | cached | referenced) == pool.num_pages, "a page is lost"
    assert len(free) + len(cached) + len(referenced) == pool.num_pages, "two states"
    assert all(pool._is_kept[page] for page in cached), "a cached page is not kept"
    assert not any(pool._is_kept[page] for page in free), "a free page is kept"


def check_index(index: PrefixIndex) -> None:
    """Assert that keys and pages match and that the pool keeps exactly these pages."""
    indexed = {
        page: (group, key)
        for group, group_pages in enumerate(index._pages)
        for key, page in group_pages.items()
    }
    assert indexed == index._keys
    kept_pages = {page for page, is_kept in enumerate(index._pool._is_kept) if is_kept}
    assert kept_pages == set(index._keys), f"indexed {set(index._keys)}, kept {kept_pages}"


def check_scheduler(
    scheduler: Scheduler, moved: Iterable[Sequence[int]] = (), held_slots: Iterable[int] = ()
) -> None:
    """Assert that pages, queues, requests and steps in flight agree.

    `moved` are the pages of each transfer and lease, `held_slots` their recurrent states.
    """
    waiting, running = scheduler._waiting, scheduler._running
    ended_requests = scheduler._in_flight.ended_requests
    slices_in_flight = [part for plan, _ in scheduler._in_flight.steps for part in plan.slices]
    holders = [all_pages(state.request.pages) for state in (*running, *ended_requests)]
    holders += [branch.own_pages for part in slices_in_flight for branch in part.branches]
    check_pool(scheduler._pool, [*holders, *moved])
    if scheduler._recurrent is not None:
        slots = Counter(state.request.state_slot for state in (*running, *ended_requests))
        slots += Counter(part.write_state for part in slices_in_flight)
        slots += Counter(held_slots)
        slots += Counter(slot for part in slices_in_flight for slot in part.draft_states)
        del slots[NO_STATE]
        pool = scheduler._recurrent.pool
        assert slots == Counter(
            {slot: pool.num_references(slot) for slot in range(pool.num_slots)}
        ), "a recurrent state was lost or kept"
        num_referenced = sum(pool.num_references(slot) > 0 for slot in range(pool.num_slots))
        assert pool.num_available == pool.num_slots - num_referenced
    for state in (*running, *ended_requests):
        check_in_flight(state.request, slices_in_flight)
    assert all(state.request.is_in_flight and not state.is_running for state in ended_requests)
    assert running == sorted(running, key=priority_key), "requests are out of order"
    assert waiting.ready == sorted(waiting.ready, key=priority_key), "a queue is out of order"
    assert all(state.is_running for state in running)
    assert all(not state.is_running and not state.request.pages for state in waiting)
    assert waiting.num_tokens == sum(len(state.request.tokens) for state in waiting)
    alive = [t.request.id for t in (*waiting, *running) if not t.request.is_finished]
    assert sorted(alive) == sorted(scheduler._states), "a request is lost or in two queues"
    assert len(running) <= scheduler._first_config.max_running
    for state in running:
        check_pages(scheduler._pool, state.request)
    owners = scheduler.prefix_cache._claims.values()
    claiming = [*running, *scheduler.prefix_cache.transfers._claiming]
    assert all(owner in claiming for owner in owners), "a claim outlived its owner"


def check_in_flight(request: Request, slices_in_flight: Sequence[Slice]) -> None:
    """Assert that a request's slices in flight continue its computed tokens, up to the planned."""
    at = request.num_computed
    for part in slices_in_flight:
        if part.request is request:
            assert part.start == at, "a slice in flight that does not continue"
            at += part.count
    assert at == request.num_planned
    num_drawing = sum(part.samples for part in slices_in_flight if part.request is request)
    num_tokens = len(request.tokens) + max(0, num_drawing - 1)
    assert request.is_finished or at <= num_tokens, "a token that no step draws"


def check_pages(pool: PagePool, request: Request) -> None:
    """Assert that a running request holds exactly the pages that its next rows read and write."""
    num_places = len(request.pages[0])
    assert all(len(pages) == num_places for pages in request.pages), "unequal lists"
    firsts = pool.groups.first_read_pages(request.num_computed)
    for pages, first in zip(request.pages, firsts, strict=True):
        assert set(pages[:first]) <= {NO_PAGE}, "a page that no window reaches is held"
        assert NO_PAGE not in pages[first:], "a page that will be read is missing"
        for page in pages[request.num_computed // pool.page_size :]:
            assert pool.num_references(page) == 1, "a page to be written is shared"
            assert not pool._is_kept[page], "a page to be written is indexed"
