"""Which rows of a step's results count: those behind right drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.tree import right_drafts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.step import Slice, StepPlan, StepResult


def drawn_rows(plan: StepPlan, result: StepResult) -> Iterator[tuple[Slice, list[int]]]:
    """Yield each slice that drew, and which of the step's drawn tokens its request has taken.

    They follow one another. A request that ended may have taken fewer.
    """
    first = 0
    for part in plan.slices:
        if not part.samples:
            continue
        rows = [first]
        if part.drafts:
            drawn = result.tokens[first : first + part.num_drawn]
            rows += [first + 1 + i for i in right_drafts(part.drafts, part.branches, drawn)]
        yield part, rows
        first += part.num_drawn
