"""The shape of a step's batch: rows of each request, and the context before them."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec.structs import force_setattr

from twostroke.core.draft_tree import branches_with_ends
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS, first_seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.core.step import Slice, StepPlan


class BatchShape(Frozen, dict=True):
    """The numbers of a step's requests on which the step's cost depends: rows and contexts.

    Request i has `counts[i]` rows, at positions from `starts[i]` on. Each row attends to every
    position up to its own. `num_sampled` of the `num_rows` rows get logits.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_sampled: int
    step: BatchShape | None = None  # the whole step, if this is one row part of it
    num_rows: int = 0  # the sum of `counts`, which is used several times in each step

    def __post_init__(self) -> None:
        force_setattr(self, "num_rows", sum(self.counts))

    @classmethod
    def prefill(cls, num_tokens: int, start: int = 0) -> BatchShape:
        """Return the shape of a step that computes `num_tokens` tokens of one prompt.

        `start`: the number of prompt tokens before them.
        """
        return cls((start,), (num_tokens,), 1)

    @classmethod
    def decode(cls, contexts: tuple[int, ...]) -> BatchShape:
        """Return the shape of a decode step: a row for each request, after `contexts[i]` tokens."""
        return cls(contexts, (1,) * len(contexts), len(contexts))

    @classmethod
    def of(cls, plan: StepPlan) -> BatchShape:
        """Return the shape of a planned step, including its draft tokens."""
        if not plan.has_drafts:
            num_sampled = len(plan.slices)
            if not plan.is_decode:
                num_sampled = sum([slice_.num_scored + slice_.samples for slice_ in plan.slices])
            return cls(tuple(plan.starts), tuple(plan.counts), num_sampled)
        spans = [span for slice_ in plan.slices for span in _spans(slice_)]
        num_sampled = sum([slice_.num_with_logits for slice_ in plan.slices])
        return cls(
            tuple([start for start, _ in spans]), tuple([count for _, count in spans]), num_sampled
        )

    def with_request(self, start: int, count: int) -> BatchShape:
        """Return the step's shape with one more request, whose `count` rows all get logits.

        `start`: the number of the request's tokens before these rows.
        """
        num_sampled = self.num_sampled + count
        return BatchShape((*self.starts, start), (*self.counts, count), num_sampled)

    def part(self, index: int, count: int) -> BatchShape:
        """Return the rows of this step that one rank of a context parallel group computes.

        The step is cut into `count` equal row parts (see `RowParts`); the rank has part `index`.
        The result's `num_sampled` is still the number for the whole step.
        """
        first, end = self.num_rows * index // count, self.num_rows * (index + 1) // count
        starts = []
        counts = []
        row = 0
        for start, num_rows in self.spans:
            skipped = max(0, first - row)
            num_kept = min(row + num_rows, end) - (row + skipped)
            if num_kept > 0:
                starts.append(start + skipped)
                counts.append(num_kept)
            row += num_rows
        return BatchShape(tuple(starts), tuple(counts), self.num_sampled, self)

    @cached_property
    def logits_rows(self) -> BatchShape:
        """Return the shape of only the rows with logits; their positions are an assumption.

        A batch shape counts the rows with logits, but does not know which rows they are. This
        method assumes the last row of each request first, then earlier rows.
        """
        if self.num_sampled >= self.num_rows:
            return self
        order = sorted(range(len(self.counts)), key=self.counts.__getitem__)
        num_left = self.num_sampled
        num_chosen = [0] * len(order)  # rows of each request
        for max_added in (1, self.num_rows):
            for index in order:
                num_added = min(num_left, max_added, self.counts[index] - num_chosen[index])
                num_chosen[index] += num_added
                num_left -= num_added
        spans = [
            (start + count - num_rows, num_rows)
            for (start, count), num_rows in zip(self.spans, num_chosen, strict=True)
            if num_rows
        ]
        starts, counts = zip(*spans, strict=True) if spans else ((), ())
        return BatchShape(starts, counts, self.num_sampled)

    @property
    def whole_step(self) -> BatchShape:
        """Return the shape from which `part` took this shape, or this shape if it is no part."""
        return self if self.step is None else self.step

    @property
    def spans(self) -> Iterable[tuple[int, int]]:
        """Return the first position and the number of rows of each request in the step."""
        return zip(self.starts, self.counts, strict=True)

    def num_attended(self, window: int | None = None, *, is_chunked: bool = False) -> int:
        """Count the (row, position) pairs that attention computes.

        A row attends to at most `window` positions; None: to all up to its own. `is_chunked`:
        whether rows attend to the positions of their own chunk only (see `Attention`).
        """
        if window is None and self.num_rows == len(self.starts):
            return self.num_context()
        if window is None:
            return sum([n * start + n * (n + 1) // 2 for start, n in self.spans])
        count_pairs = _attended_in_chunks if is_chunked else _attended
        return sum([count_pairs(start, count, window) for start, count in self.spans])

    def num_context(self, window: int | None = None, *, is_chunked: bool = False) -> int:
        """Count the positions whose keys and values attention must read at least once.

        `window`: the layer's window; None: no window.
        """
        if window is None:
            return sum(self.starts) + self.num_rows
        if is_chunked:
            return sum([start % window + count for start, count in self.spans])
        return sum([min(start, window - 1) + count for start, count in self.spans])

    def requests_with_rows(self, min_rows: int, max_rows: int = sys.maxsize) -> BatchShape:
        """Return the shape of only the requests that have `min_rows` to `max_rows` rows.

        No row has logits. Used to count costs that differ for requests with few and with many rows.
        """
        spans = [(start, count) for start, count in self.spans if min_rows <= count <= max_rows]
        return BatchShape(tuple([s for s, _ in spans]), tuple([n for _, n in spans]), 0)

    def num_kv_splits(self, window: int | None = None, *, is_chunked: bool = False) -> int:
        """Count the KV splits that attention reads, summed over all requests.

        A KV split is `KV_SPLIT_TOKENS` consecutive tokens of a request, whose keys and values one
        rank stores.
        """
        first_positions = [
            0 if window is None else max(0, first_seen(start, window, is_chunked=is_chunked))
            for start in self.starts
        ]
        ends = [start + count for start, count in self.spans]
        pairs = zip(first_positions, ends, strict=True)
        return sum([-(-end // KV_SPLIT_TOKENS) - start // KV_SPLIT_TOKENS for start, end in pairs])

    def num_partial_attentions(self, window: int | None = None, *, is_chunked: bool = False) -> int:
        """Count the pairs of a row and a KV split to which the row attends, in the batch."""
        num_pairs = self.num_rows + sum(
            [_splits_before(start, start + count) for start, count in self.spans]
        )
        if window is None:
            return num_pairs
        if is_chunked:
            positions = [row for start, count in self.spans for row in range(start, start + count)]
            return num_pairs - sum([row // window * window // KV_SPLIT_TOKENS for row in positions])
        first_positions = [(start - window + 1, count) for start, count in self.spans]
        return num_pairs - sum(
            [_splits_before(start, start + count) for start, count in first_positions]
        )


class DecodeRun(BatchShape):
    """The shapes of consecutive decode steps of the same requests, with one row for each request.

    The planner and the simulator compute the costs of all these steps at once. The first step
    begins after `starts` tokens. Counts that grow with the context are arrays with a value for each
    of the `num_steps`.
    """

    num_steps: int = 1

    @classmethod
    def of_steps(cls, starts: tuple[int, ...], num_steps: int) -> DecodeRun:
        """Return the shape of `num_steps` decode steps; the first follows `starts[i]` tokens."""
        return cls(starts, (1,) * len(starts), len(starts), num_steps=num_steps)

    def shape_at(self, step: int) -> BatchShape:
        """Return the batch shape of decode step number `step`."""
        return BatchShape.decode(tuple([start + step for start in self.starts]))

    def num_attended(self, window: int | None = None, *, is_chunked: bool = False) -> Any:
        """Count the (row, position) pairs of attention in each step: an array (steps,)."""
        return self.num_context(window, is_chunked=is_chunked)

    def num_context(self, window: int | None = None, *, is_chunked: bool = False) -> Any:
        """Count the positions whose keys and values each step must read: an array (steps,)."""
        import numpy as np  # not needed for `--help`

        if window is None:
            return super().num_context() + len(self.starts) * np.arange(self.num_steps)
        ends = np.array(self.starts)[:, None] + np.arange(1, 1 + self.num_steps)
        if is_chunked:
            return ((ends - 1) % window + 1).sum(axis=0)
        return np.minimum(ends, window).sum(axis=0)


def _spans(slice_: Slice) -> Iterator[tuple[int, int]]:
    """Yield the first position and number of rows of a slice, then of each of its draft branches.

    A branch reads the context again, so it counts as another request.
    """
    if not slice_.branches:
        yield slice_.start, slice_.num_rows
        return
    yield slice_.start, slice_.count + slice_.branches[0].first
    for branch, end in branches_with_ends(len(slice_.drafts), slice_.branches):
        yield branch.position, end - branch.first


def _attended(start: int, count: int, window: int) -> int:
    """Count the positions that a request's rows attend to, at most `window` for each row."""
    num_unlimited = min(count, max(0, window - start))
    return (
        num_unlimited * start
        + num_unlimited * (num_unlimited + 1) // 2
        + (count - num_unlimited) * window
    )


def _attended_in_chunks(start: int, count: int, window: int) -> int:
    """Count the positions that a request's rows attend to, within their chunks of `window`."""

    def before(end: int) -> int:
        num_chunks, rest = divmod(end, window)
        return num_chunks * window * (window + 1) // 2 + rest * (rest + 1) // 2

    return before(start + count) - before(start)


def _splits_before(start: int, end: int) -> int:
    """Sum up, over positions from `start` to before `end`, the complete KV splits before each."""
    return _splits_before_all(max(0, end)) - _splits_before_all(max(0, start))


def _splits_before_all(end: int) -> int:
    num_splits, rest = divmod(end, KV_SPLIT_TOKENS)
    return KV_SPLIT_TOKENS * num_splits * (num_splits - 1) // 2 + num_splits * rest
