"""Sampled answers have the distribution that they have without drafts, whatever the drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.chi_square import AGREES, DIFFERS, deviate
from support.native import load_level
from support.sampling import run_rows
from twostroke.backends.sampling.reference import adjust, distribution
from twostroke.backends.sampling.rows import RESULT, RowTable, read_results
from twostroke.core.draft_tree import ROOT, accepted_drafts, num_accepted
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import StepResult
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    import ctypes

    from numpy.typing import NDArray

    from twostroke.core.step import StepPlan

VOCAB_SIZE = 6
LENGTH = 3
COUNT = 1_000  # answers, or 6,000 with more than one round
PROMPT = (0, 3)
LOGITS = (np.random.default_rng(8).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 1.2).astype(np.float32)
LIKELIEST = np.argsort(-LOGITS).tolist()  # tokens after each token
OTHER_MODEL = np.exp(LOGITS.astype(float) * 0.7).tolist()

CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.15),
    SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
    SamplingParams(repetition_penalty=5.0),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(frequency_penalty=2.0),
    SamplingParams(repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=2.0),
    SamplingParams(logit_bias={1: 2.0, 4: -100}),
    SamplingParams(min_tokens=2, stop_token_ids=(2,)),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, top_k=4),
]
PENALTIES = CASES[10]  # so strong that rows with a wrong history draw other tokens
CHAINS = ("anything", "likeliest", "other model", "what it will be", "now and then")
TREES = ("any tree", "likely tree")
GUESSES = (*CHAINS, *TREES)


@dataclass(slots=True)
class Table:
    """A model whose logits are a table of the previous token, with the native sampler."""

    library: ctypes.CDLL
    rows: RowTable = field(default_factory=RowTable)
    num_answers: int = COUNT

    def run(self, plan: StepPlan) -> StepResult:
        sampling = [part for part in plan.slices if part.samples]
        requests = [part.request for part in sampling]
        before = [t for part in sampling for t in (part.request.tokens[-1], *part.drafts)]
        rows = self.rows.rows(requests, sampling)
        results = np.zeros(len(rows), RESULT)
        run_rows(self.library, rows, LOGITS[before], results)
        return StepResult(*read_results(results, rows))


@pytest.fixture(scope="module")
def table(rounds: int) -> Table:
    return Table(load_level("portable"), num_answers=COUNT * min(rounds, 6))


def answers(table: Table, params: SamplingParams, how: str) -> NDArray[np.int64]:
    """Return the answers to many requests with random drafts, each answer as one number.

    Answers that end early are padded with 0.
    """
    params, ends = replace(params, max_tokens=LENGTH), frozenset(params.stop_token_ids)
    requests = [
        Request(f"r{seed}", list(PROMPT), len(PROMPT), params, seed, end_ids=ends)
        for seed in range(table.num_answers)
    ]
    count = table.num_answers
    pool = PagePool(4 * count, 2)
    config = SchedulerConfig(64, count, 10 * count, count, 10 * count)
    line = Scheduler(config, pool, None, Continuous())
    for request in requests:
        line.add(request)
    rng = random.Random(5)
    while line.has_work:
        plan = line.plan()
        assert plan is not None
        for part in plan.slices:
            if part.start >= len(PROMPT):
                drafts, parents = random_drafts(rng, how, part.request), ()
                if how in TREES:
                    drafts, parents = tree(rng, how, part.request)
                line.add_drafts(part, drafts, parents)
        line.commit(plan, table.run(plan))
    for request in requests:
        table.rows.forget(request)
    return np.array([code(request.output) for request in requests])


def random_drafts(rng: random.Random, how: str, request: Request) -> tuple[int, ...]:
    last = request.tokens[-1]
    if how == "anything":
        return tuple(rng.choices(range(VOCAB_SIZE), k=2))
    if how == "now and then":
        return tuple(rng.choices(range(VOCAB_SIZE), k=rng.randrange(3)))
    results: list[int] = []
    for index in range(2):
        if how == "other model":
            [last] = rng.choices(range(VOCAB_SIZE), OTHER_MODEL[last])
        elif how == "likeliest":
            last = LIKELIEST[last][0]
        else:  # what a draft that knew the seed would say
            last = (request.seed + index) % VOCAB_SIZE
        results.append(last)
    return tuple(results)


def tree(rng: random.Random, how: str, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a draft tree: two tokens, and one or two tokens after each of them."""
    tokens: list[int] = []
    parents: list[int] = []
    for parent, count in ((ROOT, 2), (0, 2), (1, 1 + rng.randrange(2))):
        before = request.tokens[-1] if parent == ROOT else tokens[parent]
        likely = how == "likely tree"
        tokens += LIKELIEST[before][:count] if likely else rng.sample(range(VOCAB_SIZE), count)
        parents += [parent] * count
    return tuple(tokens), tuple(parents)


