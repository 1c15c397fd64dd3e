"""Trees of drafts: the token that each draft follows, and the path of right drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = -1  # the request's newest token, which the first drafts follow


class DraftBranch(Frozen):
    """Drafts, from index `first` to the next branch's, that leave the path of earlier ones.

    Each follows the previous draft; the first follows draft `parent` (or `ROOT`), at `position`. A
    row sees only its ancestors, so a branch has separate pages. `pages` has a list for each cache
    group, for the places from `place` on; earlier ones are the request's. The last `num_own` pages
    of each list belong to this branch, the others to its parent.

    The first own page begins with tokens that the branch shares with others. The rows `above` of
    this step (counted from the slice's first; they end at `position` - 1) are stored there too. If
    older tokens share the page, it begins as a copy of the request's page: `is_copied`.
    """

    first: int
    parent: int
    position: int
    place: int
    pages: tuple[tuple[int, ...], ...]
    num_own: int
    above: tuple[int, ...]
    is_copied: bool

    @property
    def own_place(self) -> int:
        """The place of the branch's first own page."""
        return self.place + len(self.pages[0]) - self.num_own

    @property
    def own_pages(self) -> list[int]:
        """The branch's own pages, of all groups, in the order of their places."""
        own = [pages[-self.num_own :] for pages in self.pages]
        return [page for at_place in zip(*own, strict=True) for page in at_place]


def parents_of(num_drafts: int, branches: Sequence[DraftBranch]) -> list[int]:
    """Return which draft each draft follows, or `ROOT`."""
    parents = list(range(-1, num_drafts - 1))
    for branch in branches:
        parents[branch.first] = branch.parent
    return parents


def path_to(draft: int, parents: Sequence[int]) -> list[int]:
    """Return the path from the root to a draft, which is its last entry; empty for `ROOT`."""
    path = []
    while draft != ROOT:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]


def depths_of(num_drafts: int, branches: Sequence[DraftBranch]) -> list[int]:
    """Return how many drafts precede each draft on its path."""
    depths = list(range(num_drafts))
    for branch, end in ends_of(num_drafts, branches):
        depth = 0 if branch.parent == ROOT else depths[branch.parent] + 1
        depths[branch.first : end] = range(depth, depth + end - branch.first)
    return depths


def ends_of(num_drafts: int, branches: Sequence[DraftBranch]) -> Iterator[tuple[DraftBranch, int]]:
    """Yield each branch with the end of its drafts' indices."""
    ends = [branch.first for branch in branches[1:]]
    return zip(branches, [*ends, num_drafts], strict=True) if branches else iter(())


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many drafts of a chain were right.

    `drawn[i]` was drawn after the first i drafts. If these are right, it is what would have been
    drawn without drafts, at any temperature: a draw depends only on the logits, the seed and the
    token's index. So the first `num_accepted + 1` of `drawn` are the request's next tokens.
    """
    accepted = 0
    for draft, token in zip(drafts, drawn, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted


def right_drafts(
    drafts: Sequence[int], branches: Sequence[DraftBranch], drawn: Sequence[int]
) -> Sequence[int]:
    """Return the indices of the right drafts, each following the previous one.

    `drawn[0]` was drawn after the request's newest token, `drawn[1 + i]` after draft i. The
    request's next tokens are `drawn[0]` and those drawn after the right drafts.
    """
    if not branches:
        return range(num_accepted(drafts, drawn))
    parents = parents_of(len(drafts), branches)
    deepest, reached = ROOT, {ROOT: 0}  # accepted tokens, and how far they reach
    for draft, (token, parent) in enumerate(zip(drafts, parents, strict=True)):
        if parent in reached and token == drawn[parent + 1]:
            reached[draft] = reached[parent] + 1
            if reached[draft] > reached[deepest]:
                deepest = draft
    return path_to(deepest, parents)
