"""A map of the key-value pages: which are free, cached, held, and by whom."""

from __future__ import annotations

from array import array
from base64 import b64encode
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.request import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from twostroke.engine.view import View

MOST_CELLS: Final = 4096

_FREE, _CACHED, _HELD = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Pages:
    """How often each page is referred to, and the pages that requests hold.

    `held` are those of all requests together, the last request's first; of each stands beside it
    which request holds it (`holders`, 1 + its place) and for which cache group (`groups`, 1 + its
    place).
    """

    counts: NDArray[np.int32]
    held: NDArray[np.int32]
    holders: NDArray[np.uint16]
    groups: NDArray[np.uint8]

    @classmethod
    def of(cls, view: View) -> Pages:
        """Read a view; hundreds of short tuples become arrays at once."""
        lists = [
            (place, group, pages)
            for place in range(len(view.running), 0, -1)
            for group, pages in enumerate(view.running[place - 1].pages, 1)
        ]
        lengths = [len(pages) for _, _, pages in lists]
        held = _array(chain.from_iterable(pages for _, _, pages in lists))
        is_page = held != NO_PAGE
        holders = np.repeat(np.array([place for place, _, _ in lists], np.uint16), lengths)
        groups = np.repeat(np.array([group for _, group, _ in lists], np.uint8), lengths)
        return cls(_array(view.counts), held[is_page], holders[is_page], groups[is_page])

    def per_request(self, num_requests: int) -> tuple[list[int], list[int]]:
        """Return how many pages each request holds, and how many of them others hold as well."""
        is_shared = self.counts[self.held] > 1
        size = num_requests + 1
        all_, shared = (
            np.bincount(holders, minlength=size)[1:].tolist()
            for holders in (self.holders, self.holders[is_shared])
        )
        return all_, shared

    @property
    def num_shared(self) -> int:
        """How many pages are held by two requests or more."""
        return int((self.counts > 1).sum())


def page_map(pages: Pages, cached: tuple[int, ...], num_groups: int) -> dict[str, Any]:
    """Return the map's arrays, a cell for each page or, of many pages, for some in a row.

    `cells`: 0 free, 1 cached, n held by n - 1 requests (255: by 254 or more). A cell of several
    pages is what most of them are, and if held, by the most. `owners`: 0 nobody, else 1 + the
    place, among those who run, of the first that holds it. `cell_groups`: 0 nobody, else 1 + the
    cache group; None where there is but one. All in base64, owners as little-endian uint16.
    """
    counts = pages.counts
    cells = np.minimum(counts + 1, 255).astype(np.uint8)
    cells[counts == 0] = _FREE
    cells[_array(cached)] = _CACHED
    owners = np.zeros(len(counts), np.uint16)
    groups = np.zeros(len(counts), np.uint8)
    owners[pages.held] = pages.holders  # of several holders the last stands, which is the first
    groups[pages.held] = pages.groups
    size = max(1, -(-len(counts) // MOST_CELLS))
    if size > 1:
        cells, owners, groups = _together(cells, owners, groups, size)
    return {
        "pages_per_cell": size,
        "cells": _base64(cells),
        "owners": _base64(owners.astype("<u2")),
        "cell_groups": _base64(groups) if num_groups > 1 else None,
    }


def _together(
    cells: NDArray[np.uint8], owners: NDArray[np.uint16], groups: NDArray[np.uint8], size: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint8]]:
    """Return the arrays with `size` pages to a cell."""
    kinds = _columns(np.minimum(cells, _HELD), size, _HELD + 1)
    most = np.stack([(kinds == kind).sum(0) for kind in (_HELD, _CACHED, _FREE)])
    kind = _HELD - most.argmax(0)  # of equally many, what is held is shown first
    is_held = kind == _HELD
    most_held, owner, group = (_columns(one, size, 0) for one in (cells, owners, groups))
    first = np.where(owner == 0, np.iinfo(np.uint16).max, owner).argmin(0)
    at = first, np.arange(kinds.shape[1])
    return (
        np.where(is_held, most_held.max(0), kind).astype(np.uint8),
        np.where(is_held, owner[at], 0).astype(np.uint16),
        np.where(is_held, group[at], 0).astype(np.uint8),
    )


def _columns(pages: NDArray[Any], size: int, padding: int) -> NDArray[Any]:
    """Return an array (size, cells): numpy is quick along the second axis."""
    padded = np.pad(pages, (0, -len(pages) % size), constant_values=padding)
    return np.ascontiguousarray(padded.reshape(-1, size).T)


def _array(numbers: Iterable[int]) -> NDArray[np.int32]:
    """Return numbers as an array, three times faster than numpy would by itself."""
    return np.frombuffer(array("i", numbers), np.int32)


def _base64(array: NDArray[Any]) -> str:
    return b64encode(array.tobytes()).decode()