def code(output: list[int]) -> int:
    number = 0
    for index in range(LENGTH):
        number = number * (VOCAB_SIZE + 1) + (output[index] + 1 if index < len(output) else 0)
    return number


def exact(params: SamplingParams) -> NDArray[np.float64]:
    """Return the probability of each answer, computed by the definition of sampling."""
    chances = np.zeros((VOCAB_SIZE + 1) ** LENGTH)
    ends = frozenset(params.stop_token_ids)

    def go_on(output: list[int], chance: float) -> None:
        has_ended = output and output[-1] in ends and len(output) > params.min_tokens
        if has_ended or len(output) == LENGTH:
            chances[code(output)] = chance
            return
        tokens = [*PROMPT, *output]
        request = Request("r", tokens, len(PROMPT), params, 0, end_ids=ends)
        ids, weight = distribution(params, adjust(request, LOGITS[tokens[-1]]))
        for token, share in zip(ids.tolist(), weight / weight.sum(), strict=True):
            go_on([*output, token], chance * float(share))

    go_on([], 1.0)
    return chances


pytestmark = pytest.mark.rounds


@pytest.mark.parametrize("params", CASES, ids=str)
def test_answers_are_as_likely_as_without_drafts(table, params):
    how = GUESSES[CASES.index(params) % len(GUESSES)]
    assert deviate(answers(table, params, how), exact(params)) < AGREES


@pytest.mark.parametrize("how", GUESSES[1:])  # the first one is above
def test_answers_are_as_likely_for_every_source_of_drafts(table, how):
    assert deviate(answers(table, CASES[0], how), exact(CASES[0])) < AGREES


def test_drafts_of_a_similar_model_are_often_right():
    """Otherwise the other tests would hardly test accepted drafts."""
    table = Table(load_level("portable"))
    seen = []
    take = Scheduler.commit

    def watched(line, plan, result):
        deltas = take(line, plan, result)
        seen.extend(len(delta.tokens) for delta in deltas)
        return deltas

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "commit", watched)
        answers(table, CASES[1], "likeliest")
    assert seen.count(2) > 0.2 * COUNT


def trusts_the_first(drafts, drawn_tokens):
    """A planted fault: the first draft is accepted although another token was drawn."""
    return max(num_accepted(drafts, drawn_tokens), min(1, len(drafts)))


def trusts_what_is_likely(drafts, drawn_tokens):
    """A planted fault: a wrong draft is sometimes accepted, as if probabilities were confused."""
    right = num_accepted(drafts, drawn_tokens)
    return (
        right + 1
        if right < len(drafts) and (drafts[right] + drawn_tokens[right]) % 3 == 0
        else right
    )


def never_trusts_the_second(drafts, drawn_tokens):
    """A harmless change: only the first draft is ever accepted."""
    return min(1, num_accepted(drafts, drawn_tokens))


