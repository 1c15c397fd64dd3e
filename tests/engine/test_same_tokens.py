"""Same request, same tokens: alone or in company, whole or chunked, cold or cached, preempted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.schedules import Setting, fresh, random_requests, run_schedule
from support.tiny import Tiny, write_tiny_gguf

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.library import usable_levels
from twostroke.models import build_program
from twostroke.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.core.request import Request

NUM_PAGES = 512


@pytest.fixture(scope="module", params=usable_levels())
def tiny_backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuBackend]:
    sizes = Tiny(num_layers=2, fmt="Q4_1", embedding_fmt="Q8_0", num_heads=6, num_kv_heads=2)
    loaded = load_path(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", sizes))
    program = build_program(loaded.spec)
    backend = CpuBackend(program, loaded.tensors, NUM_PAGES, 16, 2, level=request.param)
    yield backend
    backend.close()


@pytest.mark.parametrize("seed", range(40))
def test_tokens_do_not_depend_on_the_schedule(tiny_backend: CpuBackend, seed: int) -> None:
    chance = random.Random(seed)
    requests = random_requests(chance, 32, vocab_size=280, longest=150, most_output=40)
    assert_same_tokens(tiny_backend, chance, requests, fewest_pages=14, context_length=512)


@pytest.mark.model
@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_the_real_model_do_not_depend_on_the_schedule(
    smollm2_backend: CpuBackend, seed: int
) -> None:
    chance = random.Random(seed)
    requests = random_requests(chance, 32, vocab_size=49152, longest=200, most_output=12)
    assert_same_tokens(smollm2_backend, chance, requests, fewest_pages=16, context_length=8192)


@pytest.fixture(scope="module")
def smollm2_backend(smollm2_path: Path) -> Iterator[CpuBackend]:
    loaded = load_path(smollm2_path)
    backend = CpuBackend(build_program(loaded.spec), loaded.tensors, NUM_PAGES, 16, 2)
    yield backend
    backend.close()


def assert_same_tokens(
    backend: CpuBackend,
    chance: random.Random,
    requests: list[Request],
    fewest_pages: int,
    context_length: int,
) -> None:
    """Run the requests under three random settings and, each by itself, under the plainest."""
    settings = [Setting.chosen_by(chance, fewest_pages, 60) for _ in range(3)]
    alone = settings[0].alone(NUM_PAGES)
    expected, _ = run_schedule(backend, alone, [fresh(r) for r in requests], context_length)
    for setting in settings:
        shuffled = [fresh(r) for r in chance.sample(requests, len(requests))]
        answers, _ = run_schedule(backend, setting, shuffled, context_length)
        for request in requests:
            assert answers[request.id] == expected[request.id], setting


def test_the_schedules_preempt_and_hit_the_cache(tiny_backend: CpuBackend) -> None:
    chance = random.Random(1)
    requests = random_requests(chance, 32, vocab_size=280, longest=150, most_output=40)
    setting = Setting.chosen_by(chance, 14, 15)
    again = [fresh(r) for r in requests]
    _, preemptions = run_schedule(tiny_backend, _crowded(setting), again, 512)
    assert preemptions > 0
    assert sum(r.num_cached for r in again) > 0


def _crowded(setting: Setting) -> Setting:
    from dataclasses import replace

    from twostroke.schedule import Continuous

    return replace(
        setting,
        num_pages=40,
        max_running=32,
        token_budget=64,
        prefix_cache=True,
        policy=Continuous(),
    )
