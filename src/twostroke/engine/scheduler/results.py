"""Applies a step's result to its requests: sampled tokens, ends, and values reported for rows."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.draft_tree import ROOT, accepted_drafts
from twostroke.core.request import FinishReason
from twostroke.core.step import NO_LOGPROBS, RequestDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.step import Slice, StepResult, TokenLogprobs
    from twostroke.engine.scheduler.draft_pages import DraftPages
    from twostroke.engine.scheduler.request_state import RequestState


class ResultReader:
    """Applies a backend's step result to the requests of the step, in the order of the slices.

    Attributes:
        has_ends: whether the result has ended any request.
    """

    __slots__ = ("_draft_pages", "_sampled", "_scores", "_states", "has_ends")

    def __init__(self, result: StepResult, draft_pages: DraftPages) -> None:
        self.has_ends = False
        self._draft_pages = draft_pages
        self._sampled = zip(result.tokens, result.logprobs, strict=True)
        self._scores = iter(result.scores)
        self._states = iter(result.states)

    def apply(
        self,
        owners: Sequence[RequestState],
        slices: Sequence[Slice],
        update_pages: Callable[[RequestState], None],
    ) -> list[RequestDelta]:
        """Apply the step's result to all requests of the step, and return a delta for each.

        A request that got no tokens, log-probabilities or hidden states, and did not end, has no
        delta. `owners` are the request states of the `slices`, in the same order. Deltas are in
        this order, too. `update_pages` is called for each running request that has pages to publish
        or to release.
        """
        deltas: list[RequestDelta] = []
        sampled = self._sampled
        for state, slice_ in zip(owners, slices, strict=True):
            request = slice_.request
            start, tokens = slice_.start, request.tokens
            if (
                start < request.num_prompt
                or slice_.drafts
                or request.finish_reason is not None
                or len(tokens) + 1 >= state.max_len
                or not slice_.samples
            ):
                delta = self._apply_slice(state, slice_)
            else:  # plain decode, inlined because it is the most frequent case
                token, logprob = next(sampled)
                if token in request.end_ids:
                    delta, _ = _accept(state, slice_, [(token, logprob)])
                    self.has_ends |= request.finish_reason is not None
                else:
                    tokens.append(token)
                    delta = RequestDelta(request, (token,), (logprob,) if logprob else NO_LOGPROBS)
                request.num_computed = start + slice_.count
            if delta is not None:
                deltas.append(delta)
            if request.num_computed >= state.update_at and state.is_running:
                update_pages(state)
        return deltas

    def _apply_slice(self, state: RequestState, slice_: Slice) -> RequestDelta | None:
        """Apply the step's result to one request's slice, and return the request's delta.

        Returns None if the request got no tokens, log-probabilities or hidden states, and did not
        end. If the request ended while the step was in flight, the slice's results are dropped.
        """
        request = slice_.request
        delta = pooled = None
        scored: tuple[TokenLogprobs | None, ...] = ()
        is_reported = slice_.start < request.num_prompt and request.hints.shows_progress
        num_computed = slice_.start + slice_.count
        sampled = tuple(islice(self._sampled, slice_.num_drawn))
        if slice_.num_scored or slice_.num_pooled:
            is_reported = True
            scored = tuple(islice(self._scores, slice_.num_scored))
            pooled = next(self._states) if slice_.num_pooled else None
        if request.finish_reason is not None:
            self._draft_pages.settle(slice_, ROOT)
            request.num_computed = num_computed
            return None
        if slice_.samples:
            delta, last_accepted = _accept(state, slice_, sampled)
            num_computed += max(0, len(delta.tokens) - 1)
            if slice_.drafts:
                request.num_planned = num_computed
            self._draft_pages.settle(slice_, last_accepted)
            self.has_ends |= request.is_finished
        elif request.pooling is not None and num_computed == len(request.tokens):
            request.finish_reason = FinishReason.LENGTH
            self.has_ends = True
        if is_reported:
            delta = replace(delta or RequestDelta(request, ()), scores=scored, states=pooled)
            request.num_scored += len(scored)
        request.num_computed = num_computed
        return delta

    def check_consumed(self) -> None:
        """Assert that every value of the step's result was used, after all slices were applied."""
        assert next(self._sampled, None) is None, "more tokens than slices that sample"
        assert next(self._scores, None) is None, "more scores than scored rows"
        assert next(self._states, None) is None, "more states than pooled slices"


def _accept(
    state: RequestState, slice_: Slice, sampled: Sequence[tuple[int, TokenLogprobs | None]]
) -> tuple[RequestDelta, int]:
    """Append sampled tokens to a request: one for its newest token and one for each accepted draft.

    `sampled[0]` follows the request's newest token, and `sampled[1 + i]` follows draft i. Tokens
    after an end token or past the request's maximum length are dropped. Returns the request's
    delta, and the index of the last draft that became one of its tokens, or `ROOT`.
    """
    request = state.request
    accepted = accepted_drafts(slice_.drafts, slice_.branches, [token for token, _ in sampled])
    new_tokens = [sampled[0], *(sampled[1 + draft] for draft in accepted)]
    for count, (token, _) in enumerate(new_tokens, 1):
        request.tokens.append(token)
        request.finish_reason = _finish_reason(state, token)
        if request.finish_reason is not None:
            new_tokens = new_tokens[:count]
            break
    if len(request.tokens) > state.max_len:
        request.finish_reason = FinishReason.LENGTH
        request.tokens.pop()
        new_tokens = []
    request.num_drafted += len(slice_.drafts)
    request.num_accepted += min(len(accepted), len(new_tokens))
    last_accepted = accepted[len(new_tokens) - 2] if len(new_tokens) > 1 else ROOT
    tokens = tuple(token for token, _ in new_tokens)
    logprobs = tuple(logprob for _, logprob in new_tokens)
    return RequestDelta(request, tokens, logprobs), last_accepted


def _finish_reason(state: RequestState, token: int) -> FinishReason | None:
    """Return why a request ends after its newest token, `token`; None if it continues."""
    request = state.request
    is_early = request.num_output <= request.params.min_tokens and request.matcher is None
    if token in request.end_ids and not is_early:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= state.max_len else None