class SameNumberForAll(RowTable):
    """A planted fault: the rows of drafts use the random number of the newest token's row."""

    def rows(self, requests, parts=None):
        rows = super().rows(requests, parts)
        rows["counter"] = [part.request.num_output for part in parts for _ in (0, *part.drafts)]
        return rows


class ForgetsDrafts(RowTable):
    """A planted fault: penalties do not count the drafts before a row."""

    def rows(self, requests, parts=None):
        rows = super().rows(requests, parts)
        rows["num_tokens"] = [len(part.request.tokens) for part in parts for _ in (0, *part.drafts)]
        return rows


class SeesOtherBranches(RowTable):
    """A planted fault: penalties count tokens of another branch instead of the row's ancestors."""

    def _branch(self, parts, firsts, rows, num_tokens):
        pointers = rows["tokens"].copy()
        super()._branch(parts, firsts, rows, num_tokens)
        rows["tokens"] = pointers


@dataclass(slots=True)
class DrawsAgain(Table):
    """A planted fault: after a wrong draft another token is drawn, so the draft has two chances.

    This is rejection sampling without its residual distribution.
    """

    def run(self, plan: StepPlan) -> StepResult:
        result = Table.run(self, plan)
        first = 0
        for part in plan.slices:
            drawn_tokens = result.tokens[first : first + part.num_drawn]
            right = num_accepted(part.drafts, drawn_tokens)
            if right < len(part.drafts):
                logits = LOGITS[[part.request.tokens[-1], *part.drafts][right]].astype(float)
                p = np.exp(logits - logits.max())
                rng = np.random.default_rng((part.request.seed, len(part.request.tokens)))
                result.tokens[first + right] = int(rng.choice(VOCAB_SIZE, p=p / p.sum()))
            first += part.num_drawn
        return result


def trusts_a_sibling(drafts, branches, drawn_tokens):
    """A planted fault: if the first of two sibling drafts is wrong, the second is accepted."""
    right = [*accepted_drafts(drafts, branches, drawn_tokens)]
    return right or [branches[-1].first] if branches else right


@pytest.mark.parametrize("fault", [trusts_the_first, trusts_what_is_likely])
def test_a_wrongly_accepted_draft_changes_the_distribution(table, monkeypatch, fault):
    monkeypatch.setattr("twostroke.core.draft_tree.num_accepted", fault)
    params, many = CASES[0], Table(table.library, num_answers=4_000)
    assert deviate(answers(many, params, "other model"), exact(params)) > DIFFERS


def test_a_wrongly_accepted_branch_changes_the_distribution(table, monkeypatch):
    monkeypatch.setattr("twostroke.engine.scheduler.results.accepted_drafts", trusts_a_sibling)
    params = CASES[0]
    assert deviate(answers(table, params, "any tree"), exact(params)) > DIFFERS


def test_a_needlessly_dropped_draft_does_not_change_the_distribution(table, monkeypatch):
    monkeypatch.setattr("twostroke.core.draft_tree.num_accepted", never_trusts_the_second)
    params = CASES[0]
    assert deviate(answers(table, params, "other model"), exact(params)) < AGREES


@pytest.mark.parametrize(
    ("rows", "params", "how"),
    [
        (SameNumberForAll, CASES[0], "likeliest"),
        (ForgetsDrafts, PENALTIES, "likeliest"),
        (SameNumberForAll, CASES[0], "likely tree"),
        (ForgetsDrafts, PENALTIES, "likely tree"),
        (SeesOtherBranches, PENALTIES, "likely tree"),
    ],
    ids=str,
)
def test_rows_with_the_wrong_place_change_the_distribution(table, rows, params, how):
    faulty = Table(table.library, rows(), num_answers=3_000)
    assert deviate(answers(faulty, params, how), exact(params)) > DIFFERS


def test_a_second_draw_after_a_wrong_draft_changes_the_distribution(table):
    faulty = DrawsAgain(table.library)
    params = CASES[0]
    assert deviate(answers(faulty, params, "likeliest"), exact(params)) > DIFFERS
