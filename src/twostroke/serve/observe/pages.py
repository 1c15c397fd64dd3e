"""A map of the key-value pages: which are free, cached, held, and by whom."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.engine.view import View

MOST_CELLS: Final = 4096

_FREE, _CACHED, _HELD = 0, 1, 2


def page_map(view: View, num_groups: int) -> dict[str, Any]:
    """Return the map's arrays, a cell for each page or, of many pages, for some in a row.

    `cells`: 0 free, 1 cached, n held by n - 1 requests (255: by 254 or more). A cell of several
    pages is what most of them are, and if held, by the most. `owners`: 0 nobody, else 1 + the
    place, among those who run, of the first that holds it. `cell_groups`: 0 nobody, else 1 + the
    cache group; None where there is but one. All in base64, owners as little-endian uint16.
    """
    counts = np.array(view.counts, np.int32)
    cells = np.minimum(counts + 1, 255).astype(np.uint8)
    cells[counts == 0] = _FREE
    cells[list(view.cached)] = _CACHED
    owners = np.zeros(len(counts), np.uint16)
    groups = np.zeros(len(counts), np.uint8)
    for place in reversed(range(len(view.running))):
        for group, held in enumerate(view.running[place].pages):
            pages = np.array(held, np.int64)
            pages = pages[pages >= 0]
            owners[pages] = place + 1
            groups[pages] = group + 1
    size = max(1, -(-len(counts) // MOST_CELLS))
    if size > 1:
        cells, owners, groups = _together(cells, owners, groups, size)
    return {
        "pages_per_cell": size,
        "cells": _base64(cells),
        "owners": _base64(owners.astype("<u2")),
        "cell_groups": _base64(groups) if num_groups > 1 else None,
    }


def shared_pages(view: View) -> list[int]:
    """Return how many pages of each running request others hold as well."""
    counts = view.counts
    return [
        sum([counts[page] > 1 for pages in request.pages for page in pages if page >= 0])
        for request in view.running
    ]


def _together(
    cells: NDArray[np.uint8], owners: NDArray[np.uint16], groups: NDArray[np.uint8], size: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint8]]:
    """Return the arrays with `size` pages to a cell."""
    padding = -len(cells) % size
    kinds = np.pad(np.minimum(cells, _HELD), (0, padding), constant_values=_HELD + 1)
    kinds = kinds.reshape(-1, size)
    most = np.stack([(kinds == kind).sum(1) for kind in (_HELD, _CACHED, _FREE)])
    kind = _HELD - most.argmax(0)  # of equally many, what is held is shown first
    is_held = kind == _HELD
    rows = [np.pad(array, (0, padding)).reshape(-1, size) for array in (cells, owners, groups)]
    first = np.where(rows[1] == 0, np.iinfo(np.uint16).max, rows[1]).argmin(1)
    at = np.arange(len(kinds)), first
    return (
        np.where(is_held, rows[0].max(1), kind).astype(np.uint8),
        np.where(is_held, rows[1][at], 0).astype(np.uint16),
        np.where(is_held, rows[2][at], 0).astype(np.uint8),
    )


def _base64(array: NDArray[Any]) -> str:
    return b64encode(array.tobytes()).decode()
