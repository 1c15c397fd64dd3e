"""Drafts become rows: chains, trees, and the parts of them for which there are KV pages."""

from __future__ import annotations

import random

import pytest

from support.invariants import check_pool, check_scheduler
from support.steps import Steps
from twostroke.core.draft_tree import ROOT, accepted_drafts, parents_of, path_to

TREE = ((10, 11, 12, 13, 14, 15), (ROOT, ROOT, 0, 0, 1, 2))
# By rows: 10, 12, 15; then 13; then 11, 14.


def waiting_slice(num_pages=64, max_tokens=20, **limits):
    """Return the slice in flight of a request whose first output token is being computed."""
    steps = Steps(num_pages, **limits)
    request = steps.add("r", 5, max_tokens=max_tokens)
    steps.step()
    plan = steps.plan()
    return steps, request, plan, plan.slices[0]


def test_a_chain_of_drafts_is_taken_unchanged():
    steps, request, _, slice_ = waiting_slice()
    assert list(steps.scheduler.add_drafts(slice_, [7, 8, 9])) == [0, 1, 2]
    assert (slice_.drafts, slice_.branches) == ((7, 8, 9), ())
    assert len(request.pages[0]) == 3
    check_scheduler(steps.scheduler)


def test_a_tree_is_laid_out_so_that_paths_are_long():
    steps, request, plan, slice_ = waiting_slice()
    assert steps.scheduler.add_drafts(slice_, *TREE) == [0, 2, 5, 3, 1, 4]
    assert slice_.drafts == (10, 12, 15, 13, 11, 14)
    assert parents_of(6, slice_.branches) == [ROOT, 0, 1, 0, ROOT, 4]
    low, high = slice_.branches
    # Five prompt tokens and one of output: drafts begin at position 6, in the second page of 4.
    assert (low.position, low.own_page_index, low.above, low.is_copied) == (7, 1, (0, 1), True)
    assert (high.position, high.own_page_index, high.above, high.is_copied) == (6, 1, (0,), True)
    assert len(set(low.own_pages) | set(high.own_pages) | set(request.pages[0])) == 3 + 1 + 1
    check_scheduler(steps.scheduler)
    steps.land(plan)
    assert steps.pool.num_referenced == len(request.pages[0])


def test_a_tree_without_branches_is_a_chain():
    steps, _, _, slice_ = waiting_slice()
    assert steps.scheduler.add_drafts(slice_, (7, 8, 9), (ROOT, 0, 1)) == [0, 1, 2]
    assert (slice_.drafts, slice_.branches) == ((7, 8, 9), ())


def test_a_branch_that_begins_a_page_shares_no_rows():
    """A branch that leaves its path at the beginning of a page has no rows to copy."""
    steps, _, _, slice_ = waiting_slice()
    assert steps.scheduler.add_drafts(slice_, (1, 2, 3, 4), (ROOT, 0, 1, 1)) == [0, 1, 2, 3]
    [branch] = slice_.branches
    assert (branch.position, branch.own_page_index, branch.page_index) == (8, 2, 1)
    assert (branch.above, branch.is_copied, branch.num_own) == ((), False, 1)


def test_paths_end_where_the_request_must():
    steps = Steps()
    steps.add("r", 5, max_tokens=4)
    steps.step()
    plan = steps.plan()
    [slice_] = plan.slices  # one token is out, one will be drawn: two drafts could be of use
    assert steps.scheduler.add_drafts(slice_, *TREE) == [0, 2, 3, 1, 4]


@pytest.mark.parametrize(
    ("num_pages", "expected"),
    [
        (2, [0]),  # the request ends with the token behind it
        (3, [0, 2]),
        (4, [0, 2, 5]),
        (5, [0, 2, 5, 3]),
        (6, [0, 2, 5, 3, 1, 4]),
    ],
)
def test_without_room_a_tree_loses_branches_and_then_its_end(num_pages, expected):
    steps, request, plan, slice_ = waiting_slice(num_pages, max_tokens=None, cache=False)
    assert list(steps.scheduler.add_drafts(slice_, *TREE)) == expected
    assert slice_.drafts == tuple(TREE[0][i] for i in expected)
    assert not request.num_preemptions
    check_scheduler(steps.scheduler)
    steps.land(plan)


def test_pages_of_branches_come_back_when_their_request_ends_in_flight():
    steps, request, plan, slice_ = waiting_slice()
    steps.scheduler.add_drafts(slice_, *TREE)
    steps.cancel("r")
    check_scheduler(steps.scheduler)
    steps.land(plan)
    assert request.is_finished
    check_pool(steps.pool)


@pytest.mark.seeds(60)
def test_the_right_drafts_are_the_longest_matching_path(seed):
    rng = random.Random(seed)
    parents = [rng.randrange(-1, i) for i in range(rng.randint(1, 12))]
    drafts = [rng.randrange(2) for _ in parents]
    steps, _, _, slice_ = waiting_slice(256)
    taken_drafts = steps.scheduler.add_drafts(slice_, drafts, parents)
    assert sorted(taken_drafts) == list(range(len(parents)))
    text = [rng.randrange(2) for _ in range(14)]  # what would be drawn
    result = parents_of(len(drafts), slice_.branches)
    depths = [len(path_to(i, result)) for i in range(len(drafts))]
    drawn_tokens = [text[0], *(text[depth] for depth in depths)]
    right = accepted_drafts(slice_.drafts, slice_.branches, drawn_tokens)
    drafted_tokens = [slice_.drafts[i] for i in right]
    assert drafted_tokens == text[: len(drafted_tokens)]
    assert [result[i] for i in right] == [ROOT, *right][: len(right)]
    ways = ([drafts[i] for i in path_to(node, parents)] for node in range(len(drafts)))
    assert len(drafted_tokens) == max(
        (len(way) for way in ways if way == text[: len(way)]), default=0
    )
