"""A map of the key-value pages: which are free, cached or held, and by which request."""

from __future__ import annotations

from array import array
from base64 import b64encode
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from twostroke.engine.status import RunningRequests

MOST_CELLS: Final = 4096

_FREE, _CACHED = 0, 1


class PageUsage(Frozen):
    """How many requests hold each page, and which pages each of them holds.

    `held` has the pages of all running requests, those of the last request first. `holders` and
    `groups` have the request and the cache group of each, as 1 + index.
    """

    counts: NDArray[np.int32]
    held: NDArray[np.int32]
    holders: NDArray[np.uint16]
    groups: NDArray[np.uint8]

    @classmethod
    def of(cls, view: RunningRequests) -> PageUsage:
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
        shared = self.holders[self.counts[self.held] > 1]
        counts = [np.bincount(one, minlength=num_requests + 1) for one in (self.holders, shared)]
        return counts[0][1:].tolist(), counts[1][1:].tolist()

    @property
    def num_shared(self) -> int:
        """How many pages are held by two requests or more."""
        return int((self.counts > 1).sum())


def page_map(pages: PageUsage, cached: tuple[int, ...], num_groups: int) -> dict[str, Any]:
    """Return the map's arrays, with a cell for each page or, of many pages, for several in a row.

    `cells`: 0 free, 1 cached, n held by n - 1 requests (255: by 254 or more). A cell of several
    pages shows the one that most requests hold. `owners`: 0 nobody, else 1 + the index of the first
    running request that holds it. `cell_groups`: 0 none, else 1 + the cache group; None if there
    is only one. All in base64, owners as little-endian uint16.
    """
    counts = pages.counts
    cells = np.minimum(counts + 1, 255).astype(np.uint8)
    cells[counts == 0] = _FREE
    cells[_array(cached)] = _CACHED
    owners = np.zeros(len(counts), np.uint16)
    groups = np.zeros(len(counts), np.uint8)
    owners[pages.held] = pages.holders  # the last assignment wins, which is the first request's
    groups[pages.held] = pages.groups
    size = max(1, -(-len(counts) // MOST_CELLS))
    if size > 1:
        rows = [_rows(one, size) for one in (cells, owners, groups)]
        most = rows[0].argmax(1, keepdims=True)
        cells, owners, groups = (np.take_along_axis(one, most, 1) for one in rows)
    return {
        "pages_per_cell": size,
        "cells": _base64(cells),
        "owners": _base64(owners.astype("<u2")),
        "cell_groups": _base64(groups) if num_groups > 1 else None,
    }


def _rows(pages: NDArray[Any], size: int) -> NDArray[Any]:
    """Return an array (cells, size)."""
    return np.pad(pages, (0, -len(pages) % size)).reshape(-1, size)


def _array(numbers: Iterable[int]) -> NDArray[np.int32]:
    """Return numbers as an array, three times faster than numpy would by itself."""
    return np.frombuffer(array("i", numbers), np.int32)


def _base64(array: NDArray[Any]) -> str:
    return b64encode(array.tobytes()).decode()
