"""What drawn tokens mean for a request: which of them it takes, and whether they end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.request import FinishReason
from twostroke.core.step import Delta, num_accepted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.step import Slice, TokenLogprobs
    from twostroke.schedule.ticket import Ticket


def end_reason(ticket: Ticket, token: int) -> FinishReason | None:
    """Why the request, to which `token` was just appended, ends; None if it goes on."""
    request = ticket.request
    if token in request.end_ids and request.num_output > request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= ticket.max_len else None


def accept(
    ticket: Ticket, piece: Slice, drawn: Sequence[tuple[int, TokenLogprobs | None]]
) -> Delta:
    """Append what was drawn behind the right drafts, up to a token that ends the request."""
    request = ticket.request
    num_right = num_accepted(piece.drafts, [token for token, _ in drawn])
    taken = drawn[: num_right + 1]
    for count, (token, _) in enumerate(taken, 1):
        request.tokens.append(token)
        request.finish_reason = end_reason(ticket, token)
        if request.finish_reason is not None:
            taken = taken[:count]
            break
    request.num_drafted += len(piece.drafts)
    request.num_accepted += min(num_right, len(taken))
    return Delta(request, tuple(t for t, _ in taken), tuple(p for _, p in taken))
