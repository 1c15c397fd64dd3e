"""Rows that draw nothing stop after the last store of keys and values; other rows do not change."""

from __future__ import annotations

import numpy as np
import pytest

from support.cpu import LEVELS, cpu_backend, greedy_request, page_lists
from support.native import load_level
from support.programs import PROGRAMS, random_tensors
from twostroke.backends.cpu import CpuBackend
from twostroke.core.step import Slice, StepPlan
from twostroke.model.program.ops import TakeColumns

NUM_PAGES = 40


def request_of(backend: CpuBackend, number: int, length: int):
    tokens = np.random.default_rng(number).integers(0, 250, length).tolist()
    request = greedy_request(tokens, logprobs=3)
    request.pages = page_lists(backend, list(range(10 * number, 10 * number + 10)))
    return request


def answers(backend: CpuBackend) -> list:
    """Return the results of steps with all kinds of rows: ends of chunks, drafts, decode rows."""
    a, b, c = (request_of(backend, number, 100) for number in range(3))
    steps = [
        [Slice(a, 0, 60, samples=False)],
        [Slice(b, 0, 100, samples=True), Slice(a, 60, 30, samples=False)],
        [Slice(c, 0, 70, samples=False), Slice(a, 90, 10, samples=True)],
        [Slice(b, 100, 1, True, (5, 6, 7)), Slice(c, 70, 30, samples=True)],
    ]
    results = []
    for slices in steps:
        result = backend.run(StepPlan(tuple(slices)))
        results.append(
            (result.tokens, [logprob and logprob.logprob for logprob in result.logprobs])
        )
        for part, token in zip([s for s in slices if s.samples], result.tokens, strict=False):
            if not part.drafts:
                part.request.tokens.append(token)
    return results


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_those_of_all_rows(level: str, kind: str) -> None:
    load_level(level)
    program = PROGRAMS[kind]
    model = program, random_tensors(program, "Q8_0", "Q8_0")
    with cpu_backend(model, level, NUM_PAGES, threads=3) as stopping:
        results = answers(stopping)
    num_pages = NUM_PAGES * len(program.cache_groups)
    whole_backend = CpuBackend(
        *model, num_pages, 16, 2, level=level, tapped_value=program.last_states
    )
    right = answers(whole_backend)
    whole_backend.close()
    assert right == results


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_chunk_that_draws_nothing_ends_with_the_last_store(kind: str) -> None:
    """The cost model leaves out the same operations."""
    program = PROGRAMS[kind]
    model = program, random_tensors(program)
    free = {op.output for op in program.ops if isinstance(op, TakeColumns)}
    with cpu_backend(model, "portable", NUM_PAGES) as backend:
        request = request_of(backend, 0, 100)
        for count, samples in ((90, False), (10, True)):
            backend.times()
            backend.run(StepPlan((Slice(request, request.num_computed, count, samples),)))
            request.num_computed += count
            times = zip(backend.fused, backend.times(), strict=True)
            still = {op.output for ops, time in times if not time.elapsed_s for op in ops}
            assert still - free == (set() if samples else program.logits_only_outputs - free)
    assert program.logits_only_outputs


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_output_that_draw_nothing_stop_too(level: str) -> None:
    """A request that is computed again after a preemption has such rows."""
    program = PROGRAMS["borrowing"]
    model, logprobs = (program, random_tensors(program, "Q8_0", "Q8_0")), []
    num_pages = NUM_PAGES * len(program.cache_groups)
    for tapped in (None, program.last_states):
        with cpu_backend(model, level, NUM_PAGES):  # or skip
            backend = CpuBackend(*model, num_pages, 16, 2, level=level, tapped_value=tapped)
        a, b = request_of(backend, 0, 60), request_of(backend, 1, 70)
        a.tokens += [7] * 30  # of output
        steps = [[Slice(a, 0, 80, samples=False), Slice(b, 0, 70, samples=True)]]
        steps += [[Slice(a, 80, 10, samples=True)]]
        for slices in steps:
            result = backend.run(StepPlan(tuple(slices)))
            logprobs.append([logprob and logprob.logprob for logprob in result.logprobs])
        backend.close()
    assert logprobs[:2] == logprobs[2:]
