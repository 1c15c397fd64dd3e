"""KV transfers: the requests that wait for pages, how long, and the pages that others keep."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.invariants import check_pool
from support.requests import make_request, random_windows
from support.steps import Steps
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler

if TYPE_CHECKING:
    from support.fake_model import FakeModel
    from twostroke.engine.scheduler.transfers import Transfer


def begin(steps: Steps, request_id: str, within_s: float = 10.0) -> Transfer:
    transfers = steps.scheduler.prefix_cache.transfers
    transfer = transfers.begin(steps.scheduler._states[request_id], within_s)
    assert transfer is not None
    return transfer


def bring(steps: Steps, source: FakeModel, pages: list[int], transfer: Transfer) -> None:
    """Copy the next page of a transfer from the model that has computed it."""
    transfers = steps.scheduler.prefix_cache.transfers
    key = next((0, key) for key in transfer.keys if (0, key) in transfer.missing)
    (page,) = transfers.allocate(transfer, [key])
    key_index = transfer.first_page + transfer.keys.index(key[1])
    steps.model.fill(page, source.content(pages[key_index]))
    transfers.add_arrived(transfer, [key])


def computed(prompt: int) -> tuple[FakeModel, list[int], list[int]]:
    """Return a model that has computed a prompt, the prompt's pages, and the answer."""
    steps = Steps()
    request = steps.add("a", prompt, max_tokens=3)
    steps.step()
    pages = list(request.pages[0])
    steps.finish()
    return steps.model, pages, request.output


def test_a_request_waits_for_its_transfer_and_computes_the_rest() -> None:
    source, pages, output = computed(14)
    steps = Steps()
    request = steps.add("b", 14, max_tokens=3)
    transfer = begin(steps, "b")
    steps.scheduler.prefix_cache.transfers.select_missing(transfer, lambda _: True)
    for _ in range(3):
        assert steps.scheduler.plan() is None
        assert steps.scheduler.wait_s == 10.0
        bring(steps, source, pages, transfer)
    steps.scheduler.prefix_cache.transfers.end(transfer)
    assert steps.step() == {"b": 2}
    steps.finish()
    assert (request.num_cached, request.output) == (12, output)


def test_pages_that_arrived_before_a_transfer_failed_are_used() -> None:
    source, pages, output = computed(14)
    steps = Steps()
    request = steps.add("b", 14, max_tokens=3)
    transfer = begin(steps, "b")
    steps.scheduler.prefix_cache.transfers.select_missing(transfer, lambda _: True)
    bring(steps, source, pages, transfer)
    steps.scheduler.prefix_cache.transfers.end(transfer)
    assert steps.step() == {"b": 10}
    steps.finish()
    assert request.output == output


def test_pages_that_arrived_are_evicted_before_those_that_they_continue() -> None:
    source, pages, _ = computed(14)
    steps = Steps()
    steps.add("a", 6, max_tokens=1)
    steps.finish()  # its first page is that of the next request, too
    request = steps.add("b", 14, max_tokens=3)
    chain = steps.scheduler._states["b"].chain
    transfer = begin(steps, "b")
    steps.scheduler.prefix_cache.transfers.select_missing(transfer, lambda _: True)
    for _ in transfer.keys:
        bring(steps, source, pages, transfer)
    assert steps.cancel("b") is request
    steps.scheduler.prefix_cache.transfers.end(transfer)
    assert chain is not None
    assert steps.index is not None
    indices = {steps.index.find((0, key)): index for index, key in enumerate(chain.keys)}
    _, cached = steps.pool.contents()
    assert [indices[page] for page in reversed(cached) if page in indices] == [0, 1, 2]


def test_a_late_transfer_is_not_waited_for_and_its_pages_stay_apart() -> None:
    now = [0.0]
    steps = Steps(num_pages=32)
    steps.scheduler = Scheduler(
        steps.scheduler.config, steps.pool, steps.index, Continuous(), lambda: now[0]
    )
    transfers = steps.scheduler.prefix_cache.transfers
    request = steps.add("b", 14, max_tokens=3)
    transfer = begin(steps, "b", 0.5)
    (page,) = transfers.allocate(transfer, transfers.select_missing(transfer, lambda _: True)[:1])
    assert steps.scheduler.plan() is None
    now[0] = 0.5
    plan = steps.scheduler.plan()
    assert plan is not None, "a late transfer was waited for"
    assert page not in request.pages[0], "a page was handed out that may still be written"
    steps.scheduler.commit(plan, steps.model.run(plan))
    transfers.add_arrived(transfer, list(transfer.pages))  # what was computed meanwhile has its key
    transfers.end(transfer)
    while steps.scheduler.has_work:
        plan = steps.plan()
        steps.land(plan)
    assert request.output == computed(14)[2]
    check_pool(steps.pool)


@pytest.mark.parametrize("windows", [(None, 4), (4,)])
def test_a_request_waits_for_the_pages_that_its_windows_see(windows: tuple[int | None]) -> None:
    steps = Steps(windows=windows)
    request = steps.add("b", 26)
    transfer = begin(steps, "b")
    transfers = steps.scheduler.prefix_cache.transfers
    wanted_keys = transfers.select_missing(transfer, lambda _: True)
    assert len(wanted_keys) < len(windows) * len(transfer.keys), "hidden pages are brought"
    for key in wanted_keys:
        assert steps.scheduler.plan() is None, "it started before all that it sees was there"
        transfers.allocate(transfer, [key])
        transfers.add_arrived(transfer, [key])
    transfers.end(transfer)
    assert steps.scheduler.plan() is not None
    assert request.num_cached == 24


