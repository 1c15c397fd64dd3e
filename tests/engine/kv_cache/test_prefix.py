"""The prefix index finds the longest cached prefix of the same tenant, and leaves a token."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest

from support.invariants import check_index, check_pool
from twostroke.core.request import NO_PAGE
from twostroke.engine.kv_cache import PagePool, PrefixIndex

PAGE_SIZE = 4


class Cache:
    """A page pool with a prefix index, in which requests compute pages and end."""

    def __init__(self, num_pages=8, **options):
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.index = PrefixIndex(self.pool, **options)

    def compute(self, tokens, salt=b"", num_prompt=None):
        """Fill and publish pages for `tokens`; return the pages."""
        num_pages = self.index.num_reusable(len(tokens), num_prompt or len(tokens))
        chain = self.index.chain(salt)
        chain.extend(tokens, num_pages)
        pages = self.pool.allocate(-(-len(tokens) // PAGE_SIZE))
        for key, page in zip(chain.keys, pages, strict=False):
            self.index.insert(0, [key], [page])
        return pages

    def match(self, tokens, salt=b"", num_prompt=None):
        hit = self.index.match(self.index.chain(salt), tokens, num_prompt or len(tokens))
        return hit.pages[0]


@pytest.fixture
def cache():
    cache = Cache()
    yield cache
    check_index(cache.index)


def test_new_prefix_has_no_cached_pages(cache):
    assert cache.match(range(20)) == []


def test_longest_prefix_is_found(cache):
    pages = cache.compute(range(12))
    assert cache.match([*range(12), 99]) == pages
    assert cache.match([*range(8), 99, 98, 97, 96, 95]) == pages[:2]
    assert cache.match([99, *range(1, 12)]) == []


def test_a_token_is_left_to_compute(cache):
    pages = cache.compute(range(8))
    assert cache.match(range(8)) == pages[:1]
    assert cache.match(range(9)) == pages


def test_partly_filled_page_is_not_indexed(cache):
    pages = cache.compute(range(7))
    assert cache.match(range(20)) == pages[:1]


def test_same_page_after_another_prefix_is_another_page(cache):
    cache.compute([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match([9, 9, 9, 9, 5, 6, 7, 8, 1]) == []


def test_tenants_do_not_see_each_other(cache):
    pages = cache.compute(range(8), salt=b"one")
    assert cache.match(range(20), salt=b"two") == []
    assert cache.match(range(20)) == []
    assert cache.match(range(20), salt=b"one") == pages


def test_keys_are_a_sha256_chain(cache):
    chain = cache.index.chain(b"salt")
    chain.extend(list(range(8)), 2)
    key = sha256(b"twostroke prefix salt").digest()
    for first in (0, 4):
        page = b"".join(token.to_bytes(4, "little") for token in range(first, first + 4))
        key = sha256(key + page).digest()
        assert chain.keys[first // 4] == key


def test_keys_grown_in_steps_equal_keys_grown_at_once(cache):
    slow, quick = cache.index.chain(b""), cache.index.chain(b"")
    for num_pages in (1, 1, 3, 2, 5):
        slow.extend(list(range(23)), num_pages)
    quick.extend(list(range(23)), 5)
    assert slow.keys == quick.keys


def test_duplicate_page_stays_its_owners_own(cache):
    first = cache.compute(range(8))
    second = cache.compute(range(8))
    assert cache.match(range(9)) == first
    cache.pool.release(second)
    assert cache.pool.num_cached == 0
    cache.pool.release(first)
    assert cache.pool.num_cached == 2
    check_pool(cache.pool)


def test_evicted_page_is_not_found():
    cache = Cache(num_pages=3)
    pages = cache.compute(range(12))
    cache.pool.release(pages)
    cache.pool.allocate(1)
    assert cache.match(range(13)) == pages[:2]
    assert len(cache.index) == 2
    check_index(cache.index)


def test_evicted_page_is_computed_and_found_again():
    cache = Cache(num_pages=2)
    cache.pool.release(cache.compute(range(8)))
    cache.pool.release(cache.pool.allocate(2))
    assert cache.match(range(9)) == []
    pages = cache.compute(range(8))
    assert cache.match(range(9)) == pages
    check_index(cache.index)


def test_strict_mode_keeps_generated_pages_out():
    cache = Cache(reuse_generated=False)
    pages = cache.compute(range(12), num_prompt=6)
    assert cache.match(range(13)) == pages[:1]


def test_strict_mode_gives_a_request_no_page_for_what_it_generated():
    cache = Cache(reuse_generated=False)
    pages = cache.compute(range(12))
    assert cache.match(range(13)) == pages
    assert cache.match(range(13), num_prompt=6) == pages[:1]


class WindowCache:
    """A prefix index with cache groups, and a sequence whose pages are all indexed."""

    def __init__(self, windows, tokens):
        num_pages = len(tokens) // PAGE_SIZE
        self.tokens = tokens
        self.pool = PagePool(len(windows) * num_pages, PAGE_SIZE, windows)
        self.index = PrefixIndex(self.pool)
        self.chain = self.index.chain(b"")
        self.chain.extend(tokens, num_pages)
        self.pages = [self.pool.allocate(num_pages) for _ in windows]
        for group, pages in enumerate(self.pages):
            for key, page in zip(self.chain.keys, pages, strict=True):
                self.index.insert(group, [key], [page])

    def evict(self, pages):
        """Evict pages in any order, whatever their last use."""
        for page in pages:
            self.pool.release_out_of_window(page)
            self.pool.allocate(1)

    def match(self):
        return self.index.match(self.index.chain(b""), [*self.tokens, 99], len(self.tokens) + 1)


def test_hit_needs_no_pages_before_the_window():
    cache = WindowCache((None, 6), range(16))
    cache.evict(cache.pages[1][:2])
    hit = cache.match()
    assert hit.pages == [cache.pages[0], [NO_PAGE, NO_PAGE, *cache.pages[1][2:]]]
    assert (hit.num_pages, hit.num_indexed) == (4, 4)


def test_hit_ends_where_the_window_is_still_filled():
    cache = WindowCache((None, 6), range(20))
    cache.evict(cache.pages[1][3:4])
    hit = cache.match()
    assert hit.pages == [cache.pages[0][:3], [NO_PAGE, *cache.pages[1][1:3]]]
    assert (hit.num_pages, hit.num_indexed) == (3, 5)


def test_a_missing_page_without_a_window_ends_the_hit():
    cache = WindowCache((None, 6), range(16))
    cache.evict(cache.pages[0][:1])
    assert cache.match().pages == [[], []]


def test_window_alone_needs_only_its_last_pages():
    cache = WindowCache((5,), range(16))
    cache.evict(cache.pages[0][:3])
    assert cache.match().pages == [[NO_PAGE, NO_PAGE, NO_PAGE, cache.pages[0][3]]]


@pytest.mark.parametrize("seed", range(60))
def test_longest_hit_is_found_whatever_was_evicted(seed):
    rng = random.Random(seed)
    windows = rng.choice([(None,), (3,), (None, 5), (None, 9, 9), (4, 13), (None, None, 6)])
    cache = WindowCache(windows, range(40))
    cached_indices = [{*range(10)} for _ in windows]
    for group, pages in enumerate(cache.pages):
        for index in rng.sample(range(10), rng.choice((0, 1, 1, 2, 5))):
            cached_indices[group].discard(index)
            cache.evict([pages[index]])

    def needed(window, num_places):
        lowest = 0 if window is None else max(0, num_places * PAGE_SIZE + 1 - window)
        return set(range(lowest // PAGE_SIZE, num_places))

    expected = max(
        length
        for length in range(11)
        if all(needed(window, length) <= cached_indices[g] for g, window in enumerate(windows))
    )
    hit = cache.match()
    assert hit.num_pages == expected
    for group, window in enumerate(windows):
        needed_indices = needed(window, expected)
        assert hit.pages[group] == [
            cache.pages[group][index] if index in needed_indices else NO_PAGE
            for index in range(expected)
        ]
    check_index(cache.index)
