"""Requests whose computation fails, so that only they end, and not the others of their step."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.backends.sampling.reference import allows_only
from twostroke.core.draft_tree import right_drafts
from twostroke.core.errors import (
    DeviceLostError,
    MemoryLimitError,
    RanksLostError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.step import NO_TOKEN, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice

    Run = Callable[[StepPlan], StepResult]
    Fail = Callable[[Request, TwostrokeError], None]

_logger = logging.getLogger("twostroke.engine")

_FIRST_WAIT: Final = 64  # steps after the first shortage until steps may become larger
_LONGEST_WAIT: Final = 4096

# After these the backend must recover, or is lost; they are not about a request.
FATAL: Final = RanksLostError, DeviceLostError


class StepLimit:
    """How many tokens a step may compute: fewer while the memory is too short for more.

    After some steps without a shortage, steps may compute twice as many tokens again. Each shortage
    doubles the number of these steps, so that attempts that fail are rare.
    """

    def __init__(self, step_budget: int) -> None:
        self.most_tokens, self.num_shortages = step_budget, 0
        self._budget, self._wait, self._num_clean = step_budget, _FIRST_WAIT // 2, 0

    def lower(self, plan: StepPlan, error: Exception) -> bool:
        """Lower the limit if a step was too large for the memory.

        False: it failed for another reason, or with one token of each request.
        """
        num_rows = sum(part.num_rows for part in plan.slices)
        if not isinstance(error, MemoryLimitError):
            return False
        self.num_shortages += 1
        self._num_clean, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        if num_rows == len(plan.slices):
            return False
        self.most_tokens = max(1, num_rows // 2)
        _logger.warning("%s Steps compute at most %d tokens now.", error, self.most_tokens)
        return True

    def count_clean(self) -> None:
        """Count a step for which there was memory; after enough of them raise the limit."""
        if self.most_tokens == self._budget:
            return
        self._num_clean += 1
        if self._num_clean >= self._wait:
            self._num_clean = 0
            self.most_tokens = min(2 * self.most_tokens, self._budget)
            _logger.info("Steps may compute %d tokens again.", self.most_tokens)


def run_each(plan: StepPlan, error: Exception, run: Run, fail: Fail) -> StepResult:
    """Run the requests of a step that failed with `error` one by one; `fail` those that do again.

    Raises:
        RanksLostError, DeviceLostError: out of `run`.
    """
    if len(plan.slices) == 1:
        return _failed(plan.slices[0], error, fail)
    parts = []
    for piece in plan.slices:
        try:
            parts.append(run(StepPlan((piece,))))
        except FATAL:
            raise
        except Exception as its_own:  # noqa: BLE001 a kernel's failure must not end other requests
            parts.append(_failed(piece, its_own, fail))
    return StepResult(
        [token for part in parts for token in part.tokens],
        [logprobs for part in parts for logprobs in part.logprobs],
        scores=[score for part in parts for score in part.scores],
        states=[rows for part in parts for rows in part.states],
        num_compiled=sum(part.num_compiled for part in parts),
    )


def find_unusable(plan: StepPlan, result: StepResult) -> Iterator[tuple[Request, TwostrokeError]]:
    """Yield requests whose results are not numbers, or whose next token could not be drawn.

    Tokens after a wrong draft, or after the request's end, do not matter.
    """
    if result.states:
        pooled = [part.request for part in plan.slices if part.num_pooled]
        for request, states in zip(pooled, result.states, strict=True):
            if not np.isfinite(states).all():
                yield request, _failure("its hidden states are not numbers.")
    if None in result.scores:
        asked = [part.request for part in plan.slices for _ in range(part.num_scored)]
        for request, score in zip(asked, result.scores, strict=True):
            if score is None:
                yield request, _failure("its logits are not numbers.")
    if NO_TOKEN not in result.tokens:
        return
    tokens = iter(result.tokens)
    for part in plan.slices:
        drawn = list(islice(tokens, part.num_drawn))
        right = right_drafts(part.drafts, part.branches, drawn)
        drawn_tokens = drawn[:1] + [drawn[1 + draft] for draft in right]
        for index, token in enumerate(drawn_tokens):
            if token == NO_TOKEN:
                yield part.request, _undrawn(part.request, drawn_tokens[:index])
            if token == NO_TOKEN or token in part.request.end_ids:
                break


def _undrawn(request: Request, drawn_tokens: Sequence[int]) -> TwostrokeError:
    """Return the error of a request that has no next token after its output and `drawn_tokens`.

    If the form of the answer and the request's other rules together allow no token, the error names
    the rules. Otherwise the model's logits are at fault.
    """
    params, constraint = request.params, request.params.constraint
    if request.matcher is None or constraint is None:
        return _failure("its logits leave no token to draw.")
    masks = np.zeros((1, request.matcher.num_words), np.uint32)
    try:
        request.matcher.masks([*request.output, *drawn_tokens], (), (), masks)
    except RequestError as error:
        return error
    is_early = request.num_output + len(drawn_tokens) < params.min_tokens
    barred = request.end_ids if is_early else ()
    if not allows_only(masks[0], barred):
        return _failure("its logits leave no token to draw.")
    rules = [
        name for name in ("min_tokens", "logit_bias", "stop_token_ids") if getattr(params, name)
    ]
    if constraint.excluded:
        rules.append("the excluded texts")
    reason = f"leaves no token to draw after {request.num_output + len(drawn_tokens)} tokens"
    reason += f", together with {' and '.join(rules)}: change one of them." if rules else "."
    return RequestError(reason, field=constraint.param)


def _failed(piece: Slice, error: Exception, fail: Fail) -> StepResult:
    """End a request that cannot be computed, and return an empty result for its slice."""
    if not isinstance(error, RequestError):  # such an error is the request's own
        error = _failure(f"{type(error).__name__}: {error}")
    fail(piece.request, error)
    tokens = [NO_TOKEN] * piece.num_drawn
    states = [np.zeros((0, 0), np.float32)] if piece.num_pooled else []
    scores = [None] * piece.num_scored
    return StepResult(tokens, [None] * len(tokens), scores=scores, states=states)


def _failure(why: str) -> TwostrokeError:
    return TwostrokeError(f"The engine failed on this request: {why}")
