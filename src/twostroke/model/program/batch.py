"""The shape of a step's work: rows, and the context before each."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec.structs import force_setattr

from twostroke.core.draft_tree import ends_of
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import PIECE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.core.step import Slice, StepPlan


class BatchShape(Frozen, dict=True):
    """The facts of a step that its cost depends on.

    Request i has `counts[i]` rows, at positions from `starts[i]` on, each attending to every
    position up to its own. `num_sampled` of the `num_rows` rows get logits.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_sampled: int
    step: BatchShape | None = None  # of which these are the rows of one row part
    num_rows: int = 0  # the sum of `counts`, kept because a step needs it several times

    def __post_init__(self) -> None:
        force_setattr(self, "num_rows", sum(self.counts))

    @classmethod
    def prefill(cls, num_tokens: int, start: int = 0) -> BatchShape:
        """One request computing `num_tokens` at once after `start` earlier ones."""
        return cls((start,), (num_tokens,), 1)

    @classmethod
    def decode(cls, contexts: tuple[int, ...]) -> BatchShape:
        """One row for each request, each after `contexts[i]` tokens."""
        return cls(contexts, (1,) * len(contexts), len(contexts))

    @classmethod
    def of(cls, plan: StepPlan) -> BatchShape:
        """The shape of a step, its drafts included."""
        if not plan.has_drafts:
            num_sampled = len(plan.slices)
            if not plan.is_decode:
                num_sampled = sum([part.num_scored + part.samples for part in plan.slices])
            return cls(tuple(plan.starts), tuple(plan.counts), num_sampled)
        spans = [span for part in plan.slices for span in _spans(part)]
        num_sampled = sum([part.num_with_logits for part in plan.slices])
        return cls(
            tuple([start for start, _ in spans]), tuple([count for _, count in spans]), num_sampled
        )

    def with_request(self, start: int, count: int) -> BatchShape:
        """Return the shape with one more request, whose `count` rows all get logits."""
        num_sampled = self.num_sampled + count
        return BatchShape((*self.starts, start), (*self.counts, count), num_sampled)

    def part(self, index: int, count: int) -> BatchShape:
        """Return the rows of row part `index` of `count`, with all logits (see `RowParts`)."""
        first, end = self.num_rows * index // count, self.num_rows * (index + 1) // count
        starts, counts, row = [], [], 0
        for start, num_rows in self.spans:
            skipped = max(0, first - row)
            num_own = min(row + num_rows, end) - (row + skipped)
            if num_own > 0:
                starts.append(start + skipped)
                counts.append(num_own)
            row += num_rows
        return BatchShape(tuple(starts), tuple(counts), self.num_sampled, self)

    @cached_property
    def drawn(self) -> BatchShape:
        """The rows with logits, as a step: the last ones of requests, few rows of each first."""
        if self.num_sampled >= self.num_rows:
            return self
        order = sorted(range(len(self.counts)), key=self.counts.__getitem__)
        left, own = self.num_sampled, [0] * len(order)
        for most in (1, self.num_rows):
            for index in order:
                more = min(left, most, self.counts[index] - own[index])
                own[index] += more
                left -= more
        spans = [(s + n - own[i], own[i]) for i, (s, n) in enumerate(self.spans) if own[i]]
        starts, counts = zip(*spans, strict=True) if spans else ((), ())
        return BatchShape(starts, counts, self.num_sampled)

    @property
    def whole(self) -> BatchShape:
        """The step with the rows of all row parts."""
        return self if self.step is None else self.step

    @property
    def spans(self) -> Iterable[tuple[int, int]]:
        """Where each request's rows start, and how many they are."""
        return zip(self.starts, self.counts, strict=True)

    def num_attended(self, window: int | None = None) -> int:
        """Pairs of (row, position it attends to), at most `window` positions a row."""
        if window is None and self.num_rows == len(self.starts):
            return self.num_context()
        if window is None:
            return sum([n * start + n * (n + 1) // 2 for start, n in self.spans])
        return sum([_attended(start, count, window) for start, count in self.spans])

    def num_context(self, window: int | None = None) -> int:
        """Positions whose keys and values must be read at least once."""
        if window is None:
            return sum(self.starts) + self.num_rows
        return sum([min(start, window - 1) + count for start, count in self.spans])

    def with_rows(self, fewest: int, most: int = sys.maxsize) -> BatchShape:
        """Return the requests with so many rows."""
        spans = [(start, count) for start, count in self.spans if fewest <= count <= most]
        return BatchShape(tuple([s for s, _ in spans]), tuple([n for _, n in spans]), 0)

    def num_pieces(self, window: int | None = None) -> int:
        """Pieces that a request's rows attend to, of all requests."""
        first = [0 if window is None else max(0, start - window + 1) for start in self.starts]
        ends = [start + count for start, count in self.spans]
        pairs = zip(first, ends, strict=True)
        return sum([-(-end // PIECE_TOKENS) - start // PIECE_TOKENS for start, end in pairs])

    def num_shares(self, window: int | None = None) -> int:
        """Pairs of (row, piece of the context it attends to)."""
        pieces = self.num_rows + sum(
            [_pieces_before(start, start + count) for start, count in self.spans]
        )
        if window is None:
            return pieces
        first_seen = [(start - window + 1, count) for start, count in self.spans]
        return pieces - sum([_pieces_before(start, start + count) for start, count in first_seen])


class DecodeRun(BatchShape):
    """Decode steps of the same requests, one after another; the first is `starts`.

    What grows with the context is counted for each of the `num_steps`: (steps,).
    """

    num_steps: int = 1

    @classmethod
    def of_steps(cls, starts: tuple[int, ...], num_steps: int) -> DecodeRun:
        """Return the shape of steps, the first after `starts[i]` tokens of request i."""
        return cls(starts, (1,) * len(starts), len(starts), num_steps=num_steps)

    def at(self, step: int) -> BatchShape:
        """Return the shape of one of the steps."""
        return BatchShape.decode(tuple([start + step for start in self.starts]))

    def num_attended(self, window: int | None = None) -> Any:
        """As that of a step."""
        return self.num_context(window)

    def num_context(self, window: int | None = None) -> Any:
        """As that of a step."""
        import numpy as np  # `--help` needs none of it

        if window is None:
            return super().num_context() + len(self.starts) * np.arange(self.num_steps)
        ends = np.array(self.starts)[:, None] + np.arange(1, 1 + self.num_steps)
        return np.minimum(ends, window).sum(axis=0)


def _spans(part: Slice) -> Iterator[tuple[int, int]]:
    """Yield where rows start and how many they are; a branch reads its own context again."""
    if not part.branches:
        yield part.start, part.num_rows
        return
    yield part.start, part.count + part.branches[0].first
    for branch, end in ends_of(len(part.drafts), part.branches):
        yield branch.position, end - branch.first


def _attended(start: int, count: int, window: int) -> int:
    """Rows whose whole past lies inside the window see all of it, the others just the window."""
    whole = min(count, max(0, window - start))
    return whole * start + whole * (whole + 1) // 2 + (count - whole) * window


def _pieces_before(start: int, end: int) -> int:
    """Return how many whole pieces lie before each of these positions, in all."""
    return _pieces_before_all(max(0, end)) - _pieces_before_all(max(0, start))


def _pieces_before_all(end: int) -> int:
    pieces, rest = divmod(end, PIECE_TOKENS)
    return PIECE_TOKENS * pieces * (pieces - 1) // 2 + pieces * rest
