"""Objectives: how they are written, and which answers keep them."""

from __future__ import annotations

import pytest

from twostroke.core.errors import UsageError
from twostroke.engine.output import Timings, Usage
from twostroke.serve.observe.objectives import Goodput, Objective, limits_of, parse_objective


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("ttft=0.5", Objective("ttft", 0.5)),
        ("tpot=50ms", Objective("tpot", 0.05)),
        ("e2e = 30 s", Objective("e2e", 30)),
        ("priority:ttft=0.2", Objective("ttft", 0.2, "priority")),
        ("queue=1e-3", Objective("queue", 0.001)),
    ],
)
def test_objectives_are_read(text: str, objective: Objective) -> None:
    read = parse_objective(text)
    assert (read.measure, read.service) == (objective.measure, objective.service)
    assert read.limit_s == pytest.approx(objective.limit_s)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be NAME=SECONDS"),
        ("ttft", "NAME=SECONDS"),
        ("ttft:0.5", "NAME=SECONDS"),
        ("tttf=0.5", "Did you mean 'ttft'?"),
        ("priorty:ttft=1", "Did you mean 'priority'?"),
        (":ttft=1", "must name a class"),
        ("ttft=", "greater than 0"),
        ("ttft=fast", "greater than 0"),
        ("ttft=0", "greater than 0"),
        ("ttft=-1", "greater than 0"),
        ("ttft=inf", "greater than 0"),
        ("ttft=nan", "greater than 0"),
        ("ttft=1h", "greater than 0"),
        ("ttft=1\ntpot=1", "greater than 0"),
        ("x" * 1000, "must be NAME=SECONDS"),
    ],
)
def test_a_malformed_objective_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_objective(text)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_class_s_own_limit_goes_before_that_of_all() -> None:
    limits = limits_of(
        [Objective("ttft", 0.5), Objective("ttft", 0.2, "priority"), Objective("e2e", 9, "flex")]
    )
    assert limits == {
        "default": {"ttft": 0.5},
        "flex": {"ttft": 0.5, "e2e": 9},
        "priority": {"ttft": 0.2},
    }


@pytest.mark.parametrize("service", [None, "flex"])
def test_an_objective_may_be_said_once(service: str | None) -> None:
    with pytest.raises(UsageError, match="given twice for ttft"):
        limits_of([Objective("ttft", 1, service), Objective("ttft", 2, service)])


def test_an_answer_is_good_if_it_meets_all_that_is_asked() -> None:
    goodput = Goodput([Objective("ttft", 0.5), Objective("tpot", 0.1)])
    goodput.judge("default", _usage(11), _timings(first=0.4, last=1.4))
    goodput.judge("default", _usage(11), _timings(first=0.4, last=2.4))
    goodput.judge("default", _usage(11), _timings(first=0.6, last=1.4))
    goodput.judge("flex", _usage(1), _timings(first=0.5, last=0.5))
    kept = goodput.read()
    assert kept.met["default", "ttft"] == 2
    assert kept.missed["default", "ttft"] == 1
    assert kept.met["default", "tpot"] == 2
    assert kept.missed["default", "tpot"] == 1
    assert (kept.met["default", "all"], kept.missed["default", "all"]) == (1, 2)
    assert kept.met["flex", "tpot"] == 1  # of one token
    assert kept.good_tokens == {"default": 11, "flex": 1}


def test_answers_that_never_came_missed_everything() -> None:
    goodput = Goodput([Objective("ttft", 0.5), Objective("e2e", 9)])
    goodput.miss("default", 3)
    assert goodput.read().missed == {("default", name): 3 for name in ("ttft", "e2e", "all")}


@pytest.mark.parametrize(
    ("waited_s", "has_begun", "missed"),
    [
        (0.4, False, set()),
        (0.6, False, {"ttft", "all"}),
        (0.6, True, set()),
        (10, False, {"ttft", "e2e", "all"}),
        (10, True, {"e2e", "all"}),
    ],
)
def test_who_leaves_is_counted_where_it_had_waited_too_long(
    waited_s: float, has_begun: bool, missed: set[str]
) -> None:
    goodput = Goodput([Objective("ttft", 0.5), Objective("e2e", 9)])
    goodput.leave("default", 1, waited_s, has_begun=has_begun)
    assert {measure for _, measure in goodput.read().missed} == missed


def test_nothing_is_judged_where_nothing_is_asked() -> None:
    goodput = Goodput([Objective("ttft", 0.5, "priority")])
    goodput.judge("default", _usage(5), _timings(first=9, last=9))
    goodput.miss("default", 1)
    goodput.leave("default", 1, 100, has_begun=False)
    assert goodput.has_objectives
    assert goodput.read().met == goodput.read().missed == {}


def test_goodput_is_that_of_the_last_minute() -> None:
    now = [100.0]
    goodput = Goodput([Objective("ttft", 0.5)], clock=lambda: now[0])
    goodput.judge("default", _usage(5), _timings(first=0.1, last=0.1))
    now[0] = 110.5
    goodput.judge("default", _usage(7), _timings(first=0.1, last=0.1))
    now[0] = 150.0
    kept, seconds = goodput.recent()
    assert (kept.met["default", "all"], seconds) == (2, 50)
    now[0] = 165.0
    kept, seconds = goodput.recent()
    assert (kept.met["default", "all"], kept.good_tokens["default"], seconds) == (1, 7, 60)
    now[0] = 300.0
    assert goodput.recent()[0].met["default", "all"] == 0
    assert goodput.read().met["default", "all"] == 2


def _usage(completion: int) -> Usage:
    return Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=completion)


def _timings(first: float, last: float) -> Timings:
    return Timings(arrival_s=0, started_s=0, first_token_s=first, last_token_s=last)
