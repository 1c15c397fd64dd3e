"""Handles failed steps: ends only the requests at fault; makes steps smaller if memory is short."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.backends.sampling.reference import allows_only
from twostroke.core.draft_tree import accepted_drafts
from twostroke.core.errors import (
    DeviceLostError,
    MemoryLimitError,
    RanksLostError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.message_text import counted_noun
from twostroke.core.step import NO_TOKEN, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice

    Run = Callable[[StepPlan], StepResult]
    Fail = Callable[[Request, TwostrokeError], None]

_logger = logging.getLogger("twostroke.engine")

# Steps without a shortage until the limit is raised: after the first shortage, and at most.
_FIRST_WAIT_STEPS: Final = 64
_MAX_WAIT_STEPS: Final = 4096

# Errors of the whole backend, not of a request: the backend must recover, or is lost.
FATAL: Final = RanksLostError, DeviceLostError


class StepLimit:
    """Limits the number of tokens in a step after a step failed for lack of memory.

    After a number of steps without a shortage of memory the limit doubles. Each shortage doubles
    this number, so that failing steps become rare.

    Attributes:
        lowered_tokens: the lowered maximum number of tokens of a step, after a shortage of memory;
            None if the usual budget applies. It may be above the budget if more requests run than
            the budget has tokens.
        num_shortages: steps that failed because the memory was too short.
    """

    def __init__(self, step_budget: int) -> None:
        self.lowered_tokens: int | None = None
        self.num_shortages = 0
        self._budget = step_budget
        self._wait_steps = _FIRST_WAIT_STEPS // 2
        self._num_successes = 0  # steps since the last change of the limit

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens that a step may compute now."""
        return min(self._budget, self.lowered_tokens or self._budget)

    def change_budget(self, step_budget: int) -> None:
        """Change the number of tokens that a step may compute without a shortage of memory."""
        self._budget = step_budget

    def lower(self, plan: StepPlan, error: Exception) -> bool:
        """Lower the limit if a step failed for lack of memory, so that a smaller step is tried.

        Returns False if the step failed for another reason, or cannot be smaller because it had one
        token of each request.

        `error` is the error of the step with this `plan`.
        """
        num_rows = sum(slice_.num_rows for slice_ in plan.slices)
        if not isinstance(error, MemoryLimitError):
            return False
        self.num_shortages += 1
        self._num_successes = 0
        self._wait_steps = min(2 * self._wait_steps, _MAX_WAIT_STEPS)
        if num_rows == len(plan.slices):
            return False
        self.lowered_tokens = max(1, num_rows // 2)
        tokens = counted_noun(self.lowered_tokens, "token")
        _logger.warning("%s Steps compute at most %s now.", error, tokens)
        return True

    def count_success(self) -> None:
        """Count a step that succeeded; double the limit on a step's tokens after enough of them."""
        if self.lowered_tokens is None:
            return
        self._num_successes += 1
        if self._num_successes >= self._wait_steps:
            self._num_successes = 0
            doubled = 2 * self.lowered_tokens
            self.lowered_tokens = doubled if doubled < self._budget else None
            tokens = counted_noun(self.max_tokens, "token")
            _logger.info("Steps may compute %s again.", tokens)


def run_each(plan: StepPlan, error: Exception, run: Run, fail: Fail) -> StepResult:
    """Run each request of a failed step alone, so that only the requests at fault end.

    `error` is the error of the step. `run` computes a step; `fail` is called with each request that
    fails again and its error. Returns the results of all requests as the result of the step.

    Raises:
        RanksLostError, DeviceLostError: raised by `run`.
    """
    if len(plan.slices) == 1:
        return _end_failed_request(plan.slices[0], error, fail)
    results = []
    for slice_ in plan.slices:
        try:
            results.append(run(StepPlan((slice_,))))
        except FATAL:
            raise
        except Exception as request_error:  # noqa: BLE001 other requests must not end with it
            results.append(_end_failed_request(slice_, request_error, fail))
    return StepResult(
        [token for result in results for token in result.tokens],
        [logprobs for result in results for logprobs in result.logprobs],
        scores=[score for result in results for score in result.scores],
        states=[rows for result in results for rows in result.states],
        num_compiled=sum(result.num_compiled for result in results),
    )


def find_unusable(plan: StepPlan, result: StepResult) -> Iterator[tuple[Request, TwostrokeError]]:
    """Yield each request whose result in a step is unusable, with an error that says why.

    A result is unusable if it has NaN or infinite values, or if no next token could be sampled.
    Rows after a rejected draft, or after the request's end, are not checked.
    """
    if result.states:
        pooled = [slice_.request for slice_ in plan.slices if slice_.num_pooled]
        for request, states in zip(pooled, result.states, strict=True):
            if not np.isfinite(states).all():
                yield request, _failure("its hidden states are not finite numbers.")
    if None in result.scores:
        scored = [slice_.request for slice_ in plan.slices for _ in range(slice_.num_scored)]
        for request, score in zip(scored, result.scores, strict=True):
            if score is None:
                yield request, _failure("its logits are not finite numbers.")
    if NO_TOKEN not in result.tokens:
        return
    tokens = iter(result.tokens)
    for slice_ in plan.slices:
        sampled = list(islice(tokens, slice_.num_drawn))
        accepted = accepted_drafts(slice_.drafts, slice_.branches, sampled)
        used_tokens = sampled[:1] + [sampled[1 + draft] for draft in accepted]
        for index, token in enumerate(used_tokens):
            if token == NO_TOKEN:
                yield slice_.request, _no_token_error(slice_.request, used_tokens[:index])
            if token == NO_TOKEN or token in slice_.request.end_ids:
                break


def _no_token_error(request: Request, new_tokens: Sequence[int]) -> TwostrokeError:
    """Return the error for a request for which no next token can be sampled.

    The request has generated its output and `new_tokens`. If the constraint and the request's other
    rules together allow no token, the error names the rules. Otherwise the model's logits are at
    fault.
    """
    params, constraint = request.params, request.params.constraint
    if request.matcher is None or constraint is None:
        return _failure("its logits leave no token to sample.")
    masks = np.zeros((1, request.matcher.num_words), np.uint32)
    try:
        request.matcher.masks([*request.output, *new_tokens], (), (), masks)
    except RequestError as error:
        return error
    is_early = request.num_output + len(new_tokens) < params.min_tokens
    forbidden = request.end_ids if is_early else ()
    if not allows_only(masks[0], forbidden):
        return _failure("its logits leave no token to sample.")
    rules = [
        name for name in ("min_tokens", "logit_bias", "stop_token_ids") if getattr(params, name)
    ]
    if constraint.excluded:
        rules.append("the excluded texts")
    reason = (
        "leaves no token to sample after "
        f"{counted_noun(request.num_output + len(new_tokens), 'token')}"
    )
    reason += f", together with {' and '.join(rules)}: change one of them." if rules else "."
    return RequestError(reason, field=constraint.param)


def _end_failed_request(slice_: Slice, error: Exception, fail: Fail) -> StepResult:
    """End a request that failed in a step with its error; return its empty result."""
    if not isinstance(error, RequestError):  # a RequestError describes the request's mistake
        error = _failure(f"{type(error).__name__}: {error}")
    fail(slice_.request, error)
    tokens = [NO_TOKEN] * slice_.num_drawn
    states = [np.zeros((0, 0), np.float32)] if slice_.num_pooled else []
    scores = [None] * slice_.num_scored
    return StepResult(tokens, [None] * len(tokens), scores=scores, states=states)


def _failure(why: str) -> TwostrokeError:
    return TwostrokeError(f"The engine failed on this request: {why}")
