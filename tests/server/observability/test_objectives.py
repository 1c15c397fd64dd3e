"""Latency objectives: how they are written, and which answers meet them."""

from __future__ import annotations

import pytest

from twostroke.core.errors import UsageError
from twostroke.engine.output import Timings, Usage
from twostroke.server.observability.objectives import Goodput, limits_of, parse_objective
from twostroke.server.options import Objective


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
    assert (read.measure, read.service_tier) == (objective.measure, objective.service_tier)
    assert read.limit_s == pytest.approx(objective.limit_s)


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft", "ttft:0.5", "tttf=0.5", "priorty:ttft=1", ":ttft=1", "ttft=", "ttft=fast"),
        *("ttft=0", "ttft=-1", "ttft=inf", "ttft=nan", "ttft=1.2.3", "ttft=1h", "ttft=1\ntpot=1"),
        "x" * 1000,
    ],
)
def test_a_malformed_objective_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="must be NAME=SECONDS") as caught:
        parse_objective(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_limit_of_a_class_overrides_the_common_limit() -> None:
    limits = limits_of(
        [Objective("ttft", 0.5), Objective("ttft", 0.2, "priority"), Objective("e2e", 9, "flex")]
    )
    assert limits == {
        "default": {"ttft": 0.5},
        "flex": {"ttft": 0.5, "e2e": 9},
        "priority": {"ttft": 0.2},
        "batch": {},
    }


@pytest.mark.parametrize("service_tier", [None, "flex"])
def test_an_objective_may_be_said_once(service_tier: str | None) -> None:
    with pytest.raises(UsageError, match="given twice for ttft"):
        limits_of([Objective("ttft", 1, service_tier), Objective("ttft", 2, service_tier)])


def test_an_answer_is_good_if_it_meets_all_objectives() -> None:
    goodput = Goodput([Objective("ttft", 0.5), Objective("tpot", 0.1)])
    goodput.judge("default", _usage(11), _timings(first=0.4, last=1.4))
    goodput.judge("default", _usage(11), _timings(first=0.4, last=2.4))
    goodput.judge("default", _usage(11), _timings(first=0.6, last=1.4))
    goodput.judge("flex", _usage(1), _timings(first=0.5, last=0.5))
    objective_counts = goodput.read()
    assert objective_counts["default", "ttft", "met"] == 2
    assert objective_counts["default", "ttft", "missed"] == 1
    assert objective_counts["default", "tpot", "met"] == 2
    assert objective_counts["default", "tpot", "missed"] == 1
    assert (
        objective_counts["default", "all", "met"],
        objective_counts["default", "all", "missed"],
    ) == (1, 2)
    assert objective_counts["flex", "tpot", "met"] == 1  # of one token
    assert objective_counts["default", "all", "good_tokens"] == 11
    assert objective_counts["flex", "all", "good_tokens"] == 1


def test_failed_answers_miss_all_objectives() -> None:
    goodput = Goodput([Objective("ttft", 0.5), Objective("e2e", 9)])
    goodput.miss("default", 3)
    assert goodput.read() == {("default", name, "missed"): 3 for name in ("ttft", "e2e", "all")}


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
def test_client_that_left_late_misses_objectives(
    waited_s: float, has_begun: bool, missed: set[str]
) -> None:
    goodput = Goodput([Objective("ttft", 0.5), Objective("e2e", 9)])
    goodput.leave("default", 1, waited_s, has_begun=has_begun)
    assert {measure for _, measure, _ in goodput.read()} == missed


def test_classes_without_objectives_are_not_judged() -> None:
    goodput = Goodput([Objective("ttft", 0.5, "priority")])
    goodput.judge("default", _usage(5), _timings(first=9, last=9))
    goodput.miss("default", 1)
    goodput.leave("default", 1, 100, has_begun=False)
    assert goodput.has_objectives
    assert goodput.read() == {}


def test_goodput_is_that_of_the_last_minute() -> None:
    now = [100.0]
    goodput = Goodput([Objective("ttft", 0.5)], clock=lambda: now[0])
    goodput.judge("default", _usage(5), _timings(first=0.1, last=0.1))
    now[0] = 110.5
    goodput.judge("default", _usage(7), _timings(first=0.1, last=0.1))
    now[0] = 150.0
    objective_counts, seconds = goodput.recent()
    assert (objective_counts["default", "all", "met"], seconds) == (2, 50)
    now[0] = 165.0
    objective_counts, seconds = goodput.recent()
    assert (
        objective_counts["default", "all", "met"],
        objective_counts["default", "all", "good_tokens"],
        seconds,
    ) == (
        1,
        7,
        60,
    )
    now[0] = 300.0
    assert goodput.recent()[0]["default", "all", "met"] == 0
    assert goodput.read()["default", "all", "met"] == 2


def _usage(completion: int) -> Usage:
    return Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=completion)


def _timings(first: float, last: float) -> Timings:
    return Timings(arrival_s=0, started_s=0, first_token_s=first, last_token_s=last)
