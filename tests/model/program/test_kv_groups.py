"""The pages that a request needs in each cache group, compared with counting them one by one."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from twostroke.model.program.kv_layout import PageGroups

GROUPS = st.builds(
    PageGroups,
    st.integers(1, 9),
    st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4).map(tuple),
)


def seen(groups: PageGroups, window: int | None, num_computed: int, end: int) -> set[int]:
    """Return the page indexes that the rows `num_computed` to `end` - 1 read or write."""
    first = {row: 0 if window is None else max(0, row + 1 - window) for row in range(end)}
    rows = range(num_computed, end)
    return {at // groups.page_size for row in rows for at in range(first[row], row + 1)}


def held_pages(groups: PageGroups, num_tokens: int, chunk: int) -> list[int]:
    """Return the pages held in each step of a request that computes `chunk` tokens a step."""
    counts = []
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        counts.append(sum(len(seen(groups, window, start, end)) for window in groups.windows))
    return counts


@given(GROUPS, st.integers(0, 100))
def test_the_first_page_that_a_request_reads(groups: PageGroups, num_computed: int) -> None:
    expected = [
        min(seen(groups, window, num_computed, num_computed + 1)) for window in groups.windows
    ]
    assert groups.first_read_pages(num_computed) == expected


@given(GROUPS, st.integers(0, 60))
def test_each_page_that_a_window_leaves_is_noticed(groups: PageGroups, num_computed: int) -> None:
    now = groups.first_read_pages(num_computed)
    following = groups.next_release(num_computed)
    if groups.windows.count(None) == len(groups.windows):
        assert following == sys.maxsize
        return
    assert groups.first_read_pages(following - 1) == now
    assert groups.first_read_pages(following) != now


@given(GROUPS, st.integers(1, 100), st.integers(1, 20))
def test_a_request_never_holds_more_than_it_needs(
    groups: PageGroups, num_tokens: int, chunk: int
) -> None:
    needed = groups.num_needed(num_tokens, chunk)
    assert max(held_pages(groups, num_tokens, chunk)) <= needed
    assert needed <= len(groups.windows) * -(-num_tokens // groups.page_size)


@given(GROUPS, st.integers(0, 6))
def test_what_one_row_a_step_needs_is_reached_and_no_more(
    groups: PageGroups, num_more: int
) -> None:
    """Pages count at their peak: a step first takes a page of each group, then releases pages."""
    size = groups.page_size
    num_tokens = (45 // size + 1 + num_more) * size + 1  # the last row takes a page
    max_seen = sum(
        len(seen(groups, window, num_tokens - 1, num_tokens)) for window in groups.windows
    )
    assert max_seen == groups.num_needed(num_tokens)


@given(GROUPS, st.integers(0, 200), st.integers(1, 300), st.integers(1, 20))
def test_most_tokens_fit_and_one_more_does_not(
    groups: PageGroups, num_pages: int, limit: int, num_rows: int
) -> None:
    max_tokens = groups.max_tokens(num_pages, limit, num_rows)
    assert 0 <= max_tokens <= limit
    assert groups.num_needed(max_tokens, num_rows) <= num_pages or max_tokens == 0
    if max_tokens < limit:
        assert groups.num_needed(max_tokens + 1, num_rows) > num_pages


@given(GROUPS, st.integers(0, 60), st.integers(1, 60), st.integers(1, 20))
def test_a_request_takes_no_more_than_what_was_missing(
    groups: PageGroups, num_computed: int, pending: int, chunk: int
) -> None:
    num_tokens, size = num_computed + pending, groups.page_size
    num_places = -(-num_computed // size)
    now = sum(
        num_places - min(first, num_places) for first in groups.first_read_pages(num_computed)
    )
    missing = groups.num_missing(num_places, num_computed, num_tokens, chunk)
    assert missing >= 0
    for start in range(num_computed, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        then = sum(len(seen(groups, window, start, end)) for window in groups.windows)
        assert then <= now + missing


def test_a_group_without_a_window_always_reserves_a_page() -> None:
    assert PageGroups(16).num_missing(3, 40, 41, 256) == 1
    assert PageGroups(16, (None, None)).num_missing(3, 40, 41, 256) == 2
    assert PageGroups(16, (None, 32)).num_missing(3, 40, 41, 256) == 1
    assert PageGroups(16, (None, 32)).num_missing(3, 47, 48, 256) == 2
