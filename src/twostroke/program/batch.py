"""The shape of a step's work: how many rows, each behind how much context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from twostroke.core.tree import ends_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.step import Slice, StepPlan


@dataclass(frozen=True)
class BatchShape:
    """What `cost` needs to know of a step.

    `spans` holds one (start, count) a request: rows at positions start to start + count - 1,
    each attending to every position up to its own. `num_sampled` rows get logits. Sums over the
    spans are kept, as several ask for them in a step.
    """

    spans: tuple[tuple[int, int], ...]
    num_sampled: int

    @classmethod
    def prefill(cls, num_tokens: int, start: int = 0) -> BatchShape:
        """One request computing `num_tokens` at once behind `start` earlier ones."""
        return cls(((start, num_tokens),), 1)

    @classmethod
    def decode(cls, contexts: tuple[int, ...]) -> BatchShape:
        """One row for each request, each behind `contexts[i]` tokens."""
        return cls(tuple((context, 1) for context in contexts), len(contexts))

    @classmethod
    def of(cls, plan: StepPlan) -> BatchShape:
        """The shape of a step, its drafts included."""
        spans = tuple([(s.start, s.count + len(s.drafts)) for s in plan.slices if not s.branches])
        if len(spans) < len(plan.slices):
            spans += tuple([span for s in plan.slices if s.branches for span in _tree_spans(s)])
        drawing = [1 + len(s.drafts) + s.num_scored for s in plan.slices if s.samples]
        if len(drawing) == len(plan.slices):
            return cls(spans, sum(drawing))
        return cls(spans, sum(drawing) + sum([s.num_scored for s in plan.slices if not s.samples]))

    @cached_property
    def num_rows(self) -> int:
        """Tokens computed in the step."""
        return sum([count for _, count in self.spans])

    def num_attended(self, window: int | None = None) -> int:
        """Pairs of (row, position it attends to), at most `window` positions a row."""
        if window is None:
            return self._num_attended
        return sum(_attended(start, count, window) for start, count in self.spans)

    def num_context(self, window: int | None = None) -> int:
        """Positions whose keys and values must be read at least once."""
        if window is None:
            return self._num_context
        return sum([min(start, window - 1) + count for start, count in self.spans])

    @cached_property
    def _num_attended(self) -> int:
        if self.num_rows == len(self.spans):
            return self._num_context
        return sum([n * start + n * (n + 1) // 2 for start, n in self.spans])

    @cached_property
    def _num_context(self) -> int:
        return sum([start + count for start, count in self.spans])


def _tree_spans(part: Slice) -> Iterator[tuple[int, int]]:
    """Yield the spans of a slice with branches: each reads what is before it by itself."""
    yield part.start, part.count + part.branches[0].first
    for branch, end in ends_of(len(part.drafts), part.branches):
        yield branch.position, end - branch.first


def _attended(start: int, count: int, window: int) -> int:
    """Rows whose whole past lies inside the window see all of it, the others just the window."""
    whole = min(count, max(0, window - start))
    return whole * start + whole * (whole + 1) // 2 + (count - whole) * window
