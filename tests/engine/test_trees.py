"""Drafts that branch, on real backends: the same tokens, and faults that would change them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.cpu import tiny_model
from support.native import native_dir
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.sampling import SamplingParams
from twostroke.core.tree import ROOT
from twostroke.schedule import Continuous, drafting

if TYPE_CHECKING:
    from twostroke.core.request import Request

NUM_PAGES = 400
CONTEXT = 200
SETTING = Setting(NUM_PAGES, 64, 4, prefix_cache=True, policy=Continuous(), guesses=3)
MODEL: dict[str, Any] = {"num_layers": 2, "head_dim": 32}


def requests_of(seed: int, count: int = 12) -> list[Request]:
    chance = random.Random(seed)
    return random_requests(chance, count, vocab_size=200, longest=60, most_output=40)


def run(backend: Any, setting: Setting, requests: list[Request], known: Any = None) -> Any:
    answers, _ = run_schedule(backend, setting, requests, CONTEXT, known)
    return answers


class KeepsItsOwnPages(drafting.Drafting):
    """A branch was right, and the request goes on with the pages of another path."""

    def settle(self, piece, last):  # type: ignore[no-untyped-def]
        super().settle(piece, min(last, piece.branches[0].first - 1) if piece.branches else ROOT)


class DropsAStore(drafting.Drafting):
    """A row that branches share is stored in one page too few."""

    def _branches(self, *given):  # type: ignore[no-untyped-def]
        return [replace(branch, above=branch.above[1:]) for branch in super()._branches(*given)]


class BeginsWithNothing(drafting.Drafting):
    """A branch's first page does not begin as the request's."""

    def _branches(self, *given):  # type: ignore[no-untyped-def]
        return [replace(branch, is_copied=False) for branch in super()._branches(*given)]


@pytest.mark.parametrize("fault", [None, KeepsItsOwnPages, DropsAStore, BeginsWithNothing])
@pytest.mark.parametrize("kv_format", ["f16", "int8"])
def test_pages_of_branches_that_are_wrong_show_in_the_tokens(
    monkeypatch: pytest.MonkeyPatch, fault: type[drafting.Drafting] | None, kv_format: str
) -> None:
    native_dir()
    backend = CpuBackend(*tiny_model(**MODEL), NUM_PAGES, 16, 2, kv_format=kv_format)
    plain = run(backend, SETTING.alone(NUM_PAGES), requests_of(1))
    if fault is not None:
        monkeypatch.setattr("twostroke.schedule.scheduler.Drafting", fault)
    again = requests_of(1)
    assert (run(backend, SETTING, again, plain) == plain) == (fault is None)
    if fault is None:
        assert sum(request.num_moves for request in again) > 10
    backend.close()


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("windows", [(None, None), (20, None)])
def test_backends_that_interpret_take_trees(name: str, windows: tuple[int | None, ...]) -> None:
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
    again = [fresh(r) for r in requests]
    found = run(backend, SETTING, again, plain)
    assert [found[r.id][0] for r in again] == [plain[r.id][0] for r in again]
    assert sum(request.num_moves for request in again) > 5
    backend.close()
