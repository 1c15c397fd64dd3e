"""Drafts do not slow a batch down: the real speculator on a simulated machine."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from twostroke.core.hardware import Hardware
from twostroke.core.request import Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import StepResult
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.engine.speculation import (
    FixedDraftBudget,
    NgramProposer,
    Proposal,
    Speculator,
    StepTimeModel,
    budget_function,
    ngram,
)
from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.model.program import BatchShape
from twostroke.model.program.work import Cost, StepCost, each_row, once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.step import StepPlan
    from twostroke.engine.speculation import DraftCost, DraftOutcome, Proposer

MACHINE = Hardware("test", 2, 1 << 34, bandwidth=18e9, peak=600e9, peak_kind="any", source="test")
COST = StepCost(((once, Cost(0, 85_000_000)), (each_row, Cost(270_000_000, 1000))))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 24, 32, 64)
STEP_S = np.array(
    (4.7, 5.9, 6.8, 7.1, 9.3, 9.9, 10.2, 10.9, 12.8, 16, 17.3, 20.5, 29.2, 39.4, 76)
) / 1e3  # fmt: skip
READING_S = 8e-6  # that pass between two looks at the clock
PROMPT, ANSWER = 100, 128
VOCAB_SIZE = 2000

# How often a text goes on with a copy of something before, and how long copies are on average.
TEXTS = {"random": (0.0, 1), "chat": (0.03, 5), "code": (0.12, 7), "short": (0.25, 3)}
EDIT = (0.2, 40)


class Clock:
    """Simulated time, in place of the module `time` and of a speculator's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += READING_S
        return self.now_s

    perf_counter = monotonic


@dataclass
class Noise:
    """Random factors by which steps take longer on a shared machine."""

    rng: random.Random
    drift: float = 0.0
    spell: float = 1.0
    left: int = 0

    def draw(self) -> float:
        self.drift = 0.995 * self.drift + self.rng.gauss(0, 0.015)
        self.left = max(0, self.left - 1)
        if not self.left and self.rng.random() < 1 / 50:
            self.left = 1 + int(self.rng.expovariate(1 / 10))
            self.spell = self.rng.uniform(1.2, 3)
        return math.exp(self.rng.gauss(0, 0.05) + self.drift) * (self.spell if self.left else 1)


@dataclass
class Drafting:
    """A proposer of eight tokens for each request, each right with the same probability."""

    right: float
    rng: random.Random
    clock: Clock
    texts: dict[str, list[int]]
    name: str = "ngram"
    odds: AcceptanceRate = field(default_factory=lambda: AcceptanceRate((0.5,)))
    requests: dict[Request, AcceptanceRate] = field(default_factory=dict)

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        self.clock.now_s += 4 * READING_S * len(requests)
        return [self.draft(request, min(8, price.max_drafts)) for request in requests]

    def draft(self, request: Request, max_tokens: int) -> Proposal | None:
        odds = self.requests.setdefault(request, self.odds.for_request())
        coming = self.texts[request.id][len(request.tokens) :][:max_tokens]
        if not coming:
            return None
        drafts = [t if self.rng.random() < self.right else VOCAB_SIZE for t in coming]
        kinds = (0,) * len(drafts)
        return Proposal(self.name, tuple(drafts), (odds.of(0),) * len(drafts), kinds)

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        self.requests[request].learn(proposal, outcome)

    def finish(self, request: Request) -> None:
        self.requests.pop(request, None)

    def close(self) -> None:
        pass


