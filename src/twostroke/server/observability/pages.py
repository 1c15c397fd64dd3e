"""The dashboard's map of KV pages: which pages are free, cached or held, and by which request."""

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

MAX_CELLS: Final = 4096

_FREE_CELL: Final = 0
_CACHED_CELL: Final = 1


class PageUsage(Frozen):
    """Which KV pages the running requests of an engine hold.

    Attributes:
        counts: the number of requests that hold each page of the cache.
        held_pages: the page indexes that the running requests hold, request by request, with the
            last request first.
        holders: 1 + the index of the request, for each entry of `held_pages`.
        groups: 1 + the index of the cache group, for each entry of `held_pages`.
    """

    counts: NDArray[np.int32]
    held_pages: NDArray[np.int32]
    holders: NDArray[np.uint16]
    groups: NDArray[np.uint8]

    @classmethod
    def of(cls, view: RunningRequests) -> PageUsage:
        """Collect the KV pages that the running requests hold."""
        lists = [
            (request_number, group, pages)
            for request_number in range(len(view.running), 0, -1)
            for group, pages in enumerate(view.running[request_number - 1].pages, 1)
        ]
        lengths = [len(pages) for _, _, pages in lists]
        held_pages = _int_array(chain.from_iterable(pages for _, _, pages in lists))
        is_page = held_pages != NO_PAGE
        holders = np.repeat(
            np.array([request_number for request_number, _, _ in lists], np.uint16), lengths
        )
        groups = np.repeat(np.array([group for _, group, _ in lists], np.uint8), lengths)
        return cls(_int_array(view.counts), held_pages[is_page], holders[is_page], groups[is_page])

    def per_request(self, num_requests: int) -> tuple[list[int], list[int]]:
        """Return how many KV pages each request holds, and how many of these others hold, too."""
        shared = self.holders[self.counts[self.held_pages] > 1]
        counts = [
            np.bincount(owners, minlength=num_requests + 1) for owners in (self.holders, shared)
        ]
        return counts[0][1:].tolist(), counts[1][1:].tolist()

    @property
    def num_shared(self) -> int:
        """The number of KV pages that two or more requests hold."""
        return int((self.counts > 1).sum())


def page_map(pages: PageUsage, cached: tuple[int, ...], num_groups: int) -> dict[str, Any]:
    """Build the arrays with which the dashboard draws its map of KV pages, in base64.

    `cached` has the indices of pages that only the prefix cache keeps; `num_groups` is the number
    of cache groups (attention layers whose keys and values share pages). A cell of the map stands
    for one page, or for `pages_per_cell` adjacent pages; it then shows the
    page with the most holders. The arrays have a value for each cell:

    - `cells`: 0 for a free page, 1 for a cached page, n for a page that n - 1 requests hold; 255 if
      254 or more requests hold it.
    - `owners`: 1 + the index of the first running request that holds the page, 0 if no request
      does; little-endian uint16.
    - `cell_groups`: 1 + the index of the cache group, 0 for no group. The array is None if there is
      only one group.
    """
    counts = pages.counts
    cells = np.minimum(counts + 1, 255).astype(np.uint8)
    cells[counts == 0] = _FREE_CELL
    cells[_int_array(cached)] = _CACHED_CELL
    owners = np.zeros(len(counts), np.uint16)
    groups = np.zeros(len(counts), np.uint8)
    owners[pages.held_pages] = (
        pages.holders
    )  # the last assignment wins, so the first request's stays
    groups[pages.held_pages] = pages.groups
    size = max(1, -(-len(counts) // MAX_CELLS))
    if size > 1:
        rows = [_cell_rows(array_, size) for array_ in (cells, owners, groups)]
        shown_columns = rows[0].argmax(1, keepdims=True)
        cells, owners, groups = (np.take_along_axis(array_, shown_columns, 1) for array_ in rows)
    return {
        "pages_per_cell": size,
        "cells": _base64(cells),
        "owners": _base64(owners.astype("<u2")),
        "cell_groups": _base64(groups) if num_groups > 1 else None,
    }


def _cell_rows(pages: NDArray[Any], size: int) -> NDArray[Any]:
    """Reshape an array with a value for each KV page to (cells, size), padded with 0."""
    return np.pad(pages, (0, -len(pages) % size)).reshape(-1, size)


def _int_array(numbers: Iterable[int]) -> NDArray[np.int32]:
    """Convert integers to an array; three times faster than `np.array`."""
    return np.frombuffer(array("i", numbers), np.int32)


def _base64(array: NDArray[Any]) -> str:
    return b64encode(array.tobytes()).decode()
