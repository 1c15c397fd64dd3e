"""The page pool: pages are free, cached or referenced, and none gets lost."""

from __future__ import annotations

import pytest

from support.invariants import check_pool
from twostroke.engine.kv_cache import PagePool


def states(pool):
    return pool.num_free, pool.num_cached, pool.num_referenced


def test_new_pool_is_free():
    pool = PagePool(4, 16)
    assert states(pool) == (4, 0, 0)
    check_pool(pool)


def test_allocated_pages_are_distinct_and_referenced():
    pool = PagePool(4, 16)
    pages = pool.allocate(4)
    assert sorted(pages) == [0, 1, 2, 3]
    assert states(pool) == (0, 0, 4)
    check_pool(pool, [pages])


def test_released_page_is_reused():
    pool = PagePool(2, 16)
    first, second = pool.allocate(2)
    pool.release([first])
    assert pool.allocate(1) == [first]
    check_pool(pool, [[first, second]])


def test_shared_page_outlives_its_first_holder():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert states(pool) == (1, 0, 1)
    check_pool(pool, [pages])
    pool.release(pages)
    assert states(pool) == (2, 0, 0)


def test_kept_page_is_cached_after_its_last_reference():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.keep(pages[:1])
    pool.release(pages)
    assert states(pool) == (1, 1, 0)
    pool.share(pages)
    assert states(pool) == (1, 0, 1)
    check_pool(pool, [pages])


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(2, 16)
    cached = pool.allocate(1)
    pool.keep(cached[:1])
    pool.release(cached)
    assert pool.allocate(1) != cached
    assert states(pool) == (0, 1, 1)


def test_deepest_page_is_evicted_first_and_the_least_recently_used_chain_before_others():
    pool = PagePool(6, 16)
    evicted = []
    pool.on_evict = evicted.extend
    old, new = pool.allocate(3), pool.allocate(3)
    for page in (*old, *new):
        pool.keep([page])
    pool.release(new)
    pool.release(old)
    pool.share(new[:1])
    pool.release(new[:1])
    pool.allocate(6)
    assert evicted == [new[2], new[1], old[2], old[1], old[0], new[0]]


def test_pages_that_windows_left_are_evicted_first():
    pool = PagePool(6, 16)
    evicted = []
    pool.on_evict = evicted.extend
    left, unread_pages = pool.allocate(3), pool.allocate(3)
    for page in (*left, *unread_pages):
        pool.keep([page])
    pool.release(unread_pages)
    for page in left:
        pool.release_out_of_window(page)
    pool.allocate(6)
    assert evicted == [left[2], left[1], left[0], unread_pages[2], unread_pages[1], unread_pages[0]]


def test_page_that_one_request_leaves_stays_with_the_other():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release_out_of_window(pages[0])
    check_pool(pool, [pages])
    pool.release_out_of_window(pages[0])
    assert states(pool) == (2, 0, 0)


def test_evicted_page_is_no_longer_kept():
    pool = PagePool(1, 16)
    pages = pool.allocate(1)
    pool.keep(pages[:1])
    pool.release(pages)
    pages = pool.allocate(1)
    pool.release(pages)
    assert states(pool) == (1, 0, 0)


def test_releasing_too_often_is_caught():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="without references"):
        pool.release(pages)


def test_allocating_too_much_is_caught():
    with pytest.raises(AssertionError, match="more pages"):
        PagePool(2, 16).allocate(3)


def test_check_sees_a_reference_without_a_holder():
    pool = PagePool(2, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        check_pool(pool)
