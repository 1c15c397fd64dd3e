"""Same request, same tokens: alone or batched, chunked or not, cached or not, preempted or not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.cpu import tiny_model
from support.mixed_bits import mixed_bits
from support.native import NEEDS, load_level
from support.schedules import Setting, fresh, random_requests, run_schedule
from support.tiny import Tiny, tiny_of, write_tiny_gguf
from support.tiny_families import families_on
from twostroke.backends.cpu import CpuBackend
from twostroke.core.frozen import Frozen
from twostroke.engine.scheduler import Continuous
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.core.request import Request

NUM_PAGES = 512
NUM_STATES = 100  # for models with recurrent layers
CONTEXT = 500


class Pair(Frozen):
    """One model twice: on one thread, for the expected tokens, and on two."""

    plain: CpuBackend
    shared: CpuBackend

    @classmethod
    def of(cls, path: Path, level: str | None, activation_bits: int | str = 15) -> Pair:
        loaded = load_path(path)
        program = build_program(loaded.spec)
        if activation_bits == "mixed":
            activation_bits = mixed_bits(program, loaded.tensors)
        plain, shared = (
            CpuBackend(
                program,
                loaded.tensors,
                NUM_PAGES,
                16,
                num_threads,
                num_states=NUM_STATES,
                level=level,
                activation_bits=activation_bits,
            )
            for num_threads in (1, 2)
        )
        return cls(plain, shared)

    def close(self) -> None:
        self.plain.close()
        self.shared.close()


@pytest.fixture(scope="module", params=NEEDS)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    load_level(request.param)  # skips where this machine lacks it
    sizes = Tiny(num_layers=2, fmt="Q4_1", embedding_fmt="Q8_0", num_heads=6, num_kv_heads=2)
    path = write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", sizes)
    pair = Pair.of(path, request.param)
    yield pair
    pair.close()


@pytest.fixture(
    scope="module",
    params=[(None, name) for name in families_on("cpu") if name != "llama"]
    + [("amx_emulated", "qwen3-moe"), ("amx_emulated", "gemma3")],
    ids=lambda param: "-".join(filter(None, param)),
)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    level, name = request.param
    load_level(level or "portable")
    sizes = replace(tiny_of(name), fmt="Q4_0", embedding_fmt="Q8_0")
    pair = Pair.of(write_tiny_gguf(tmp_path_factory.mktemp(name) / "tiny.gguf", sizes), level)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def windowed() -> Iterator[Pair]:
    """A model with and without sliding windows in its layers, with int8 keys and values."""
    model = tiny_model(num_layers=3, windows=(20, None, 50), head_dim=32)
    plain, shared = (
        CpuBackend(*model, NUM_PAGES, 16, num_threads, kv_format="int8") for num_threads in (1, 2)
    )
    pair = Pair(plain, shared)
    yield pair
    pair.close()


@pytest.fixture(
    scope="module",
    params=[
        (level, name, bits)
        for level in (None, "amx_emulated")
        for name in ("llama", "qwen3-moe")
        for bits in (9, 8, "mixed")
    ],
    ids=lambda param: "-".join(str(value) for value in param if value),
)
def fewer_bits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A model with activations of 9 or 8 bits, or with different bits for each product."""
    level, name, bits = request.param
    load_level(level or "portable")
    sizes = replace(tiny_of(name), fmt="Q4_0", embedding_fmt="Q8_0")
    path = write_tiny_gguf(tmp_path_factory.mktemp(name) / "tiny.gguf", sizes)
    pair = Pair.of(path, level, activation_bits=bits)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Pair]:
    pair = Pair.of(smollm2_path, None)
    yield pair
    pair.close()


@pytest.mark.seeds(2)
def test_tokens_do_not_depend_on_the_schedule(tiny: Pair, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 20, vocab_size=280, longest=80, most_output=40)
    assert_same_tokens(tiny, rng, requests, fewest_pages=10)


@pytest.mark.seeds(1)
def test_tokens_of_every_family_do_not_depend_on_the_schedule(family: Pair, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 8, vocab_size=280, longest=80, most_output=20)
    num_groups = len(family.plain.facts.windows)
    assert_same_tokens(family, rng, requests, fewest_pages=9 * num_groups)


@pytest.mark.seeds(1)
def test_tokens_over_windows_and_int8_do_not_depend_on_the_schedule(
    windowed: Pair, seed: int
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 20, vocab_size=250, longest=80, most_output=40)
    assert_same_tokens(windowed, rng, requests, fewest_pages=30)


@pytest.mark.seeds(1)
def test_tokens_with_fewer_bits_do_not_depend_on_the_schedule(fewer_bits: Pair, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 10, vocab_size=280, longest=80, most_output=30)
    assert_same_tokens(fewer_bits, rng, requests, fewest_pages=10)


@pytest.mark.model
@pytest.mark.seeds(1)
def test_tokens_of_the_real_model_do_not_depend_on_the_schedule(smollm2: Pair, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 8, vocab_size=49152, longest=80, most_output=8)
    assert_same_tokens(smollm2, rng, requests, fewest_pages=12)


def assert_same_tokens(
    pair: Pair, chance: random.Random, requests: list[Request], fewest_pages: int
) -> None:
    """Compare the tokens of requests under random settings with those of one request at a time."""
    most_pages = max(60, 2 * fewest_pages)
    settings = [Setting.chosen_by(chance, fewest_pages, most_pages) for _ in range(2)]
    alone = settings[0].alone(NUM_PAGES)
    expected, _ = run_schedule(pair.plain, alone, [fresh(r) for r in requests], CONTEXT)
    for setting in settings:
        shuffled = [fresh(r) for r in chance.sample(requests, len(requests))]
        answers, _ = run_schedule(pair.shared, setting, shuffled, CONTEXT, expected)
        for request in requests:
            assert answers[request.id] == expected[request.id], setting


@pytest.mark.seeds(2)
def test_drafts_do_not_change_tokens(tiny: Pair, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 32, vocab_size=280, longest=80, most_output=60)
    crowded = Setting(
        num_pages=24 if seed % 2 else 200,
        token_budget=100,
        max_running=32,
        prefix_cache=True,
        policy=Continuous(),
        draft_seed=seed,
    )
    expected, _ = run_schedule(
        tiny.plain, crowded.alone(NUM_PAGES), [fresh(r) for r in requests], CONTEXT
    )
    copies = [fresh(r) for r in requests]
    answers, _ = run_schedule(tiny.shared, crowded, copies, CONTEXT, expected)
    num_drafted, num_accepted = (
        sum(getattr(r, name) for r in copies) for name in ("num_drafted", "num_accepted")
    )
    assert 0.1 * num_drafted < num_accepted < 0.8 * num_drafted
    assert sum(r.num_moves - r.num_preemptions for r in copies) > (5 if seed % 2 else 20)
    assert answers == expected


def test_a_small_pool_preempts_and_a_shared_prefix_hits(tiny: Pair) -> None:
    rng = random.Random(1)
    requests = random_requests(rng, 32, vocab_size=280, longest=40, most_output=100)
    crowded = Setting(
        num_pages=24, token_budget=64, max_running=32, prefix_cache=True, policy=Continuous()
    )
    expected, _ = run_schedule(
        tiny.plain, crowded.alone(NUM_PAGES), [fresh(r) for r in requests], CONTEXT
    )
    copies = [fresh(r) for r in requests]
    answers, num_preemptions = run_schedule(tiny.shared, crowded, copies, CONTEXT)
    assert num_preemptions > 0
    assert sum(r.num_cached for r in copies) > 0
    assert answers == expected
