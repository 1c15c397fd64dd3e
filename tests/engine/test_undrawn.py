"""Requests for which no token can be sampled: the error names the rules that forbid all tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import NO_TOKEN, StepResult
from twostroke.engine.client import Caller, new_request
from twostroke.engine.faults import find_unusable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

END = 7


class OnlyAllows:
    """A grammar matcher that allows the same few tokens at every position."""

    num_words = 1

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def masks(self, output: Any, drafts: Any, parents: Any, out: NDArray[np.uint32]) -> None:
        out[0] = sum(1 << token for token in self.tokens)


def error_of(matcher: OnlyAllows | None, **fields: Any) -> TwostrokeError:
    """Return the error of a request for which no token can be sampled."""
    form = None if matcher is None else Constraint.regex("a*")
    request = new_request([1, 2], SamplingParams(constraint=form, **fields), Caller())
    request.matcher, request.end_ids = matcher, frozenset({END})
    part = SimpleNamespace(request=request, num_drawn=1, drafts=(), branches=())
    plan: Any = SimpleNamespace(slices=[part])
    [(unusable_request, error)] = find_unusable(plan, StepResult([NO_TOKEN], [None]))
    assert unusable_request is request
    return error


@pytest.mark.parametrize(
    ("allowed", "fields", "names"),
    [
        ((), {}, ("regex",)),
        ((END,), {"min_tokens": 3}, ("regex", "min_tokens")),
        ((), {"logit_bias": {5: -100}, "stop_token_ids": [6]}, ("logit_bias", "stop_token_ids")),
    ],
)
def test_rules_that_leave_no_token_are_the_requests_error(
    allowed: tuple[int, ...], fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    error = error_of(OnlyAllows(*allowed), **fields)
    assert isinstance(error, RequestError)
    for name in names:
        assert name in str(error)


def test_logits_that_are_no_numbers_are_the_engines_error() -> None:
    for matcher in (None, OnlyAllows(5)):
        error = error_of(matcher)
        assert not isinstance(error, RequestError)
        assert error.http_status == 500
