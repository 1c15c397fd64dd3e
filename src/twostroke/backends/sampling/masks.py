"""Masks of tokens that a constraint allows, a bit each, for the rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.draft_tree import parents_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import Slice


def fill_masks(request: Request, part: Slice | None, out: NDArray[np.uint32]) -> None:
    """Write the masks of all tokens that are drawn for a request, whose slice may have drafts."""
    assert request.matcher is not None
    drafts, branches = (part.drafts, part.branches) if part is not None else ((), ())
    request.matcher.masks(request.output, drafts, parents_of(len(drafts), branches), out)


def allows_only(mask: NDArray[np.uint32], ids: Iterable[int]) -> bool:
    """Return whether a mask leaves no token but some of `ids`."""
    rest = mask.copy()
    for token in ids:
        if token // 32 < rest.size:
            rest[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return not rest.any()


def as_flags(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Return a flag for each token, (vocab_size,)."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)
