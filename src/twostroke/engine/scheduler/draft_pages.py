"""Adds speculative drafts to a step: their rows, and their pages until the step is committed."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.core.draft_tree import ROOT, DraftBranch, path_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.step import Slice
    from twostroke.engine.kv_cache import PagePool
    from twostroke.engine.scheduler.kv_cache_manager import KvCacheManager
    from twostroke.engine.scheduler.recurrent_states import RecurrentStates


class DraftPages:
    """Gives draft tokens rows and KV pages in a planned step; keeps accepted pages at commit.

    A chain of drafts is written to the request's own pages. A branch of a draft tree gets separate
    pages from the point where it leaves the path of the other drafts. If the branch is accepted,
    its pages become the request's pages, so keys and values are never copied. No request is
    preempted to make room for drafts.

    In models with recurrent layers each draft also gets a slot for the state after it, and drafts
    are always a chain: the first chain of a tree.
    """

    def __init__(
        self, pool: PagePool, kv_cache: KvCacheManager, states: RecurrentStates | None = None
    ) -> None:
        """Allocate KV pages for drafts from `pool`.

        `states` gives drafts their slots for recurrent states; None for models without such states.
        """
        self._states = states
        self._pool = pool
        self._page_size = pool.page_size
        self._kv_cache = kv_cache

    def add(
        self,
        slice_: Slice,
        drafts: Sequence[int],
        parents: Sequence[int],
        *,
        max_depth: int,
        num_running: int,
    ) -> Sequence[int]:
        """Add draft tokens to a request's slice while there are pages for them.

        The slice is the request's part of a planned step. The slice is the request's part of a
        planned step. Returns the indices of the added drafts, in the order of their rows. Without
        `parents` the drafts are a chain. Otherwise `parents[i]` is the index of the draft before
        draft i, or `ROOT`; of drafts with the same parent, the likeliest comes first. Paths are cut
        after `max_depth` drafts.

        Each of the `num_running` running requests can still get one more page afterwards. If that
        leaves too few pages, branches are dropped first, the last one first, and then the end of
        the main chain.
        """
        order: Sequence[int] = range(len(drafts))
        if parents:
            order, parents = depth_first(parents, max_depth)
        branch_starts = [index for index, parent in enumerate(parents) if parent != index - 1]
        chain_length = min(branch_starts[0] if branch_starts else len(order), max_depth)
        if self._states is not None:
            chain_length = min(chain_length, self._states.num_spare)
            branch_starts = []
        room = self._grow(slice_, chain_length, num_running)
        if room < chain_length or not branch_starts:
            order = order[: max(0, min(room, chain_length))]
        else:
            bounds = [*branch_starts, len(order)]
            slice_.branches = tuple(self._branches(slice_, parents, bounds, num_running))
            order = order[: bounds[len(slice_.branches)]]
        slice_.drafts = tuple([drafts[index] for index in order])
        if self._states is not None:
            self._states.add_drafts(slice_)
        return order

    def settle(self, slice_: Slice, last_accepted: int) -> None:
        """Keep the KV pages and recurrent state of accepted drafts; release pages of wrong drafts.

        `last_accepted` is the index of the last accepted draft, or `ROOT` if none was accepted.
        """
        if slice_.draft_states and self._states is not None:
            self._states.settle(slice_, last_accepted)
        self._settle_pages(slice_, last_accepted)

    def undo(self, slice_: Slice) -> None:
        """Release the KV pages and state slots of a slice's drafts, because its step is undone."""
        if self._states is not None:
            self._states.undo(slice_)
        self._settle_pages(slice_, ROOT)

    def _settle_pages(self, slice_: Slice, last_accepted: int) -> None:
        request, branches = slice_.request, slice_.branches
        if not branches:
            return
        num_begun = bisect_right(branches, last_accepted, key=lambda branch: branch.first)
        released = [page for branch in branches for page in branch.own_pages]
        if num_begun:
            winner = branches[num_begun - 1]
            winner_pages = {page for pages in winner.pages for page in pages}
            for pages, new_pages in zip(request.pages, winner.pages, strict=True):
                released += pages[winner.page_index :]
                pages[winner.page_index :] = new_pages
            released = [page for page in released if page not in winner_pages]
            request.num_moves += 1
        self._pool.release(released)

    def _grow(self, slice_: Slice, num_drafts: int, num_running: int) -> int:
        """Allocate pages for a chain of drafts after a request's slice.

        Returns the number of drafts for which there is room.

        One page per cache group is left for each of the `num_running` running requests.
        """
        request, page_size = slice_.request, self._page_size
        room = len(request.pages[0]) * page_size - slice_.start - slice_.count
        if room < num_drafts:
            num_missing_pages = -(-(num_drafts - room) // page_size)
            num_new_pages = min(num_missing_pages, self._kv_cache.num_spare(num_running))
            room += page_size * self._kv_cache.grow(request, num_new_pages)
        return room

    def _branches(
        self, slice_: Slice, parents: Sequence[int], bounds: Sequence[int], num_running: int
    ) -> list[DraftBranch]:
        """Allocate KV pages for the branches of a draft tree, until the pool has no spare pages.

        `bounds` has the index of the first draft of each branch and, as its last value, the number
        of all drafts. Returns the branches that got pages. A page per cache group is left for each
        of the `num_running` running requests.
        """
        page_size, request = self._page_size, slice_.request
        assert slice_.count == 1, "only a slice of one row may have a draft tree"
        first_page = (slice_.start + slice_.count) // page_size  # the first that may differ
        num_spare = self._kv_cache.num_spare(num_running)
        branches: list[DraftBranch] = []
        for first, end in pairwise(bounds):
            parent = parents[first]
            rows_above = [0, *(1 + draft for draft in path_to(parent, parents))]
            position = slice_.start + len(rows_above)
            first_own_page = position // page_size
            num_own = (position + end - first - 1) // page_size - first_own_page + 1
            if num_own > num_spare:
                break
            num_spare -= num_own
            num_begun = bisect_right(branches, parent, key=lambda branch: branch.first)
            parent_pages: Sequence[Sequence[int]] = (
                branches[num_begun - 1].pages
                if num_begun
                else [pages[first_page:] for pages in request.pages]
            )
            num_inherited = first_own_page - first_page
            pages = tuple(
                (*inherited[:num_inherited], *self._pool.allocate(num_own))
                for inherited in parent_pages
            )
            first_stored = max(first_own_page * page_size, slice_.start)
            branch = DraftBranch(
                first=first,
                parent=parent,
                position=position,
                page_index=first_page,
                pages=pages,
                num_own=num_own,
                above=tuple(rows_above[first_stored - slice_.start :]),
                is_copied=first_own_page * page_size < slice_.start,
            )
            branches.append(branch)
        return branches


def depth_first(parents: Sequence[int], max_depth: int) -> tuple[list[int], list[int]]:
    """Return a draft tree's nodes in depth-first order, and their parents renumbered in this order.

    `DraftPages.add` gives drafts rows in this order: each node is directly followed by its first
    child, so the path of first children is a chain. Nodes deeper than `max_depth` are dropped.
    """
    children: dict[int, list[int]] = {}
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        if depths[node] < max_depth:
            children.setdefault(parent, []).append(node)
    order: list[int] = []
    new_parents: list[int] = []
    new_index = {ROOT: ROOT}
    stack = children.get(ROOT, [])[::-1]
    while stack:
        node = stack.pop()
        new_index[node] = len(order)
        order.append(node)
        new_parents.append(new_index[parents[node]])
        stack += children.get(node, [])[::-1]
    return order, new_parents
