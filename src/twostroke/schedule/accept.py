"""What drawn tokens mean for a request: which of them it takes, and whether they end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.request import FinishReason
from twostroke.core.step import Delta
from twostroke.core.tree import ROOT, right_drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.step import Slice, TokenLogprobs
    from twostroke.schedule.ticket import Ticket


def end(ticket: Ticket, delta: Delta) -> None:
    """End the request, to which the delta's one token was just appended, if it does.

    One that may have no output at all leaves it to nobody.
    """
    request = ticket.request
    request.finish_reason = end_reason(ticket, request.tokens[-1])
    if len(request.tokens) > ticket.max_len:
        request.finish_reason = FinishReason.LENGTH
        request.tokens.pop()
        delta.tokens = delta.logprobs = ()


def end_reason(ticket: Ticket, token: int) -> FinishReason | None:
    """Why the request, to which `token` was just appended, ends; None if it goes on."""
    request = ticket.request
    early = request.num_output <= request.params.min_tokens and request.matcher is None
    if token in request.end_ids and not early:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= ticket.max_len else None


def accept(
    ticket: Ticket, piece: Slice, drawn: Sequence[tuple[int, TokenLogprobs | None]]
) -> tuple[Delta, int]:
    """Append what was drawn behind the right drafts, up to a token that ends the request.

    Returns the last draft that the request now has among its tokens, too, or `ROOT`.
    """
    request = ticket.request
    right = right_drafts(piece.drafts, piece.branches, [token for token, _ in drawn])
    taken = [drawn[0], *(drawn[1 + draft] for draft in right)]
    for count, (token, _) in enumerate(taken, 1):
        request.tokens.append(token)
        request.finish_reason = end_reason(ticket, token)
        if request.finish_reason is not None:
            taken = taken[:count]
            break
    request.num_drafted += len(piece.drafts)
    request.num_accepted += min(len(right), len(taken))
    last = right[len(taken) - 2] if len(taken) > 1 else ROOT
    return Delta(request, tuple(t for t, _ in taken), tuple(p for _, p in taken)), last
