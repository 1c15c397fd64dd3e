"""Drafts of a step: their rows, and their pages until the step is committed."""

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


class DraftPages:
    """Lays drafts out as rows, and takes the pages of branches until the step's commit.

    A chain is written to the request's own pages. A branch of a tree has pages of its own from the
    place where it leaves the others' path. If its drafts are right, these become the request's, so
    keys and values never move. No request is preempted for drafts.
    """

    def __init__(self, pool: PagePool, holdings: KvCacheManager) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._holdings = holdings

    def add(
        self,
        piece: Slice,
        drafts: Sequence[int],
        parents: Sequence[int],
        most: int,
        num_running: int,
    ) -> Sequence[int]:
        """Add the drafts for which there is room to a slice; return which, in the rows' order.

        Each of `drafts` follows the one before it, or if there are `parents`, the one with that
        index, or `ROOT`; a better sibling comes first. Paths are cut after `most` drafts. Each
        running request keeps a page to grow into; where the others do not suffice, branches are
        left out, the last one first, before the chain along the best siblings is cut.
        """
        order, parents = depth_first(parents, most) if parents else (range(len(drafts)), ())
        cuts = [i for i, parent in enumerate(parents) if parent != i - 1]
        num_chain = min(cuts[0] if cuts else len(order), most)
        room = self._grow(piece, num_chain, num_running)
        if room < num_chain or not cuts:
            order = order[: max(0, min(room, num_chain))]
        else:
            ends = [*cuts, len(order)]
            piece.branches = tuple(self._branches(piece, parents, ends, num_running))
            order = order[: ends[len(piece.branches)]]
        piece.drafts = tuple([drafts[i] for i in order])
        return order

    def settle(self, piece: Slice, last: int) -> None:
        """Give a request the pages of the path to draft `last` (or `ROOT`); release the others."""
        request, branches = piece.request, piece.branches
        if not branches:
            return
        at = bisect_right(branches, last, key=lambda branch: branch.first)
        taken = [page for branch in branches for page in branch.own_pages]
        if at:
            winner = branches[at - 1]
            kept = {page for pages in winner.pages for page in pages}
            for pages, others in zip(request.pages, winner.pages, strict=True):
                taken += pages[winner.place :]
                pages[winner.place :] = others
            taken = [page for page in taken if page not in kept]
            request.num_moves += 1
        self._pool.release(taken)

    def _grow(self, piece: Slice, wanted: int, num_running: int) -> int:
        """Take pages for drafts after a slice; return for how many there is room."""
        request, page_size = piece.request, self._page_size
        room = len(request.pages[0]) * page_size - piece.start - piece.count
        if room < wanted:
            num_places = min(
                -(-(wanted - room) // page_size), self._holdings.num_spare(num_running)
            )
            room += page_size * self._holdings.grow(request, num_places)
        return room

    def _branches(
        self, piece: Slice, parents: Sequence[int], cuts: Sequence[int], num_running: int
    ) -> list[DraftBranch]:
        """Return the branches that begin at all `cuts` but the last, while there are pages."""
        size, request, end = self._page_size, piece.request, piece.start + piece.count
        assert piece.count == 1, "only a slice of one row may have a tree"
        place = end // size
        spare = self._holdings.num_spare(num_running)
        branches: list[DraftBranch] = []
        for first, after in pairwise(cuts):
            parent = parents[first]
            path = [0, *(1 + draft for draft in path_to(parent, parents))]  # rows of the slice
            position = piece.start + len(path)
            own_place = position // size
            num_own = (position + after - first - 1) // size - own_place + 1
            if num_own > spare:
                break
            spare -= num_own
            at = bisect_right(branches, parent, key=lambda branch: branch.first)
            before = (
                [pages[place:] for pages in request.pages] if not at else branches[at - 1].pages
            )
            oldest = max(own_place * size, piece.start)
            branches.append(
                DraftBranch(
                    first,
                    parent,
                    position,
                    place,
                    tuple(
                        (*pages[: own_place - place], *self._pool.allocate(num_own))
                        for pages in before
                    ),
                    num_own,
                    tuple(path[oldest - piece.start :]),
                    is_copied=own_place * size < piece.start,
                )
            )
        return branches


def depth_first(parents: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """Return nodes of a tree so that each is followed by its first child, and their new parents.

    Only paths of up to `most` nodes are kept.
    """
    children: dict[int, list[int]] = {}
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        if depths[node] < most:
            children.setdefault(parent, []).append(node)
    order: list[int] = []
    new_parents: list[int] = []
    new_index = {ROOT: ROOT}
    waiting = children.get(ROOT, [])[::-1]
    while waiting:
        node = waiting.pop()
        new_index[node] = len(order)
        order.append(node)
        new_parents.append(new_index[parents[node]])
        waiting += children.get(node, [])[::-1]
    return order, new_parents
