"""Equal requests have equal logits, bit for bit, whatever the batch and the chunks are."""

from __future__ import annotations

import numpy as np
import pytest

from support.cpu import (
    LEVELS,
    Sequence,
    cpu_backend,
    greedy_request,
    page_lists,
    run,
    tiny_model,
)
from support.native import IS_ARM, VECTOR_LEVELS
from support.programs import PROGRAMS, random_tensors
from twostroke.core.errors import BackendError
from twostroke.core.request import NO_PAGE
from twostroke.core.step import Slice, StepPlan
from twostroke.model.program.kv_layout import PageGroups

NUM_PAGES = 64


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture(
    scope="module",
    params=[
        "Q4_1",
        "F32",
        "post norms",
        "windows",
        "sinks",
        "experts",
        "experts with biases",
        "many experts",
        "borrowing",
    ],
)
def model(request):
    if program := PROGRAMS.get(request.param):
        return program, random_tensors(program, "Q4_0", "Q8_0")
    if request.param == "windows":
        return tiny_model(num_layers=3, windows=(37, None, 100), soft_cap=4.0)
    return tiny_model(fmt=request.param, embedding_fmt="Q8_0")


def tokens_of(seed, length):
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def test_logprobs_do_not_depend_on_chunks_pages_or_threads(level, model):
    prompt = tokens_of(1, 150)
    results = []
    for threads, chunks in ((1, (1000, 64, 37)), (2, (64,)), (3, (37,))):
        with cpu_backend(model, level, NUM_PAGES, threads=threads) as backend:
            for chunk in chunks:
                pages = np.random.default_rng(chunk).permutation(NUM_PAGES)[:12].tolist()
                sequence = Sequence(backend, prompt, pages)
                sequence.prefill(chunk)
                results.append(sequence.decode(12))
    assert all(result == results[0] for result in results)


def test_logprobs_do_not_depend_on_other_requests(level, model):
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
            drawn_tokens = iter(zip(result.tokens, result.logprobs, strict=True))
            for part in plan:
                s = next(s for s in sequences if s.request is part.request)
                if pair := s.commit(part, next(drawn_tokens) if part.samples else None):
                    together[id(s)].append(pair)
        assert [together[id(s)] for s in sequences] == alone


def test_recomputed_generated_rows_have_the_same_bits(level, model):
    """After a preemption, prompt and answer are one slice; each row is computed as before."""
    with cpu_backend(model, level, 64, threads=2) as backend:
        sequence = Sequence(backend, tokens_of(3, 40), list(range(10)))
        sequence.prefill(1000)
        expected = sequence.decode(30)
        kept_tokens = sequence.request.tokens[: 40 + 17]
        sequence.reset()
        sequence.request.tokens[:] = kept_tokens
        sequence.request.pages = page_lists(backend, list(range(20, 30)))
        sequence.request.num_moves += 1
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


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int16"])
@pytest.mark.parametrize("sizes", [{"head_dim": 48}, {"windows": (37, None), "soft_cap": 4.0}])
def test_logprobs_do_not_depend_on_chunks_in_any_page_format(level, kv_format, sizes):
    model = tiny_model(fmt="Q4_1", embedding_fmt="Q8_0", **sizes)
    results = []
    for threads, chunk in ((1, 1000), (2, 64), (3, 7)):
        with cpu_backend(model, level, 20, threads=threads, kv_format=kv_format) as backend:
            sequence = Sequence(backend, tokens_of(1, 250), list(range(20)))
            results.append([sequence.prefill(chunk), *sequence.decode(12)])
    assert all(result == results[0] for result in results)


