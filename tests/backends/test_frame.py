"""Step messages arrive as they were sent, with page tables; wrong messages are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import greedy_request
from twostroke.backends.cpu.steps import StepArrays
from twostroke.backends.spans import unpack
from twostroke.backends.step_frame import FrameError, FrameLimits, FrameLostError, FrameReader
from twostroke.core.draft_tree import ROOT, DraftBranch
from twostroke.core.request import NO_STATE
from twostroke.core.step import Slice, StepPlan

LIMITS = FrameLimits(
    vocab_size=100, num_pages=5000, page_size=16, max_rows=64, num_groups=2, table_stride=8
)


def sender(**options):
    steps = StepArrays(2, 16, 8, one_arithmetic=True, **options)
    steps.tables.note_changes()
    return steps


def request_of(num_tokens, *pages):
    request = greedy_request([i % 100 for i in range(num_tokens)], logprobs=None)
    request.pages = [list(group) for group in pages]
    return request


def tree_plan():
    new, old = request_of(3, [1], [2]), request_of(20, [5, 6], [7, 8])
    old.tokens += [50]
    branch = DraftBranch(2, ROOT, 21, 1, ((9,), (10,)), 1, (0,), is_copied=True)
    tree = Slice(old, 20, 1, True, (60, 61, 62), (branch,))
    return StepPlan((Slice(new, 0, 3, True), tree))


def assert_same(frame, steps):
    record = steps.record
    assert frame.tokens.tolist() == steps._tokens[: record.num_rows].tolist()
    assert frame.slices.tolist() == steps._slices[: record.num_slices].tolist()
    assert frame.sampled_rows.tolist() == steps._sampled[: record.num_sampled].tolist()
    assert frame.only_best.tolist() == steps._only_best[: record.num_sampled].tolist()
    assert frame.stores.tolist() == steps._stores[: record.num_stores].tolist()
    assert frame.copies.tolist() == steps._copies[: record.num_copies].tolist()
    assert frame.num_generated == record.num_generated
    assert np.array_equal(frame.page_tables, steps.tables.array)


def test_a_tree_of_drafts_arrives_whole():
    steps, reader = sender(sends_best=True), FrameReader(LIMITS)
    steps.fill(tree_plan())
    frame = reader.read(steps.encode_step())
    assert_same(frame, steps)
    assert len(frame.stores) == 1
    assert len(frame.copies) == 2


def test_page_tables_follow_requests_that_come_grow_move_and_go():
    rng, steps, reader = np.random.default_rng(1), sender(), FrameReader(LIMITS)
    alive, page = [], 0
    for _ in range(200):
        if not alive or rng.random() < 0.3:
            alive.append(request_of(5, [page], [page + 1]))
            page += 2
        if len(alive) > 1 and rng.random() < 0.2:
            steps.forget(alive.pop(int(rng.integers(len(alive)))))
        for request in alive:
            if rng.random() < 0.1:
                request.num_moves += 1
                request.pages = [[page], [page + 1]]
                page += 2
            if len(request.pages[0]) < 8 and rng.random() < 0.3:
                for pages in request.pages:
                    pages.append(page)
                    page += 1
        chosen_requests = [r for r in alive if rng.random() < 0.8] or alive
        plan = StepPlan(tuple(Slice(r, 4, 1, samples=True) for r in chosen_requests))
        steps.fill(plan)
        assert_same(reader.read(steps.encode_step()), steps)


def test_a_step_that_is_refused_still_brings_its_page_tables():
    steps, reader = sender(), FrameReader(replace(LIMITS, max_rows=4))
    old, new = request_of(5, [1], [2]), request_of(5, [3], [4])
    steps.fill(StepPlan((Slice(new, 0, 5, True),)))
    with pytest.raises(FrameError, match="5 rows") as caught:
        reader.read(steps.encode_step())
    assert not isinstance(caught.value, FrameLostError)
    steps.fill(StepPlan((Slice(old, 4, 1, True), Slice(new, 4, 1, True))))
    assert_same(reader.read(steps.encode_step()), steps)
    with pytest.raises(FrameLostError):
        reader.read(bytes(64))


def test_slots_of_recurrent_states_arrive_and_are_checked():
    limits = replace(LIMITS, num_states=4)
    steps, reader = sender(has_states=True), FrameReader(limits)
    first, second = request_of(3, [1], [2]), request_of(5, [3], [4])

    def message(read, write):
        new = Slice(first, 0, 3, samples=True, write_state=1)
        old = Slice(second, 4, 1, samples=True, read_state=read, write_state=write)
        steps.fill(StepPlan((new, old)))
        return steps.encode_step()

    data = message(0, 3)
    frame = reader.read(data)
    assert frame.states.tolist() == [[NO_STATE, 1], [0, 3]]
    _, _, spans, _ = unpack(frame)
    assert [(span.read_state, span.write_states) for span in spans] == [(NO_STATE, (1,)), (0, (3,))]
    for read, write in [(4, 3), (-2, 3), (0, 4), (0, NO_STATE)]:
        with pytest.raises(FrameError, match="recurrent state that does not exist"):
            reader.read(message(read, write))
    with pytest.raises(FrameLostError, match="size"):
        FrameReader(LIMITS).read(data)
    plain = sender()
    plain.fill(StepPlan((Slice(first, 0, 3, samples=True),)))
    with pytest.raises(FrameLostError, match="size"):
        FrameReader(limits).read(plain.encode_step())


def test_slots_of_drafts_arrive_and_are_checked():
    limits = replace(LIMITS, num_states=8)
    steps, reader = sender(has_states=True), FrameReader(limits)
    first, second = request_of(3, [1], [2]), request_of(5, [3], [4])

    def message(*slots):
        new = Slice(first, 0, 3, samples=True, write_state=1)
        old = Slice(
            second, 4, 1, True, drafts=(7, 8), read_state=0, write_state=3, draft_states=slots
        )
        steps.fill(StepPlan((new, old)))
        return steps.encode_step()

    frame = reader.read(message(4, 7))
    _, _, spans, _ = unpack(frame)
    assert [span.write_states for span in spans] == [(1,), (3, 4, 7)]
    for slots in [(4, 8), (-2, 5), (4, NO_STATE)]:
        with pytest.raises(FrameError, match="recurrent state that does not exist"):
            reader.read(message(*slots))
    frame = reader.read(message(5, 6))
    assert frame.row_states.tolist() == [NO_STATE, NO_STATE, 1, 3, 5, 6]


def test_values_from_outside_arrive():
    external = np.arange(9, dtype=np.float32).reshape(3, 3)
    steps = sender()
    steps.fill(StepPlan((Slice(request_of(3, [1], [2]), 0, 3, True),), external=external))
    data = steps.encode_step()
    limits = FrameLimits(100, 5000, 16, 64, 2, 8, external_width=3)
    assert FrameReader(limits).read(data).external.tolist() == external.tolist()
    with pytest.raises(FrameError, match="size"):
        FrameReader(LIMITS).read(data)


@pytest.mark.parametrize(
    ("word", "value", "sentence"),
    [
        (0, 1, "form"),
        (1, 9, "form"),
        (2, 65, "size"),
        (3, 4, "rows"),
        (3, 2, "cover"),  # in the middle of a slice
        (9, 1 << 30, "tables"),
        (12, 100, "does not exist"),  # the first token
        (12, -1, "does not exist"),
        (17, 126, "does not exist"),  # the first position of three, of 128 in a table
        (18, 1 << 20, "does not exist"),  # the slice's table
        (20, 2, "does not exist"),  # whether the best logit is enough
        (21, 1 << 20, "page table entry or page"),  # the first change's place
        (22, 5000, "page table entry or page"),  # and its page
        (22, -2, "page table entry or page"),
    ],
)
def test_a_damaged_step_is_refused(word, value, sentence):
    steps = sender()
    steps.fill(StepPlan((Slice(request_of(3, [1], [2]), 0, 3, True),)))
    good = steps.encode_step()
    numbers = np.frombuffer(good, np.int32).copy()
    numbers[word] = value
    fresh, used = FrameReader(LIMITS), FrameReader(LIMITS)
    used.read(good)  # a step like the one before is checked more quickly
    for reader in (fresh, used):
        with pytest.raises(FrameError, match=sentence):
            reader.read(numbers.tobytes())


@pytest.mark.seeds(2)
def test_random_frames_are_read_or_refused(seed):
    rng, steps = random.Random(seed), sender()
    steps.fill(tree_plan())
    good = steps.encode_step()
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        if rng.random() < 0.05:
            data = bytearray(rng.randbytes(rng.randrange(400)))
        reader = FrameReader(LIMITS)
        try:
            frame = reader.read(data)
        except FrameError:
            continue
        rows = len(frame.tokens)
        assert 0 < rows <= 64
        assert frame.slices[:, 1].sum() == rows
        assert frame.slices[:, 3].max() < len(frame.page_tables)
        assert (frame.sampled_rows < rows).all()
