"""Trees of draft tokens: which draft each draft follows, and which drafts are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = -1  # the request's newest token, which the first drafts follow


class DraftBranch(Frozen):
    """One branch of a draft tree: a chain of draft tokens that leaves an earlier chain.

    Drafts are the proposed tokens of speculative decoding. The first chain of a tree uses the
    request's own KV pages. Each branch proposes other tokens for the same positions, so it needs
    separate KV pages. The first of these starts with tokens that the branch has in common with the
    chain that it leaves.

    Attributes:
        first: the index of the branch's first draft. The branch ends before the next branch's first
            draft, and each of its drafts follows the previous one.
        parent: the draft that the first draft follows, or `ROOT`.
        position: the token position of the first draft.
        page_index: the index in the request's page lists from which `pages` replaces the request's
            pages for this branch.
        pages: for each cache group, the ids of the branch's pages from `page_index` on.
        num_own: how many pages at the end of each list belong to this branch alone; the pages
            before belong to the chain that the branch leaves.
        above: indices, counted from the slice's first row, of the rows of this step whose keys and
            values are also stored in the branch's first own page, up to the token before
            `position`.
        is_copied: whether the first own page begins as a copy of the request's page, because tokens
            of earlier steps are in it.
    """

    first: int
    parent: int
    position: int
    page_index: int
    pages: tuple[tuple[int, ...], ...]
    num_own: int
    above: tuple[int, ...]
    is_copied: bool

    @property
    def own_page_index(self) -> int:
        """The index, in the request's page lists, of the first page that only this branch uses."""
        return self.page_index + len(self.pages[0]) - self.num_own

    @property
    def own_pages(self) -> list[int]:
        """The ids of the KV pages that only this branch uses.

        For each page index, the list has one page of each cache group.
        """
        own_pages = [pages[-self.num_own :] for pages in self.pages]
        return [page for pages_at_index in zip(*own_pages, strict=True) for page in pages_at_index]


def parents_of(num_drafts: int, branches: Sequence[DraftBranch]) -> list[int]:
    """Return, for each draft of a tree, the index of the draft that it follows.

    The result has `num_drafts` entries. `ROOT` stands for the request's newest token.
    """
    parents = list(range(-1, num_drafts - 1))
    for branch in branches:
        parents[branch.first] = branch.parent
    return parents


def path_to(draft: int, parents: Sequence[int]) -> list[int]:
    """Return the indices of the drafts on the path from a draft tree's root to a draft.

    `parents` is the result of `parents_of`. The draft itself is the last; the path of `ROOT` is
    empty.
    """
    path = []
    while draft != ROOT:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]


def depths_of(num_drafts: int, branches: Sequence[DraftBranch]) -> list[int]:
    """Return, for each draft of a tree, how many drafts are before it on its path from the root.

    The result has `num_drafts` entries; it is 0 for a draft that follows the request's newest
    token.
    """
    depths = list(range(num_drafts))
    for branch, end in branches_with_ends(num_drafts, branches):
        depth = 0 if branch.parent == ROOT else depths[branch.parent] + 1
        depths[branch.first : end] = range(depth, depth + end - branch.first)
    return depths


def branches_with_ends(
    num_drafts: int, branches: Sequence[DraftBranch]
) -> Iterator[tuple[DraftBranch, int]]:
    """Yield each branch of a draft tree with the index after its last draft.

    A `DraftBranch` stores only where it begins.
    """
    ends = [branch.first for branch in branches[1:]]
    return zip(branches, [*ends, num_drafts], strict=True) if branches else iter(())


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many drafts of a chain are accepted: all drafts before the first wrong draft.

    A draft is right if it equals the token that was sampled at its position: `sampled[i]` was
    sampled after the first i drafts. If these drafts are right, `sampled[i]` is the token that
    would be sampled without drafts, at any temperature, because sampling depends only on the
    logits, the seed and the token's index. So the first `num_accepted + 1` sampled tokens are the
    request's next tokens.
    """
    accepted = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted


def accepted_drafts(
    drafts: Sequence[int], branches: Sequence[DraftBranch], sampled: Sequence[int]
) -> Sequence[int]:
    """Return the indices of the accepted drafts of a draft tree, from the root downwards.

    A draft is accepted if it equals the token that was sampled after the draft before it.
    `sampled[0]` was sampled after the request's newest token, `sampled[1 + i]` after draft i. The
    request's next tokens are `sampled[0]` and the tokens sampled after the accepted drafts.
    """
    if not branches:
        return range(num_accepted(drafts, sampled))
    parents = parents_of(len(drafts), branches)
    deepest = ROOT
    depth_by_draft = {ROOT: 0}  # of accepted drafts
    for draft, (token, parent) in enumerate(zip(drafts, parents, strict=True)):
        if parent in depth_by_draft and token == sampled[parent + 1]:
            depth_by_draft[draft] = depth_by_draft[parent] + 1
            if depth_by_draft[draft] > depth_by_draft[deepest]:
                deepest = draft
    return path_to(deepest, parents)
