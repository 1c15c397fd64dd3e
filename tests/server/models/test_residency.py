"""Which models are in memory: loads compared with the fewest possible, waits, and order."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from support.residency import Stage, fewest_loads, play
from twostroke.server.models.residency import (
    MAX_IDLE_LOADS,
    MIN_STAY_LOADS,
    MIN_WAIT_LOADS,
    ModelResidency,
    ModelUse,
    ResidencyDecision,
    decide_residency,
)

if TYPE_CHECKING:
    from support.residency import Adversary

LOAD_S = 1.0
EQUAL = dict.fromkeys("abc", (1, LOAD_S))
IN = ModelResidency.LOADED


def always_absent(stage: Stage) -> list[str]:
    """Request a model that is not loaded, as soon as the last request is answered."""
    return [] if stage.num_unanswered else stage.absent[:1]


def in_turn(stage: Stage) -> list[str]:
    return [] if stage.num_unanswered else ["abc"[len(stage.arrivals) % 3]]


def at_random(seed: int, often: float) -> Adversary:
    rng = random.Random(seed)
    return lambda _stage: [rng.choice("abc")] if rng.random() < often else []


def with_hits(seed: int) -> Adversary:
    """Request an absent model, and often a loaded model just before or after it."""
    rng = random.Random(seed)

    def choose_models(stage: Stage) -> list[str]:
        if any(model.waiting for model in stage.models.values()):
            return [rng.choice("abc")] if rng.random() < 0.05 else []
        loaded_names = [name for name in "abc" if name not in stage.absent]
        return [
            *stage.absent[:1],
            *([rng.choice(loaded_names)] if loaded_names and rng.random() < 0.6 else []),
        ]

    return choose_models


ADVERSARIES = [
    always_absent,
    in_turn,
    *(at_random(seed, often) for seed, often in enumerate((0.3, 0.1, 0.05, 0.02))),
    *map(with_hits, range(4)),
]


@pytest.mark.parametrize("number", range(len(ADVERSARIES)))
@pytest.mark.parametrize("answer_s", [0.0, 0.3])
def test_500_hostile_requests_take_at_most_twice_the_fewest_loads(
    number: int, answer_s: float
) -> None:
    stage = Stage(EQUAL, 2, answer_s)
    play(stage, ADVERSARIES[number], 500)
    sizes = {name: size for name, (size, _) in EQUAL.items()}
    fewest = fewest_loads(stage.arrivals, sizes, 2, MIN_WAIT_LOADS * LOAD_S - stage.tick_s)
    assert stage.num_loads <= 2 * fewest
    # The patience, a model before it in turn, and an answer for each.
    assert (
        max(wait_s for _, wait_s in stage.waits)
        <= 2 * (MIN_STAY_LOADS + 1) * LOAD_S + 2 * answer_s + 0.5
    )


def test_the_adversary_reaches_the_bound() -> None:
    stage = Stage(EQUAL, 2)
    play(stage, always_absent, 200)
    assert stage.num_loads == 200
    assert fewest_loads(stage.arrivals, dict.fromkeys("abc", 1), 2, 0.5) == 101


@pytest.mark.seeds(6)
def test_models_of_any_size_are_all_answered_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 4) for name in "abcd"}
    models = {name: (size, 0.2 + 0.3 * size) for name, size in sizes.items()}
    stage = Stage(models, rng.randint(4, 7), rng.choice((0.0, 0.5, 2.0)))
    often = rng.choice((0.02, 0.1, 0.4))
    play(stage, lambda _: [rng.choice("abcd")] if rng.random() < often else [], 150, 200)


def test_two_busy_callers_on_memory_for_one_load_a_fifth_of_the_time() -> None:
    stage = Stage({"a": (1, 1.0), "b": (1, 1.0)}, 1, answer_s=0.2)

    def both(stage: Stage) -> list[str]:
        return [n for n, model in stage.models.items() if not model.waiting and not model.running]

    play(stage, both, 1000)
    assert stage.loading_s / stage.now_s < 1 / (1 + MIN_STAY_LOADS) + 0.02
    counts = [sum(name == model for _, name in stage.arrivals) for model in "ab"]
    assert min(counts) > 0.4 * sum(counts)


def test_a_busy_model_is_closed_and_goes_only_after_its_last_request() -> None:
    busy = ModelUse("a", 1, 1.0, IN, used_s=100.0, num_running=2)
    waiting_use = ModelUse("b", 1, 1.0, waiting_since_s=100.0 - MIN_WAIT_LOADS)
    assert decide_residency(100.0, 1, [busy, waiting_use]) == ResidencyDecision(close=("a",))
    ended_use = ModelUse("a", 1, 1.0, IN, used_s=100.0, is_closed=True)
    assert decide_residency(100.0, 1, [ended_use, waiting_use]) == ResidencyDecision(
        unload=("a",), close=("a",)
    )
    assert decide_residency(100.0, 1, [ended_use]) == ResidencyDecision()


def test_times_before_a_model_may_be_taken() -> None:
    def goes(*, waiting_since_s: float, used_s: float, loaded_s: float) -> bool:
        loaded_use = ModelUse("a", 1, 1.0, IN, used_s=used_s, loaded_s=loaded_s)
        return bool(
            decide_residency(
                0.0, 1, [loaded_use, ModelUse("b", 1, 1.0, waiting_since_s=waiting_since_s)]
            ).close
        )

    assert not goes(waiting_since_s=-0.9, used_s=-2, loaded_s=-9)  # b has not waited long enough
    assert goes(waiting_since_s=-1, used_s=-1, loaded_s=-2)  # a is not used
    assert not goes(waiting_since_s=-3, used_s=-0.5, loaded_s=-3.9)  # a is used, and new
    assert goes(waiting_since_s=-3, used_s=-0.5, loaded_s=-MIN_STAY_LOADS)
    assert goes(waiting_since_s=0, used_s=-MAX_IDLE_LOADS, loaded_s=-99)  # a is not used for long


def test_a_later_model_does_not_take_memory_that_an_earlier_one_waits_for() -> None:
    loaded_use = ModelUse("a", 2, 1.0, IN, used_s=10.0, loaded_s=9.5)
    large = ModelUse("b", 3, 1.0, waiting_since_s=10.0)
    small = ModelUse("c", 1, 1.0, waiting_since_s=10.1)
    assert decide_residency(10.2, 3, [loaded_use, large, small]) == ResidencyDecision()
    assert decide_residency(10.2, 3, [loaded_use, small]) == ResidencyDecision(load=("c",))
    assert decide_residency(10.2, 4, [loaded_use, large, small]) == ResidencyDecision()
    assert decide_residency(10.2, 6, [loaded_use, large, small]) == ResidencyDecision(
        load=("b", "c")
    )


def test_a_model_that_turned_out_larger_than_the_budget_loads_again_alone() -> None:
    loaded_use, waiting_use = ModelUse("a", 4, 1.0, IN), ModelUse("b", 12, 1.0, waiting_since_s=0.0)
    assert decide_residency(100.0, 10, [loaded_use, waiting_use]) == ResidencyDecision(
        unload=("a",), close=("a",)
    )
    assert decide_residency(100.0, 10, [waiting_use]) == ResidencyDecision(load=("b",))
    loaded = ModelUse("b", 12, 1.0, IN)
    other = ModelUse("a", 4, 1.0, waiting_since_s=99.9)
    assert decide_residency(100.0, 10, [loaded, other]) == ResidencyDecision(
        unload=("b",), close=("b",)
    )
    assert (
        decide_residency(5.0, 10, [loaded, ModelUse("a", 4, 1.0, waiting_since_s=4.9)])
        == ResidencyDecision()
    )


def test_the_least_worth_goes_first_and_an_idle_one_before_a_busy_one() -> None:
    common = {"num_bytes": 1, "load_s": 1.0, "state": IN}
    waiting_use = ModelUse("z", 1, 1.0, waiting_since_s=0.0)
    cheap = ModelUse("a", used_s=50.0, value=1.0, **common)
    dear = ModelUse("b", used_s=40.0, value=2.0, **common)
    busy = ModelUse("c", used_s=100.0, value=0.5, num_running=1, **common)
    assert decide_residency(100.0, 3, [busy, dear, cheap, waiting_use]).close == ("a",)
    assert decide_residency(100.0, 2, [busy, dear, waiting_use]).close == ("b",)


def test_a_model_leaves_after_its_time_without_requests() -> None:
    view = ModelUse("a", 1, 1.0, IN, used_s=10.0, keep_s=5.0)
    assert decide_residency(14.9, 1, [view]) == ResidencyDecision()
    assert decide_residency(15.0, 1, [view]) == ResidencyDecision(unload=("a",))
    working = ModelUse("a", 1, 1.0, IN, used_s=10.0, keep_s=5.0, num_running=1)
    assert decide_residency(20.0, 1, [working]) == ResidencyDecision()


def test_the_fewest_loads_equal_an_exhaustive_search() -> None:
    """The fewest loads equal those of an exhaustive search, which never waits."""
    rng = random.Random(3)
    for _ in range(30):
        names = [rng.choice("abc") for _ in range(7)]
        arrivals = [(float(when), name) for when, name in enumerate(names)]
        best = len(names)
        for goes in itertools.product((0, 1), repeat=len(names)):
            inside: list[str] = []
            loads = 0
            for name, out in zip(names, goes, strict=True):
                if name not in inside:
                    loads += 1
                    inside = [name, *(inside if len(inside) < 2 else [inside[out]])]
            best = min(best, loads)
        assert fewest_loads(arrivals, dict.fromkeys("abc", 1), 2, 0.0) == best
