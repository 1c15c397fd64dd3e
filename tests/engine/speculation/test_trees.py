"""Trees of drafts on real backends give the same tokens, and planted faults change tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.cpu import tiny_model
from support.drafts import random_draft_tree
from support.engines import tiny_client
from support.native import native_dir
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.draft_tree import ROOT
from twostroke.core.sampling import SamplingParams
from twostroke.engine.scheduler import Continuous
from twostroke.engine.scheduler import draft_pages as drafting
from twostroke.engine.speculation import (
    DraftCost,
    DraftOutcome,
    FixedDraftBudget,
    Proposal,
    Speculator,
    StepTimeModel,
)
from twostroke.model.program.work import Cost, StepCost, each_row, once

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.core.request import Request
    from twostroke.engine.client import Client
    from twostroke.engine.output import Completion

NUM_PAGES = 400
CONTEXT = 200
SETTING = Setting(NUM_PAGES, 64, 4, prefix_cache=True, policy=Continuous(), draft_seed=3)
MODEL: dict[str, Any] = {"num_layers": 2, "head_dim": 32}


def requests_of(seed: int, count: int = 12) -> list[Request]:
    rng = random.Random(seed)
    return random_requests(rng, count, vocab_size=200, longest=60, most_output=40)


def run(backend: Any, setting: Setting, requests: list[Request], expected: Any = None) -> Any:
    answers, _ = run_schedule(backend, setting, requests, CONTEXT, expected)
    return answers


class KeepsItsOwnPages(drafting.DraftPages):
    """A planted fault: after a right branch, the request continues with another branch's pages."""

    def settle(self, slice_, last):  # type: ignore[no-untyped-def]
        super().settle(slice_, min(last, slice_.branches[0].first - 1) if slice_.branches else ROOT)


class DropsAStore(drafting.DraftPages):
    """A planted fault: a row that several branches share is not stored in one of their pages."""

    def _branches(self, *args):  # type: ignore[no-untyped-def]
        return [replace(branch, above=branch.above[1:]) for branch in super()._branches(*args)]


class BeginsWithNothing(drafting.DraftPages):
    """A planted fault: a branch's first page is not a copy of the request's page."""

    def _branches(self, *args):  # type: ignore[no-untyped-def]
        return [replace(branch, is_copied=False) for branch in super()._branches(*args)]


@pytest.mark.parametrize("fault", [None, KeepsItsOwnPages, DropsAStore, BeginsWithNothing])
@pytest.mark.parametrize("kv_format", ["f16", "int16", "int8"])
def test_wrong_pages_of_branches_would_change_tokens(
    monkeypatch: pytest.MonkeyPatch, fault: type[drafting.DraftPages] | None, kv_format: str
) -> None:
    native_dir()
    backend = CpuBackend(*tiny_model(**MODEL), NUM_PAGES, 16, 2, kv_format=kv_format)
    plain = run(backend, SETTING.alone(NUM_PAGES), requests_of(1))
    if fault is not None:
        monkeypatch.setattr("twostroke.engine.scheduler.scheduler.DraftPages", fault)
    copies = requests_of(1)
    assert (run(backend, SETTING, copies, plain) == plain) == (fault is None)
    if fault is None:
        assert sum(request.num_moves for request in copies) > 10
    backend.close()


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("windows", [(None, None), (20, None)])
def test_interpreting_backends_run_trees(name: str, windows: tuple[int | None, ...]) -> None:
    if name == "torch":
        pytest.importorskip("torch", reason="no PyTorch here")
        from twostroke.backends.torch import TorchBackend as Backend
    else:
        Backend = ReferenceBackend  # type: ignore[assignment,misc]  # noqa: N806
    backend = Backend(*tiny_model(windows=windows, **MODEL), NUM_PAGES, 16)
    requests = requests_of(2, 6)
    for request in requests:  # sums of other shapes differ in the last bits
        request.params = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.1)
    plain = run(backend, SETTING.alone(NUM_PAGES), [fresh(r) for r in requests])
    copies = [fresh(r) for r in requests]
    result = run(backend, SETTING, copies, plain)
    assert [result[r.id][0] for r in copies] == [plain[r.id][0] for r in copies]
    assert sum(request.num_moves for request in copies) > 5
    backend.close()


class TreeProposer:
    """A proposer of trees that contain the right tokens among wrong tokens."""

    name = "ngram"

    def __init__(self, outputs: dict[int, tuple[int, ...]]) -> None:
        self.outputs = outputs  # by the prompt's first token
        self.rng = random.Random(1)
        self.outcomes: list[tuple[int, int]] = []

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> Proposal:
        output = self.outputs[request.tokens[0]]
        tokens, parents = random_draft_tree(self.rng, request, output, 200)
        while not tokens:
            tokens, parents = random_draft_tree(self.rng, request, output, 200)
        count = len(tokens)
        return Proposal("tree", tokens, (0.5,) * count, (0,) * count, parents).best_first()

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        right = set(outcome.accepted)
        assert right <= set(outcome.tried) <= set(range(len(proposal.tokens)))
        accepted_tokens = [proposal.tokens[i] for i in outcome.accepted]
        output = self.outputs[request.tokens[0]]
        assert any(
            list(output[i : i + len(accepted_tokens)]) == accepted_tokens
            for i in range(len(output))
        )
        self.outcomes.append((len(right), len(outcome.tried)))

    def finish(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


def complete(client: Client, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    """Return the answers to prompts that are submitted together."""
    generations = [client.generate(prompt, params) for prompt in prompts]
    return [generation.wait()[0] for generation in generations]


def test_trees_do_not_change_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[token, 7, 8] for token in (5, 6, 9)]
    cases = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, max_tokens=30, seed=3, logprobs=2, frequency_penalty=0.4),
        SamplingParams(temperature=0, max_tokens=30, stop=["e"]),
    ]
    with tiny_client(tmp_path) as (client, _):
        plain = [complete(client, prompts, params) for params in cases]
    for params, expected in zip(cases, plain, strict=True):
        outputs = {
            prompt[0]: tuple(answer.token_ids) + (1,) * 9
            for prompt, answer in zip(prompts, expected, strict=True)
        }
        proposer = TreeProposer(outputs)
        step_time = StepTimeModel(StepCost(((once, Cost(0, 1)), (each_row, Cost(1)))), None)
        speculator = Speculator([proposer], lambda _: FixedDraftBudget(24), step_time)
        monkeypatch.setattr("support.engines.build_speculator", lambda *_, **__: speculator)  # noqa: B023
        with tiny_client(tmp_path) as (client, _):
            result = complete(client, prompts, params)
            stats, pages = client.loop.snapshot().speculation, client.loop.snapshot().scheduler
        for got, right in zip(result, expected, strict=True):
            assert (got.text, got.token_ids, got.stop) == (right.text, right.token_ids, right.stop)
            assert [p and p.top_ids for p in got.logprobs or ()] == [
                p and p.top_ids for p in right.logprobs or ()
            ]
        assert stats.accepted["tree"] == sum(right for right, _ in proposer.outcomes) > 5
        assert stats.proposed["tree"] == sum(tried for _, tried in proposer.outcomes)
        assert pages.num_referenced_pages == 0