def test_pages_before_a_window_are_not_read(level):
    model = tiny_model(num_layers=3, windows=(1, 37, 100))
    with cpu_backend(model, level, NUM_PAGES, threads=2) as backend:
        sequence = Sequence(backend, tokens_of(4, 200), list(range(14)))
        expected = [sequence.prefill(30), *sequence.decode(9)]
        sequence.reset()
        groups = PageGroups(backend.facts.page_size, backend.facts.windows)
        drawn_tokens = []
        while len(drawn_tokens) < 10:
            backend.forget(sequence.request)  # so that the page table is made anew
            firsts = groups.first_read_pages(sequence.request.num_computed)
            for pages, first in zip(sequence.request.pages, firsts, strict=True):
                pages[:first] = [NO_PAGE] * first
            drawn_tokens += [pair] if (pair := sequence.step(30)) else []
        assert firsts[0] == 13
        assert drawn_tokens == expected
        sequence.request.pages[2][firsts[2]] = NO_PAGE
        backend.forget(sequence.request)
        with pytest.raises(BackendError, match="page"):
            sequence.step(30)


def test_score_is_what_a_prompt_computes(level, model):
    tokens = tokens_of(8, 130)
    with cpu_backend(model, level, 64, threads=2) as backend:
        logits = backend.score(tokens)
        shorter = backend.score(tokens[:77])
        assert np.array_equal(logits[:77], shorter)
        request = greedy_request(tokens)
        request.pages = page_lists(backend, list(range(9)))
        drawn_tokens = run(backend, Slice(request, 0, len(tokens), samples=True))
        assert drawn_tokens == [int(np.argmax(logits[-1]))]


def test_logprobs_far_into_a_context_do_not_depend_on_how_attention_is_shared_out(level, model):
    """Each thread has several KV splits and several panels of rows."""
    prompt = tokens_of(9, 500)
    results = []
    for threads, chunk in ((1, 1000), (4, 300), (3, 7)):
        with cpu_backend(model, level, 32, threads=threads) as backend:
            sequence = Sequence(backend, prompt, list(range(32)))
            results.append([sequence.prefill(chunk), *sequence.decode(12)])
            assert sequence.request.num_computed == 512
    assert all(result == results[0] for result in results)


def test_drawn_tokens_do_not_depend_on_other_requests(level, model):
    """More rows draw than logits are held at once; prompt and generated rows have many seeds."""
    sampling = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    with cpu_backend(model, level, 80, threads=3) as backend:

        def answers(together):
            requests = [greedy_request(tokens_of(i, 5 + i % 3), **sampling) for i in range(40)]
            for i, request in enumerate(requests):
                request.seed, request.pages = i, page_lists(backend, [2 * i, 2 * i + 1])
            for batch in [requests] if together else [[request] for request in requests]:
                for step in range(8):
                    # Half of them arrive later, so that prompts meet generated rows.
                    active = batch if step >= 3 or not together else batch[::2]
                    pending = [r for r in active if len(r.tokens) < r.num_prompt + 5]
                    slices = [
                        Slice(r, r.num_computed, r.num_pending, samples=True) for r in pending
                    ]
                    tokens = run(backend, *slices) if slices else []
                    for request, token in zip(pending, tokens, strict=True):
                        request.num_computed = request.num_planned = len(request.tokens)
                        request.tokens.append(token)
            for request in requests:
                backend.forget(request)
            return [request.tokens for request in requests]

        assert answers(together=True) == answers(together=False)


@pytest.mark.parametrize("kv_format", ["f16", "bf16", "int8", "int16"])
def test_vector_levels_agree_bit_for_bit(level, model, kv_format):
    """Compares AVX2, AVX-512 and the generated rows of AMX, or the levels of NEON (ADR 0003)."""
    best = VECTOR_LEVELS[-1]
    if level == best or (level == "portable" and not IS_ARM):
        pytest.skip("portable x86 rounds twice where the others fuse; the best is what they meet")
    tokens = tokens_of(10, 300)
    with (
        cpu_backend(model, level, 4, kv_format=kv_format) as backend,
        cpu_backend(model, best, 4, kv_format=kv_format) as other,
    ):
        actual = backend.score(tokens, generated=True)
        assert np.array_equal(actual, other.score(tokens, generated=True))
