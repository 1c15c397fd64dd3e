"""Texts that are read for their embeddings: whose last hidden states are wanted, and who is told.

Such a request draws no token: it ends with its last row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.embedding import Pooling
from twostroke.core.request import FinishReason
from twostroke.core.step import Delta
from twostroke.schedule.scoring import report

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.schedule.ticket import Ticket

_NOT_CUT: Final = (None, FinishReason.LENGTH)  # it goes on, or has just ended with its last row


def num_pooled(request: Request, count: int) -> int:
    """Return of how many of a request's next `count` rows, the last ones, the states are wanted.

    Rows that are computed again after a preemption hand them out again.
    """
    match request.pooling:
        case None:
            return 0
        case Pooling.MEAN:
            return count
        case Pooling.LAST:
            return int(request.num_computed + count == len(request.tokens))


def end_pooled(request: Request, tickets: dict[str, Ticket]) -> bool:
    """End a request that draws no token once all of its rows are computed; whether it was so."""
    if request.pooling is None or request.num_pending:
        return False
    request.finish_reason = FinishReason.LENGTH
    del tickets[request.id]
    return True


def with_rows(plan: StepPlan, result: StepResult, deltas: list[Delta]) -> list[Delta]:
    """Add to the deltas of a step what it reports of single rows: scores and hidden states."""
    if result.scores:
        deltas = report(plan, result.scores, deltas)
    return _hand_out(plan, result.states, deltas) if result.states else deltas


def _hand_out(
    plan: StepPlan, states: Sequence[NDArray[np.float32]], deltas: Sequence[Delta]
) -> list[Delta]:
    """Put the states into the deltas of a step, and where there is none into new ones.

    Requests that were ended from outside are told nothing.
    """
    left, all_deltas = iter(states), []
    known = {delta.request: delta for delta in deltas}
    for piece in plan.slices:
        request = piece.request
        told = next(left) if piece.num_pooled else None
        delta = known.get(request)
        if delta is None and told is not None and request.finish_reason in _NOT_CUT:
            delta = Delta(request, ())
        if delta is not None:
            delta.states = told
            all_deltas.append(delta)
    assert next(left, None) is None, "more states than slices that want them"
    return all_deltas