@dataclass
class Simulation:
    """Runs jobs with one speculator, which continues to learn from job to job."""

    clock: Clock
    seed: int
    budget_of: Callable[[BatchShape], Any] | None = None
    right: float | None = None  # share of a draft model's tokens; None: drafts from the text
    rng: random.Random = field(init=False)
    noise: Noise = field(init=False)
    speculator: Speculator = field(init=False)
    jobs: itertools.count[int] = field(default_factory=itertools.count)
    texts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.noise = Noise(random.Random(self.seed + 1000))
        step_times = StepTimeModel(COST, MACHINE, rows_together=8)
        proposer: Proposer = NgramProposer()
        if self.right is not None:
            proposer = Drafting(self.right, self.rng, self.clock, self.texts)
        budget_of = self.budget_of or budget_function(step_times, None)
        clock = self.clock.monotonic
        self.speculator = Speculator([proposer], budget_of, step_times, clock=clock)

    def speedup(self, text: tuple[float, int], num_streams: int, rounds: int = 4) -> float:
        """Return how many times faster drafts make the text; the first round only teaches."""
        plain_s = speculative_s = 0.0
        for number in range(rounds):
            texts = [self.text(*text) for _ in range(num_streams)]
            plain, speculative = self.token_s(texts, "off"), self.token_s(texts, "auto")
            if number:
                plain_s, speculative_s = plain_s + plain, speculative_s + speculative
        return plain_s / speculative_s

    def text(self, copies: float, length: int) -> list[int]:
        rng = self.rng
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT)]
        while len(tokens) < PROMPT + ANSWER:
            if rng.random() < copies:
                at = rng.randrange(len(tokens) - 12)
                tokens += tokens[at : at + 3 + int(rng.expovariate(1 / length))]
            else:
                tokens.append(rng.randrange(VOCAB_SIZE))
        return tokens[: PROMPT + ANSWER]

    def token_s(self, texts: list[list[int]], method: str) -> float:
        """Return the seconds of a token of a job in which all streams run together."""
        job = next(self.jobs)
        line = Scheduler(SchedulerConfig(4096, 64), PagePool(4096, 16), None, Continuous())
        texts_by_id = {f"{job} {i}": text for i, text in enumerate(texts)}
        self.texts.update(texts_by_id)
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
        for name, text in texts_by_id.items():
            salt, hints = str(job).encode(), Hints(method)
            line.add(Request(name, text[:PROMPT], PROMPT, params, 0, salt=salt, hints=hints))
        seconds, num_tokens = 0.0, 0
        while line.has_work:
            plan = line.plan()
            assert plan is not None
            began_s = self.clock.now_s
            drafts = self.speculator.extend(plan, line.add_drafts)
            asking_s = self.clock.now_s - began_s
            batch, result = BatchShape.of(plan), StepResult(*draw_tokens(plan, texts_by_id))
            line.commit(plan, result)
            step_s = float(np.interp(batch.num_rows, ROWS, STEP_S))
            elapsed_s = asking_s + step_s * self.noise.draw()
            self.speculator.learn(plan, drafts, batch, result, elapsed_s)
            for part in plan.slices:
                if part.request.is_finished:
                    self.speculator.finish(part.request)
            step = self.speculator.stats.recent[-1]
            if step.num_rows == len(texts) + step.num_drafts:
                seconds, num_tokens = seconds + asking_s + step_s, num_tokens + step.num_tokens
        return seconds / num_tokens


def draw_tokens(plan: StepPlan, texts: dict[str, list[int]]) -> tuple[list[int], list[None]]:
    tokens: list[int] = []
    for part in plan.slices:
        at = part.start + part.count
        tokens += (texts[part.request.id][at:] + [0] * len(part.drafts))[: part.num_drawn]
    return tokens, [None] * len(tokens)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(ngram, "time", clock)
    yield clock
    assert not caplog.records, "a proposer that fails is asked no more"


@pytest.mark.seeds(1)
def test_no_text_is_slower_at_any_load(clock, seed, rounds):
    """With one round, every second load of each text is tried, from the first or the second on."""
    simulation, loads = Simulation(clock, seed), (1, 4, 16, 32)
    for number, (name, text) in enumerate(TEXTS.items()):
        for num_streams in loads if rounds > 1 else loads[number % 2 :: 2]:
            assert simulation.speedup(text, num_streams) > 0.975, (name, num_streams)


def test_drafts_for_a_step_that_was_lost_do_not_matter(clock):
    simulation = Simulation(clock, 0)
    simulation.speculator._asking_s = 5.0  # before its rank was lost
    simulation.token_s([simulation.text(*EDIT)], "auto")
    assert min(step.step_s for step in simulation.speculator.stats.recent) >= 0


def test_predictable_text_is_faster(clock):
    simulation = Simulation(clock, 0)
    assert simulation.speedup(EDIT, 1) > 1.6
    assert simulation.speedup(EDIT, 4) > 1.05


@pytest.mark.seeds(1)
def test_a_draft_that_does_not_pay_costs_little(clock, seed):
    for right in (0.5, 0.6):
        for num_streams in (4, 8, 16):
            result = Simulation(clock, seed, right=right).speedup(TEXTS["random"], num_streams, 7)
            assert result > 0.93, (right, num_streams)


def test_a_draft_is_faster_where_it_pays(clock):
    assert Simulation(clock, 0, right=0.8).speedup(TEXTS["random"], 1) > 1.5


def test_drafts_that_ignore_their_cost_are_slower(clock):
    simulation = Simulation(clock, 0, lambda _: FixedDraftBudget(4))
    assert simulation.speedup(TEXTS["short"], 16) < 0.8


def test_a_budget_without_a_cost_is_asked_again_after_a_pause(clock):
    batches = []

    def hopeless(batch: BatchShape) -> SimpleNamespace:
        batches.append(batch)
        return SimpleNamespace(cost=lambda _: None)

    Simulation(clock, 0, hopeless).speedup(EDIT, 4, rounds=2)
    assert 10 < len(batches) < 100
