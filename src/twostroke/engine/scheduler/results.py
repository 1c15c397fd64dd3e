"""Takes in what a step brought its requests: drawn tokens, ends, and what rows report."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.draft_tree import ROOT, right_drafts
from twostroke.core.request import FinishReason
from twostroke.core.step import UNASKED, RequestDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.step import Slice, StepResult, TokenLogprobs
    from twostroke.engine.scheduler.draft_pages import DraftPages
    from twostroke.engine.scheduler.request_state import RequestState


class ResultReader:
    """Gives each slice of a step, in their order, its part of the step's result.

    `has_ends` says whether that ended any request.
    """

    __slots__ = ("_drafting", "_drawn", "_scores", "_states", "has_ends")

    def __init__(self, result: StepResult, drafting: DraftPages) -> None:
        self.has_ends = False
        self._drafting = drafting
        self._drawn = zip(result.tokens, result.logprobs, strict=True)
        self._scores, self._states = iter(result.scores), iter(result.states)

    def take_all(
        self,
        owners: Sequence[RequestState],
        slices: Sequence[Slice],
        settle: Callable[[RequestState], None],
    ) -> list[RequestDelta]:
        """Take in all slices; return a delta for each that drew, reports, or ended its request.

        `settle` is called with tickets of which pages are due.
        """
        deltas, drawn = [], self._drawn
        for ticket, piece in zip(owners, slices, strict=True):
            request = piece.request
            start, tokens = piece.start, request.tokens
            if (
                start < request.num_prompt
                or piece.drafts
                or request.finish_reason is not None
                or len(tokens) + 1 >= ticket.max_len
                or not piece.samples
            ):
                delta = self._take(ticket, piece)
            else:  # the usual case, quickly
                token, logprob = next(drawn)
                if token in request.end_ids:
                    delta, _ = _accept(ticket, piece, [(token, logprob)])
                    self.has_ends |= request.finish_reason is not None
                else:
                    tokens.append(token)
                    delta = RequestDelta(request, (token,), (logprob,) if logprob else UNASKED)
                request.num_computed = start + piece.count
            if delta is not None:
                deltas.append(delta)
            if request.num_computed >= ticket.due_at and ticket.is_running:
                settle(ticket)
        return deltas

    def _take(self, ticket: RequestState, piece: Slice) -> RequestDelta | None:
        """Take in what a slice computed, drew and reports; return a delta if it did either.

        Nothing but its rows is taken in if the request ended while the step was in flight.
        """
        request, delta, pooled = piece.request, None, None
        scored: tuple[TokenLogprobs | None, ...] = ()
        is_reported = piece.start < request.num_prompt and request.hints.shows_progress
        computed = piece.start + piece.count
        tokens = tuple(islice(self._drawn, piece.num_drawn))
        if piece.num_scored or piece.num_pooled:
            scored, is_reported = tuple(islice(self._scores, piece.num_scored)), True
            pooled = next(self._states) if piece.num_pooled else None
        if request.finish_reason is not None:
            self._drafting.settle(piece, ROOT)
            request.num_computed = computed
            return None
        if piece.samples:
            delta, last = _accept(ticket, piece, tokens)
            computed += max(0, len(delta.tokens) - 1)
            if piece.drafts:
                request.num_planned = computed
            self._drafting.settle(piece, last)
            self.has_ends |= request.is_finished
        elif request.pooling is not None and computed == len(request.tokens):
            request.finish_reason = FinishReason.LENGTH
            self.has_ends = True
        if is_reported:
            delta = replace(delta or RequestDelta(request, ()), scores=scored, states=pooled)
            request.num_scored += len(scored)
        request.num_computed = computed
        return delta

    def check_taken(self) -> None:
        """Check that the slices took everything."""
        assert next(self._drawn, None) is None, "more tokens than slices that sample"
        assert next(self._scores, None) is None, "more scores than scored rows"
        assert next(self._states, None) is None, "more states than pooled slices"


def _accept(
    ticket: RequestState, piece: Slice, drawn: Sequence[tuple[int, TokenLogprobs | None]]
) -> tuple[RequestDelta, int]:
    """Append the tokens drawn after right drafts, up to one that ends the request.

    Returns the delta, and the last draft that is now one of its tokens, or `ROOT`. With
    `max_tokens=0` the drawn token is discarded.
    """
    request = ticket.request
    right = right_drafts(piece.drafts, piece.branches, [token for token, _ in drawn])
    taken = [drawn[0], *(drawn[1 + draft] for draft in right)]
    for count, (token, _) in enumerate(taken, 1):
        request.tokens.append(token)
        request.finish_reason = _end_reason(ticket, token)
        if request.finish_reason is not None:
            taken = taken[:count]
            break
    if len(request.tokens) > ticket.max_len:
        request.finish_reason = FinishReason.LENGTH
        request.tokens.pop()
        taken = []
    request.num_drafted += len(piece.drafts)
    request.num_accepted += min(len(right), len(taken))
    last = right[len(taken) - 2] if len(taken) > 1 else ROOT
    return RequestDelta(request, tuple(t for t, _ in taken), tuple(p for _, p in taken)), last


def _end_reason(ticket: RequestState, token: int) -> FinishReason | None:
    """Return why the request ends after `token`, its newest one; None if it goes on."""
    request = ticket.request
    early = request.num_output <= request.params.min_tokens and request.matcher is None
    if token in request.end_ids and not early:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= ticket.max_len else None
