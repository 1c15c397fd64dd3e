"""Same request, same logits, bit for bit: whatever else is in the batch, and however it is cut."""

from __future__ import annotations

import numpy as np
import pytest

from support.cpu import LEVELS, Sequence, cpu_backend, greedy_request, run, tiny_model
from twostroke.core.step import Slice, StepPlan

NUM_PAGES = 64


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture(scope="module", params=["Q4_1", "F32"])
def model(request):
    return tiny_model(fmt=request.param, embedding_fmt="Q8_0")


def tokens_of(seed, length):
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def test_logprobs_do_not_depend_on_chunks_pages_or_threads(level, model):
    prompt = tokens_of(1, 150)
    results = []
    for threads in (1, 2, 3):
        with cpu_backend(model, level, NUM_PAGES, threads=threads) as backend:
            for chunk in (1000, 64, 37):
                pages = np.random.default_rng(chunk).permutation(NUM_PAGES)[:12].tolist()
                sequence = Sequence(backend, prompt, pages)
                sequence.prefill(chunk)
                results.append(sequence.decode(12))
    assert all(result == results[0] for result in results)


def test_logprobs_do_not_depend_on_the_company(level, model):
    prompts = [tokens_of(seed, 3 + 23 * seed) for seed in range(6)]
    with cpu_backend(model, level, 128, threads=2) as backend:
        pages = iter(range(128))
        sequences = [Sequence(backend, p, [next(pages) for _ in range(12)]) for p in prompts]
        alone = []
        for sequence in sequences:
            alone.append([sequence.prefill(1000), *sequence.decode(9)])
            sequence.reset()
        # Together: each joins two steps after the one before, so prompts meet generated rows.
        together = {id(s): [] for s in sequences}
        for step in range(40):
            plan = [
                part
                for i, s in enumerate(sequences)
                if step >= 2 * i and len(together[id(s)]) < 10
                for part in [s.slice(29)]
            ]
            if not plan:
                break
            result = backend.run(StepPlan(tuple(plan)))
            drawn = iter(zip(result.tokens, result.logprobs, strict=True))
            for part in plan:
                s = next(s for s in sequences if s.request is part.request)
                if pair := s.commit(part, next(drawn) if part.samples else None):
                    together[id(s)].append(pair)
        assert [together[id(s)] for s in sequences] == alone


def test_recomputing_generated_rows_gives_their_bits_again(level, model):
    """After a preemption prompt and answer come back as one slice; each row keeps its kind."""
    with cpu_backend(model, level, 64, threads=2) as backend:
        sequence = Sequence(backend, tokens_of(3, 40), list(range(10)))
        sequence.prefill(1000)
        expected = sequence.decode(30)
        kept = sequence.request.tokens[: 40 + 17]
        sequence.reset()
        sequence.request.tokens[:] = kept
        sequence.request.pages[:] = list(range(20, 30))
        sequence.request.num_preemptions += 1
        first = sequence.prefill(1000)
        assert [first, *sequence.decode(12)] == expected[16:29]


def test_a_page_of_another_tenant_is_never_read(level, model):
    with cpu_backend(model, level, 64, threads=2) as backend:
        pages = list(range(10))
        sequence = Sequence(backend, tokens_of(5, 70), pages)
        sequence.prefill(1000)
        expected = sequence.decode(10)
        sequence.reset()
        for seed in (6, 7):
            other = Sequence(backend, tokens_of(seed, 150), pages[::-1])
            other.prefill(1000)
            backend.forget(other.request)
        sequence.prefill(1000)
        assert sequence.decode(10) == expected


def test_score_is_what_a_prompt_computes(level, model):
    tokens = tokens_of(8, 130)
    with cpu_backend(model, level, 64, threads=2) as backend:
        logits = backend.score(tokens)
        shorter = backend.score(tokens[:77])
        assert np.array_equal(logits[:77], shorter)
        request = greedy_request(tokens)
        request.pages.extend(range(9))
        drawn = run(backend, Slice(request, 0, len(tokens), samples=True))
        assert drawn == [int(np.argmax(logits[-1]))]