def test_requests_do_not_wait_for_pages_that_the_source_lacks() -> None:
    steps = Steps()
    steps.add("b", 14)
    transfers = steps.scheduler.prefix_cache.transfers
    transfer = begin(steps, "b")
    first = transfer.keys[0]
    assert transfers.select_missing(transfer, {(0, first)}.__contains__) == [(0, first)]
    transfers.end(transfer)
    assert steps.step() == {"b": 14}


def test_others_with_the_same_prompt_wait_for_one_transfer() -> None:
    steps = Steps()
    steps.add("b", 14)
    begin(steps, "b")
    steps.add("c", 14)
    transfers = steps.scheduler.prefix_cache.transfers
    assert transfers.begin(steps.scheduler._states["c"]) is None
    assert steps.scheduler.plan() is None


def test_transfers_and_leases_leave_the_pages_of_the_longest_request() -> None:
    steps = Steps(num_pages=20)  # of which the longest needs 16
    transfers = steps.scheduler.prefix_cache.transfers
    assert transfers.max_held_pages == 4
    long = steps.add("a", 60, max_tokens=4)
    steps.step()
    steps.add("b", [9] * 40, max_tokens=1)
    transfer = begin(steps, "b")
    wanted_keys = transfers.select_missing(transfer, lambda _: True)
    assert len(transfers.allocate(transfer, wanted_keys)) == 4
    assert not transfers.allocate(transfer, wanted_keys[4:])
    lease = transfers.lease([(0, key) for key in steps.scheduler._states["a"].chain.keys])
    assert not lease.pages
    while not long.is_finished:
        assert "a" in steps_of(steps, transfer)
    transfers.end(transfer)
    steps.finish()


def steps_of(steps: Steps, transfer: Transfer) -> set[str]:
    """Run a step while a transfer holds pages; return the ids of the requests in it."""
    plan = steps.scheduler.plan()
    assert plan is not None
    steps.scheduler.commit(plan, steps.model.run(plan))
    check_pool(steps.pool, [*_held_pages(steps), list(transfer.pages.values())])
    return {slice_.request.id for slice_ in plan.slices}


def _held_pages(steps: Steps) -> list[list[int]]:
    return [page for state in steps.scheduler._running for page in state.request.pages]


def test_arrived_pages_are_let_go_to_bring_more() -> None:
    source, pages, output = computed(40)
    steps = Steps(num_pages=18)
    transfers = steps.scheduler.prefix_cache.transfers
    assert transfers.max_held_pages == 2
    request = steps.add("b", 40, max_tokens=3)
    transfer = begin(steps, "b")
    transfers.select_missing(transfer, lambda _: True)
    for _ in transfer.keys:
        bring(steps, source, pages, transfer)
        assert transfers.num_held_pages <= 2
    transfers.end(transfer)
    steps.finish()
    assert (request.num_cached, request.output) == (36, output)


@pytest.mark.seeds(20)
def test_a_leased_page_keeps_its_content(seed: int) -> None:
    rng = random.Random(seed)
    steps = Steps(num_pages=24, context_length=32)
    transfers = steps.scheduler.prefix_cache.transfers
    request = steps.add("a", 13, max_tokens=1)
    keys = steps.scheduler._states[request.id].chain.keys
    steps.finish()
    lease = transfers.lease([(0, key) for key in keys])
    content = {page: steps.model.content(page) for page in lease.pages.values()}
    assert len(content) == 3
    for number in range(6):
        steps.scheduler.add(make_request(f"r{number}", [rng.randrange(50) for _ in range(25)]))
    while steps.scheduler.has_work:
        plan = steps.scheduler.plan()
        assert plan is not None
        steps.scheduler.commit(plan, steps.model.run(plan))
    assert content == {page: steps.model.content(page) for page in content}
    transfers.release(lease)
    check_pool(steps.pool)


@pytest.mark.seeds(60)
def test_transferred_pages_are_the_pages_that_a_plain_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    windows, size = random_windows(rng), rng.choice((1, 2, 4))
    pool = PagePool(200, size, windows)
    index = PrefixIndex(pool)
    keys = [bytes([index]) for index in range(rng.randint(1, 12))]
    first = rng.randint(0, 8)
    share = rng.choice((0.5, 0.9, 1.0))
    stored_keys = {(g, key) for g in range(len(windows)) for key in keys if rng.random() < share}
    for group in range(len(windows)):
        known_keys = [key for key in keys if rng.random() < 0.3]
        index.insert(group, known_keys, pool.allocate(len(known_keys)))

    def is_whole(count: int) -> bool:
        """Whether all keys that a row after `count` keys reads are there."""
        return all(
            index.contains((group, keys[at])) or (group, keys[at]) in stored_keys
            for group, start in enumerate(pool.groups.first_read_pages((first + count) * size))
            for at in range(max(0, start - first), count)
        )

    num_reachable, firsts = index.reachable(keys, first, stored_keys.__contains__)
    assert num_reachable == max(count for count in range(len(keys) + 1) if is_whole(count))
    assert firsts == pool.groups.first_read_pages((first + num_reachable) * size)


def test_no_transfer_begins_without_room_or_a_prefix_cache() -> None:
    for steps in (Steps(num_pages=16), Steps(cache=False)):
        steps.add("a", 14)
        transfers = steps.scheduler.prefix_cache.transfers
        assert transfers.begin(steps.scheduler._states["a"]) is None
        assert steps.step() == {"a": 14}


def test_a_request_that_reports_on_its_prompt_waits_for_nothing() -> None:
    steps = Steps()
    steps.add("a", 14, prompt_logprobs=0)
    assert steps.scheduler.prefix_cache.transfers.begin(steps.scheduler._states["a"]) is None
