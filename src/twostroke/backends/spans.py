"""A step as rows: the spans of requests in it, and where their keys and values are.

For readers that interpret a Program one operation after another.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import field

from twostroke.core.draft_tree import ends_of
from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_PAGE
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.step_frame import StepFrame
    from twostroke.core.step import Slice
    from twostroke.model.program import Program

    Numbers = NDArray[np.int64]
    Rows: TypeAlias = "tuple[Numbers, Numbers, tuple[RowSpan, ...], Numbers]"


class RowSpan(Frozen):
    """Consecutive rows of one sequence: `rows` of the step, at `start`, and its `pages`.

    Keys and values of the rows `above`, at the positions just before `start`, are also stored in
    these pages. `copies` are pages that first become copies of others: (target, source).
    """

    rows: slice
    start: int
    pages: Numbers  # (groups, places)
    above: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The position after the last row's."""
        return self.start + int(self.rows.stop - self.rows.start)

    @property
    def stored_rows(self) -> Numbers:
        """The rows whose keys and values are stored in these pages, the last at the end."""
        return np.concatenate([self.above, np.arange(self.rows.start, self.rows.stop)])


def flatten(slices: tuple[Slice, ...]) -> Rows:
    """Return a step's tokens, their positions, the spans, and the rows with logits."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[RowSpan] = []
    sampled: list[int] = []
    for part in slices:
        first = len(tokens)
        tokens += part.request.tokens[part.start : part.start + part.count]
        tokens += part.drafts
        for span in _spans(part, first):
            spans.append(span)
            positions += range(span.start, span.end)
        sampled += range(len(tokens) - part.num_with_logits, len(tokens))
    return np.array(tokens), np.array(positions), tuple(spans), np.array(sampled, np.int64)


def unpack(frame: StepFrame) -> Rows:
    """Return the same as `flatten`, for a step that rank 0 sent."""
    spans: list[RowSpan] = []
    stored = frame.stores.astype(np.int64)
    copies = tuple((target, source) for source, target in frame.copies.tolist())
    for first, count, start, table in frame.slices.tolist():
        above = stored[stored[:, 1] == table, 0]
        pages = frame.page_tables[table].astype(np.int64)
        spans.append(RowSpan(slice(first, first + count), start, pages, above, copies))
        copies = ()  # they are the whole step's
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    tokens, sampled = (a.astype(np.int64) for a in (frame.tokens, frame.sampled_rows))
    return tokens, positions, tuple(spans), sampled


def _spans(part: Slice, first: int) -> Iterator[RowSpan]:
    """Yield the spans of a slice that begins at row `first`: the main one, and branches."""
    pages = np.array(part.request.pages, np.int64)
    end = part.branches[0].first if part.branches else len(part.drafts)
    yield RowSpan(slice(first, first + part.count + end), part.start, pages)
    for branch, end in ends_of(len(part.drafts), part.branches):
        own = np.array(branch.pages, np.int64)
        copies: tuple[tuple[int, int], ...] = ()
        if branch.is_copied:
            place = branch.own_place
            copies = tuple(zip(own[:, place - branch.place], pages[:, place], strict=True))
        yield RowSpan(
            slice(first + part.count + branch.first, first + part.count + end),
            branch.position,
            np.concatenate([pages[:, : branch.place], own], axis=1),
            first + np.array(branch.above, np.int64),
            copies,
        )


def pooled_rows(slices: Sequence[Slice]) -> list[slice]:
    """Return the rows of a step whose hidden states are wanted, for each slice with some."""
    ends = accumulate(part.num_rows for part in slices)
    pairs = zip(ends, slices, strict=True)
    return [slice(end - part.num_pooled, end) for end, part in pairs if part.num_pooled]


class PageMap:
    """Where each layer's keys and values are if all pages are one matrix with a row for each token.

    A page is `page_slots` rows (slots) of the cache group that uses it: as many as it has tokens,
    or one piece if ranks divide them by places. Each layer of the group has some columns; together
    they are at most `width` values wide.
    """

    def __init__(self, program: Program, page_size: int) -> None:
        """Give every layer its columns."""
        self._layers = program.cache_layers
        num_ranks = max([layer.num_kv_ranks for layer in self._layers], default=1)
        assert num_ranks == 1 or page_size == KV_SPLIT_TOKENS * num_ranks, (
            "a page has a KV split for each rank"
        )
        self._page_size, self.page_slots = page_size, page_size // num_ranks
        self._places: dict[int, tuple[int, int]] = {}  # group and first value of each layer
        self.width = 0
        for number, group in enumerate(program.cache_groups):
            first = 0
            for layer in group.layers:
                self._places[layer] = number, first
                first += self._layers[layer].values_per_token
            self.width = max(self.width, first)

    def slots(self, span: RowSpan, layer: int, positions: Numbers) -> Numbers:
        """Return where a layer's positions lie, those that this rank stores."""
        pages = span.pages[self._places[layer][0], positions // self._page_size]
        assert (pages != NO_PAGE).all(), "a row reads before its window"
        slots: Numbers = pages * self.page_slots + positions % self.page_slots
        return slots

    def copies(self, spans: Sequence[RowSpan]) -> tuple[Numbers, Numbers]:
        """Return the slots of pages that become copies, and those of their sources."""
        pairs = np.array([pair for span in spans for pair in span.copies], np.int64).reshape(-1, 2)
        slots = pairs[:, :, None] * self.page_slots + np.arange(self.page_slots)
        return slots[:, 0].ravel(), slots[:, 1].ravel()

    def columns(self, layer: int) -> tuple[slice, slice]:
        """Return which columns hold a layer's keys and its values."""
        first, stored = self._places[layer][1], self._layers[layer]
        width = stored.values_per_token // stored.num_rows
        keys = slice(first, first + width)
        return keys, keys if stored.values_are_keys else slice(first + width, first + 2 * width)
