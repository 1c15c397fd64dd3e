"""Log-probabilities of prompts: how many rows of a step report them, and who is told."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from twostroke.core.step import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, TokenLogprobs


def num_scored(request: Request, count: int) -> int:
    """Return how many of a request's next `count` rows report on the prompt's next token.

    Rows that did so before a preemption do it no more. The prompt's last row draws.
    """
    if not request.num_unscored:
        return 0
    assert request.num_computed <= request.num_scored, "a row to be scored was passed over"
    end = min(request.num_computed + count, request.num_prompt - 1)
    return max(0, end - request.num_scored)


def most_rows(request: Request, wanted: int, most_scored: int) -> int:
    """Return how many of the `wanted` next rows a request may have if few more are to be scored."""
    if request.num_unscored <= most_scored:
        return wanted
    return min(wanted, request.num_scored - request.num_computed + most_scored)


def report(
    plan: StepPlan, scores: Sequence[TokenLogprobs | None], deltas: Sequence[Delta]
) -> list[Delta]:
    """Put the scores into the deltas of a step, and where there is none into new ones.

    Requests that have ended without a delta are told nothing.
    """
    left, with_scores = iter(scores), []
    known = {delta.request: delta for delta in deltas}
    for piece in plan.slices:
        request = piece.request
        told = tuple(islice(left, piece.num_scored))
        delta = known.get(request)
        if delta is None and told and request.finish_reason is None:
            delta = Delta(request, ())
        if delta is not None:
            request.num_scored += len(told)
            delta.scores = told
            with_scores.append(delta)
    assert next(left, None) is None, "more scores than rows to be scored"
    return with_scores
