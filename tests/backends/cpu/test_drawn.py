"""Rows that draw nothing stop once their keys and values are stored; the others notice nothing."""

from __future__ import annotations

import numpy as np
import pytest

from support.cpu import LEVELS, cpu_backend, greedy_request, page_lists
from support.programs import PROGRAMS, random_tensors
from twostroke.backends.cpu import CpuBackend
from twostroke.core.step import Slice, StepPlan

NUM_PAGES = 40


def request_of(backend: CpuBackend, number: int, length: int):
    tokens = np.random.default_rng(number).integers(0, 250, length).tolist()
    request = greedy_request(tokens, logprobs=3)
    request.pages = page_lists(backend, list(range(10 * number, 10 * number + 10)))
    return request


def answers(backend: CpuBackend) -> list:
    """Return what steps give that have rows of each kind: last of chunks, drafts, generated."""
    a, b, c = (request_of(backend, number, 100) for number in range(3))
    steps = [
        [Slice(a, 0, 60, samples=False)],
        [Slice(b, 0, 100, samples=True), Slice(a, 60, 30, samples=False)],
        [Slice(c, 0, 70, samples=False), Slice(a, 90, 10, samples=True)],
        [Slice(b, 100, 1, True, (5, 6, 7)), Slice(c, 70, 30, samples=True)],
    ]
    found = []
    for slices in steps:
        result = backend.run(StepPlan(tuple(slices)))
        found.append((result.tokens, [one and one.logprob for one in result.logprobs]))
        for part, token in zip([s for s in slices if s.samples], result.tokens, strict=False):
            if not part.drafts:
                part.request.tokens.append(token)
    return found


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_those_of_all_rows(level: str, kind: str) -> None:
    program = PROGRAMS[kind]
    model = program, random_tensors(program, "Q8_0", "Q8_0")
    with cpu_backend(model, level, NUM_PAGES, threads=3) as stopping:
        found = answers(stopping)
    num_pages = NUM_PAGES * len(program.cache_groups)
    whole = CpuBackend(*model, num_pages, 16, 2, level=level, tapped_value=program.last_states)
    assert answers(whole) == found
    whole.close()


def test_a_chunk_that_draws_nothing_ends_with_the_last_store() -> None:
    program = PROGRAMS["borrowing"]
    model = program, random_tensors(program)
    with cpu_backend(model, "portable", NUM_PAGES) as backend:
        request = request_of(backend, 0, 100)
        for count, samples in ((90, False), (10, True)):
            backend.times()
            backend.run(StepPlan((Slice(request, request.num_computed, count, samples),)))
            request.num_computed += count
            times = zip(backend.fused, backend.times(), strict=True)
            ran = {op.output for ops, time in times if time.elapsed_s for op in ops}
            late = {op.output for ops in backend.fused for op in ops} & program.late
            assert late - ran == (set() if samples else late)
            assert len(late) > len(program.ops) // 3
