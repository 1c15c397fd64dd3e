"""A step as rows: spans of consecutive rows, and the KV slots that they read and write.

Used by the backends that interpret a Program one operation after another (reference and torch).
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import field

from twostroke.core.draft_tree import branches_with_ends
from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_PAGE, NO_STATE
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
    """Consecutive rows of a step that belong to one sequence, and the sequence's KV pages.

    `rows`: the rows of the step. `start`: the position of the first row. `pages`: the pages of the
    sequence. `copies`: (target, source) pages to copy before the step. `read_state`:
    the slot of the recurrent state before the first row; `NO_STATE` for zeros.
    `above`: for a branch of draft tokens, earlier rows of the step that precede the branch, at the
    positions just before `start`; their keys and values are stored in `pages`, too. `write_states`:
    the slots into which the recurrent states after the span's last rows are written, one slot for
    each row. These rows are the last row alone, or the rows of drafts and the row before them.
    """

    rows: slice
    start: int
    pages: Numbers  # (groups, pages)
    above: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    copies: tuple[tuple[int, int], ...] = ()
    read_state: int = NO_STATE
    write_states: tuple[int, ...] = (NO_STATE,)

    @property
    def end(self) -> int:
        """Return the position after the span's last row, in the sequence."""
        return self.start + int(self.rows.stop - self.rows.start)

    @property
    def stored_rows(self) -> Numbers:
        """Return the step's rows whose keys and values are in `pages`, in order of position."""
        return np.concatenate([self.above, np.arange(self.rows.start, self.rows.stop)])


def flatten(slices: tuple[Slice, ...]) -> Rows:
    """Return a step's slices as arrays: tokens, positions, row spans, and rows with logits.

    The reference and torch backends compute steps in this form.
    """
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[RowSpan] = []
    sampled: list[int] = []
    for slice_ in slices:
        first = len(tokens)
        tokens += slice_.request.tokens[slice_.start : slice_.start + slice_.count]
        tokens += slice_.drafts
        for span in _spans(slice_, first):
            spans.append(span)
            positions += range(span.start, span.end)
        sampled += range(len(tokens) - slice_.num_with_logits, len(tokens))
    return np.array(tokens), np.array(positions), tuple(spans), np.array(sampled, np.int64)


def unpack(frame: StepFrame) -> Rows:
    """Return a step that rank 0 sent (a `StepFrame`), in the form that `flatten` returns."""
    spans: list[RowSpan] = []
    stored = frame.stores.astype(np.int64)
    copies = tuple((target, source) for source, target in frame.copies.tolist())
    no_states = np.full((len(frame.slices), 2), NO_STATE)
    states = (no_states if frame.states is None else frame.states).tolist()
    pairs = zip(frame.slices.tolist(), states, strict=True)
    for (first, count, start, table), (read_state, write_state) in pairs:
        above = stored[stored[:, 1] == table, 0]
        pages = frame.page_tables[table].astype(np.int64)
        rows = slice(first, first + count)
        write_states: tuple[int, ...] = (write_state,)
        if frame.row_states is not None:
            slots = frame.row_states[rows].tolist()
            write_states = tuple([slot for slot in slots if slot != NO_STATE])
        spans.append(
            RowSpan(
                rows,
                start,
                pages,
                above,
                copies=copies,
                read_state=read_state,
                write_states=write_states,
            )
        )
        copies = ()  # the first span has the copies of the whole step
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    tokens, sampled = (a.astype(np.int64) for a in (frame.tokens, frame.sampled_rows))
    return tokens, positions, tuple(spans), sampled


def _spans(slice_: Slice, first: int) -> Iterator[RowSpan]:
    """Yield the row spans of a slice: of the main sequence, then of each branch of drafts.

    `first`: the step's row at which the slice begins.
    """
    pages = np.array(slice_.request.pages, np.int64)
    end = slice_.branches[0].first if slice_.branches else len(slice_.drafts)
    yield RowSpan(
        slice(first, first + slice_.count + end),
        slice_.start,
        pages,
        read_state=slice_.read_state,
        write_states=(slice_.write_state, *slice_.draft_states),
    )
    for branch, end in branches_with_ends(len(slice_.drafts), slice_.branches):
        branch_pages = np.array(branch.pages, np.int64)
        copies: tuple[tuple[int, int], ...] = ()
        if branch.is_copied:
            shared_page_index = branch.own_page_index
            copies = tuple(
                zip(
                    branch_pages[:, shared_page_index - branch.page_index],
                    pages[:, shared_page_index],
                    strict=True,
                )
            )
        yield RowSpan(
            slice(first + slice_.count + branch.first, first + slice_.count + end),
            branch.position,
            np.concatenate([pages[:, : branch.page_index], branch_pages], axis=1),
            first + np.array(branch.above, np.int64),
            copies,
        )


def pooled_rows(slices: Sequence[Slice]) -> list[slice]:
    """Return the rows of a step that are pooled to embeddings, for each slice that asks for one."""
    ends = accumulate(slice_.num_rows for slice_ in slices)
    pairs = zip(ends, slices, strict=True)
    return [slice(end - slice_.num_pooled, end) for end, slice_ in pairs if slice_.num_pooled]


class PageMap:
    """Maps layers and token positions to rows and columns of one matrix that has all KV pages.

    The matrix has a row (slot) for each token that this rank stores. Its `width` columns are
    divided among the layers of a cache group. A page is `page_slots` consecutive slots:
    `page_size`, or fewer if ranks divide the tokens of a page.
    """

    def __init__(self, program: Program, page_size: int) -> None:
        """Assign columns of the KV matrix to each layer of the Program."""
        self._layers = program.cache_layers
        num_ranks = max([layer.num_kv_ranks for layer in self._layers], default=1)
        assert num_ranks == 1 or page_size == KV_SPLIT_TOKENS * num_ranks, (
            "a page has a KV split for each rank"
        )
        self._page_size, self.page_slots = page_size, page_size // num_ranks
        self._layer_columns: dict[int, tuple[int, int]] = {}  # group and first value of each layer
        self.width = 0
        for number, group in enumerate(program.cache_groups):
            first = 0
            for layer in group.layers:
                self._layer_columns[layer] = number, first
                first += self._layers[layer].values_per_token
            self.width = max(self.width, first)

    def slots(self, span: RowSpan, layer: int, positions: Numbers) -> Numbers:
        """Return the slots (matrix rows) in which a layer's KV pages store the given positions.

        Only positions that this rank stores may be passed.
        """
        pages = span.pages[self._layer_columns[layer][0], positions // self._page_size]
        assert (pages != NO_PAGE).all(), "a row reads before its window"
        slots: Numbers = pages * self.page_slots + positions % self.page_slots
        return slots

    def copies(self, spans: Sequence[RowSpan]) -> tuple[Numbers, Numbers]:
        """Return the target slots and the source slots of all page copies of a step."""
        pairs = np.array([pair for span in spans for pair in span.copies], np.int64).reshape(-1, 2)
        slots = pairs[:, :, None] * self.page_slots + np.arange(self.page_slots)
        return slots[:, 0].ravel(), slots[:, 1].ravel()

    def columns(self, layer: int) -> tuple[slice, slice]:
        """Return the columns of a layer's keys, and of its values, in the KV matrix."""
        first, stored = self._layer_columns[layer][1], self._layers[layer]
        width = stored.values_per_token // stored.num_rows
        keys = slice(first, first + width)
        return keys, keys if stored.values_are_keys else slice(first + width, first + 2 * width)
