"""Sampling parameters: forms that are accepted, and wrong values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from twostroke.core.errors import RequestError
from twostroke.core.sampling import SamplingParams


def test_stops_may_be_lists_or_one_string() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(("stop", "stops"), [("", ()), ([""], ()), (["", "a"], ("a",))])
def test_empty_stop_strings_are_left_out(stop: object, stops: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == stops  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5},
        {"stop": [5]},
        {"stop_token_ids": 5},
        {"stop_token_ids": "5"},
        {"stop_token_ids": [True]},
        {"logit_bias": [5]},
        {"logit_bias": {5: math.nan}},
        {"temperature": -1},
        {"temperature": math.inf},
        {"temperature": 10**400},
        {"top_p": -0.1},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"min_tokens": 5, "max_tokens": 4},
        {"seed": 2**64},
        {"n": 129},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"max_tokens": -1, "prompt_logprobs": 1},
        {"constraint": "[0-9]+"},
    ],
)
def test_wrong_value_names_its_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.field == next(iter(wrong))
