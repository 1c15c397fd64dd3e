"""A step as rows: which spans of requests it holds, and where their keys and values lie.

For readers that interpret a Program one operation after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.request import NO_PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.step import Slice
    from twostroke.program import Program

    Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence: `rows` of the step, at `start`, and its `pages`."""

    rows: slice
    start: int
    pages: Numbers  # (groups, places)


def flatten(slices: tuple[Slice, ...]) -> tuple[Numbers, Numbers, tuple[Span, ...], Numbers]:
    """Return a step's tokens, their positions, the spans, and the rows that are sampled."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    sampled: list[int] = []
    for part in slices:
        rows = slice(len(tokens), len(tokens) + part.num_rows)
        tokens += part.request.tokens[part.start : part.start + part.count]
        tokens += part.drafts
        positions += range(part.start, part.start + part.num_rows)
        spans.append(Span(rows, part.start, np.array(part.request.pages, np.int64)))
        sampled += range(rows.stop - part.num_drawn, rows.stop)
    return np.array(tokens), np.array(positions), tuple(spans), np.array(sampled, np.int64)


class PageMap:
    """Where each layer's keys and values lie when all pages are one matrix, a row (slot) a token.

    A page is `page_size` slots of whichever cache group it was given to, and each layer of the
    group has its columns beside the others': `width` values in all.
    """

    def __init__(self, program: Program, page_size: int) -> None:
        """Give every layer its columns."""
        self.page_size = page_size
        self._layers = program.cache_layers
        self._places: dict[int, tuple[int, int]] = {}  # group and first value of each layer
        self.width = 0
        for number, group in enumerate(program.cache_groups):
            first = 0
            for layer in group.layers:
                self._places[layer] = number, first
                first += self._layers[layer].values_per_token
            self.width = max(self.width, first)

    def slots(self, span: Span, layer: int, first: int, end: int) -> Numbers:
        """Return where a layer's positions `first` to `end` - 1 of a sequence lie."""
        positions = np.arange(first, end)
        pages = span.pages[self._places[layer][0], positions // self.page_size]
        assert (pages != NO_PAGE).all(), "a row reads behind its window"
        slots: Numbers = pages * self.page_size + positions % self.page_size
        return slots

    def columns(self, layer: int) -> tuple[slice, slice]:
        """Return which columns hold a layer's keys and its values."""
        first, width = self._places[layer][1], self._layers[layer].values_per_token // 2
        return slice(first, first + width), slice(first + width, first + 2 * width)
