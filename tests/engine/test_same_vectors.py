"""Embeddings agree with the reference, and do not depend on other requests, bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import cpu_backend, tiny_model
from support.native import NEEDS, load_level
from support.schedules import Setting, fresh, random_requests, run_schedule
from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import families_on
from support.vectors import embedder_of, twin
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.frozen import Frozen
from twostroke.core.request import Pooling, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.backends.interface import Backend

NUM_PAGES = 512
CONTEXT = 300
TEXT = [9, 2, 30, 4, 101, 17, 2, 2, 8, 9, 2, 30, 77, 5, 6, 60, 61, 62, 63, 64, 9, 8]


def vectors_of(backend: Backend, setting: Setting, requests: list[Request]) -> dict[str, bytes]:
    results: dict[str, bytes] = {}
    run_schedule(backend, setting, requests, CONTEXT, vectors=results)
    return results


def text_request(tokens: list[int], pooling: str, name: str = "t") -> Request:
    return Request(name, tokens, len(tokens), SamplingParams(), 0, pooling=Pooling(pooling))


PLAIN = Setting(NUM_PAGES, 1000, 4, prefix_cache=False, policy=Continuous())


@pytest.mark.parametrize("family", families_on("cpu"))
def test_vectors_of_every_family_agree_with_the_reference(tmp_path: Path, family: str) -> None:
    sizes = replace(tiny_of(family), fmt="Q8_0", embedding_fmt="Q8_0")
    loaded = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", sizes))
    program = build_program(loaded.spec)
    tokens = np.random.default_rng(4).integers(0, 285, 48).tolist()
    reference = ReferenceBackend(program, loaded.tensors, NUM_PAGES, 16, num_states=8)
    states = reference.trace(tokens, [program.last_states])[program.last_states]
    with cpu_backend(
        (program, loaded.tensors), "portable", 16, embeds=True, num_states=8
    ) as backend:
        for pooling in ("mean", "last"):
            right = twin(states, pooling)
            reference_vector, cpu_vector = (
                np.frombuffer(
                    vectors_of(each, PLAIN, [text_request(tokens, pooling)])["t"], np.float32
                )
                for each in (reference, backend)
            )
            np.testing.assert_allclose(reference_vector, right, atol=1e-5)
            assert np.linalg.norm(cpu_vector) == pytest.approx(1, abs=1e-6)
            # A router may choose another of two experts that it likes all but equally.
            assert cpu_vector @ right > (0.98 if loaded.spec.experts else 0.9999)


def test_torch_agrees_with_the_reference() -> None:
    pytest.importorskip("torch", reason="no PyTorch here")
    from twostroke.backends.torch import TorchBackend

    model = tiny_model()
    for pooling in ("mean", "last"):
        both = [
            vectors_of(kind(*model, NUM_PAGES, 16), PLAIN, [text_request(TEXT, pooling)])["t"]
            for kind in (ReferenceBackend, TorchBackend)
        ]
        vectors = [np.frombuffer(data, np.float32) for data in both]
        np.testing.assert_allclose(*vectors, atol=1e-5)


class Pair(Frozen):
    """One model twice: on one thread, for the expected vectors, and on two."""

    plain: CpuBackend
    shared: CpuBackend


@pytest.fixture(
    scope="module",
    params=[(level, "llama") for level in NEEDS] + [(None, "gemma3"), (None, "qwen3-moe")],
    ids=lambda param: "-".join(filter(None, param)),
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    level, family = request.param
    load_level(level or "portable")
    sizes = replace(tiny_of(family), fmt="Q4_0", embedding_fmt="Q8_0")
    loaded = load_path(write_tiny_gguf(tmp_path_factory.mktemp(family) / "tiny.gguf", sizes))
    program = build_program(loaded.spec)
    plain, shared = (
        CpuBackend(program, loaded.tensors, NUM_PAGES, 16, threads, level=level, embeds=True)
        for threads in (1, 2)
    )
    yield Pair(plain, shared)
    plain.close()
    shared.close()


@pytest.mark.seeds(1)
def test_vectors_do_not_depend_on_the_schedule(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 20, vocab_size=280, longest=80, most_output=60)
    for number, request in enumerate(requests):
        if number % 3:
            request.pooling = (Pooling.MEAN, Pooling.LAST)[number % 2]
            request.params, request.priority = SamplingParams(), 1
    fewest = 9 * len(pair.plain.facts.windows)
    settings = [Setting.chosen_by(rng, fewest, 5 * fewest) for _ in range(2)]
    settings = [replace(setting, draft_seed=None) for setting in settings]
    # So few pages that somebody has to give way.
    settings.append(Setting(fewest, 9, 8, prefix_cache=True, policy=Continuous()))
    alone = settings[0].alone(NUM_PAGES)
    right = vectors_of(pair.plain, alone, [fresh(r) for r in requests])
    assert len(right) == sum(r.pooling is not None for r in requests)
    for setting in settings:
        shuffled = [fresh(r) for r in rng.sample(requests, len(requests))]
        assert vectors_of(pair.shared, setting, shuffled) == right, setting


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_preemption_does_not_change_a_vector(pair: Pair, pooling: str) -> None:
    tokens = [5 + (7 * i) % 200 for i in range(150)]
    right = vectors_of(pair.plain, PLAIN, [text_request(tokens, pooling)])["t"]
    num_pages = 12 * len(pair.plain.facts.windows)
    pool = PagePool(num_pages, 16, pair.plain.facts.windows)
    scheduler = Scheduler(SchedulerConfig(CONTEXT, 4, 40), pool, None, Continuous())
    victim = text_request(tokens, pooling)
    victim.priority = 1
    embedder = embedder_of(victim)
    scheduler.add(victim)
    result = []
    for step in range(30):
        if step == 2:
            urgent = Request("u", [9] * 120, 120, SamplingParams(max_tokens=1), 0, priority=-1)
            scheduler.add(urgent)
        plan = scheduler.plan()
        if plan is None:
            break
        deltas = scheduler.commit(plan, pair.shared.run(plan))
        result += [embedder.take(delta, 0.0) for delta in deltas if delta.request is victim]
    assert victim.num_preemptions == 1
    assert victim.is_finished
    assert [output.embedding.tobytes() for output in result if output is not None] == [right]
