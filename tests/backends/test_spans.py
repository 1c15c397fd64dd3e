"""A step that is sent to another rank unpacks to the arrays that its plan flattens to."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.programs import PROGRAMS, random_tensors
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.cpu.steps import StepArrays
from twostroke.backends.reference import ReferenceBackend
from twostroke.backends.spans import flatten, unpack
from twostroke.backends.step_frame import FrameLimits, FrameReader
from twostroke.engine.scheduler import Continuous

if TYPE_CHECKING:
    from twostroke.backends.spans import RowSpan
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult

PROGRAM = PROGRAMS["biases"]
CONTEXT, NUM_PAGES, PAGE_SIZE = 96, 40, 16


class Sender(ReferenceBackend):
    """A reference backend that also sends each of its steps, and compares the received arrays."""

    num_branches = num_copies = 0

    def __init__(self) -> None:
        super().__init__(PROGRAM, random_tensors(PROGRAM), NUM_PAGES, PAGE_SIZE)
        max_pages = CONTEXT // PAGE_SIZE
        limits = FrameLimits(PROGRAM.vocab_size, NUM_PAGES, PAGE_SIZE, 1000, 1, max_pages)
        self.steps = StepArrays(1, PAGE_SIZE, max_pages, one_arithmetic=True)
        self.steps.tables.note_changes()
        self.reader = FrameReader(limits)

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.fill(plan)
        result = unpack(self.reader.read(self.steps.encode_step()))
        expected = flatten(plan.slices)
        for part in (0, 1, 3):  # tokens, positions, sampled rows
            assert np.array_equal(result[part], expected[part])
        assert [page_entries(span) for span in result[2]] == [
            page_entries(span) for span in expected[2]
        ]
        copies = [
            {copy for span in spans for copy in span.copies} for spans in (result[2], expected[2])
        ]
        assert copies[0] == copies[1]
        self.num_branches += sum(len(span.above) > 0 for span in result[2])
        self.num_copies += len(copies[0])
        return super().run(plan)

    def forget(self, request: Request) -> None:
        self.steps.forget(request)


def page_entries(span: RowSpan) -> tuple[slice, int, list[int], list[list[int]]]:
    """Return a row span's rows, position and pages; pages only up to its last row."""
    pages = span.pages[:, : -(-span.end // PAGE_SIZE)]
    return span.rows, span.start, span.above.tolist(), pages.tolist()


@pytest.mark.seeds(3)
def test_a_frame_says_what_its_plan_does(seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 6, PROGRAM.vocab_size, 60, 12)
    setting = Setting(NUM_PAGES, 40, 5, True, Continuous(), draft_seed=seed)
    sender = Sender()
    expected_answers, _ = run_schedule(sender, setting, [fresh(r) for r in requests], CONTEXT)
    run_schedule(sender, setting, [fresh(r) for r in requests], CONTEXT, expected_answers)
    assert sender.num_branches
    assert sender.num_copies
