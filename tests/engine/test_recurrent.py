"""Models with recurrent layers: the same tokens under any schedule, and prefixes that are found."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.drafts import add_random_drafts
from support.fake_model import FakeModel, expected_output
from support.invariants import check_scheduler
from support.programs import MIXERS, VOCAB_SIZE, hybrid_program, random_tensors
from support.row_by_row import RowByRow
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.kv_size import WORKING_BYTES, size_kv_cache
from twostroke.core.errors import MemoryLimitError
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.core.request import Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_cache import PagePool, PrefixHit, PrefixIndex, StatePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.engine.scheduler.recurrent_states import SNAPSHOT_TOKENS, with_room_for_states
from twostroke.model.program.mesh import Mesh

if TYPE_CHECKING:
    from twostroke.engine.scheduler.request_state import RequestState

CONTEXT = 500
NUM_PAGES = 300
PAGE_SIZE = 16


def hybrid_model(
    attends: tuple[bool, ...] = (False, False, True, False), mixer: str = "delta", **sizes: Any
) -> RowByRow:
    """Return a tiny model with random weights, some of whose layers have a recurrent mixer."""
    program = hybrid_program(attends, mixer, **sizes)
    return RowByRow(program, random_tensors(program), NUM_PAGES, PAGE_SIZE, num_states=80)


@pytest.mark.parametrize(
    ("attends", "mixer"),
    [((False, False), "delta"), *(((False, False, True, False), mixer) for mixer in MIXERS)],
)
def test_tokens_do_not_depend_on_the_schedule(attends: tuple[bool, ...], mixer: str) -> None:
    model = hybrid_model(attends, mixer)
    chance = random.Random(7)
    requests = random_requests(chance, 6, VOCAB_SIZE, longest=50, most_output=16)
    settings = [Setting.chosen_by(chance, 5, 10)]
    crowded = Setting(5, 64, 32, prefix_cache=True, policy=Continuous())
    expected, _ = run_schedule(
        model, settings[0].alone(NUM_PAGES), [fresh(request) for request in requests], CONTEXT
    )
    num_preemptions = num_drafted = num_accepted = 0
    for setting in [*settings, crowded, replace(crowded, draft_seed=3)]:
        copies = [fresh(request) for request in chance.sample(requests, len(requests))]
        answers, count = run_schedule(model, setting, copies, CONTEXT, expected)
        assert answers == expected, setting
        num_preemptions += count
        num_drafted += sum(request.num_drafted for request in copies)
        num_accepted += sum(request.num_accepted for request in copies)
    assert num_preemptions > 0
    assert 0 < num_accepted < num_drafted


def test_states_of_convolutions_are_small() -> None:
    """The recurrent state of LFM2 is a few rows, however long the context is."""
    program = hybrid_program(mixer="convolution")
    assert program.state_bytes == 3 * 2 * 32 * 4  # layers, rows, values, bytes


def test_the_head_order_changes_the_answer() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB_SIZE, 20).tolist()
    grouped, tiled = (hybrid_model(is_tiled=is_tiled).score(tokens) for is_tiled in (False, True))
    assert np.abs(grouped - tiled).max() > 1e-3


class Turns:
    """A scheduler that answers one request after another, and counts computed prompt tokens."""

    def __init__(self, num_states: int = 20) -> None:
        self.model = FakeModel(NUM_PAGES, PAGE_SIZE, num_states=num_states)
        pool = PagePool(NUM_PAGES, PAGE_SIZE)
        config = SchedulerConfig(8192, token_budget=512)
        self.states = StatePool(num_states)
        self.scheduler = Scheduler(
            config, pool, PrefixIndex(pool), Continuous(), states=self.states
        )
        self._count = 0

    def request(self, tokens: list[int], max_tokens: int) -> Request:
        self._count += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return Request(str(self._count), list(tokens), len(tokens), params, seed=0)

    def step(self) -> bool:
        """Run a step, and return whether there was anything to compute."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.commit(plan, self.model.run(plan))
            check_scheduler(self.scheduler)
        return plan is not None

    def answer(self, *requests: Request, draft_seed: int | None = None) -> None:
        """Answer requests, with random drafts if `draft_seed` is given."""
        outputs = {r.id: expected_output(r, 8192, has_states=True)[0] for r in requests}
        rng = random.Random(draft_seed)
        for request in requests:
            self.scheduler.add(request)
        while plan := self.scheduler.plan():
            if draft_seed is not None:
                add_random_drafts(rng, plan, self.scheduler, outputs, VOCAB_SIZE)
            self.scheduler.commit(plan, self.model.run(plan))
            check_scheduler(self.scheduler)
        assert outputs == {request.id: request.output for request in requests}


@pytest.mark.parametrize("draft_seed", [None, 1, 2])
def test_a_chat_computes_only_its_new_tokens(draft_seed: int | None) -> None:
    turns = Turns()
    rng = random.Random(1)
    tokens: list[int] = []
    for turn in range(6):
        num_known = len(tokens) - 1  # the newest token of an answer is not computed
        tokens += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(20, 90))]
        request = turns.request(tokens, max_tokens=rng.randint(5, 40))
        turns.answer(request, draft_seed=draft_seed)
        assert (request.num_accepted > 0) == (draft_seed is not None)
        assert turn == 0 or request.num_cached > num_known - PAGE_SIZE, "more than a page again"
        tokens = list(request.tokens)


def test_drafts_leave_a_quarter_of_the_slots_to_snapshots() -> None:
    turns = Turns(num_states=12)
    for start in range(5):
        turns.answer(turns.request([start, *range(60)], max_tokens=2))
    assert turns.states.num_cached > 3
    request = turns.request([7, *range(60)], max_tokens=20)
    turns.scheduler.add(request)
    for _ in range(2):  # the prompt ends at a snapshot
        plan = turns.scheduler.plan()
        assert plan is not None
        turns.scheduler.commit(plan, turns.model.run(plan))
    plan = turns.scheduler.plan()
    assert plan is not None
    assert plan.budget == 12 - 2 - 3
    tree = [1] * 10, [-1, 0, 1, 2, 3, 4, 5, 6, 7, 0]
    added = turns.scheduler.add_drafts(plan.slices[0], *tree)
    assert list(added) == list(range(7)), "a chain, for which there are slots"
    assert plan.slices[0].branches == ()
    assert turns.states.num_available == 3


def test_an_answer_that_the_template_rewrites_costs_no_prompt() -> None:
    turns = Turns()
    first = turns.request(list(range(100)), max_tokens=30)
    turns.answer(first)
    rewritten = [*first.prompt, 7, 7, *first.output[5:], *range(40)]
    second = turns.request(rewritten, max_tokens=1)
    turns.answer(second)
    assert second.num_cached == 96


def test_prompts_that_part_share_their_beginning() -> None:
    turns = Turns(num_states=40)
    shared = [number % VOCAB_SIZE for number in range(1000)]
    requests = [turns.request([*shared, *([number] * 50)], max_tokens=2) for number in range(8)]
    turns.answer(*requests)
    num_computed = sum(request.num_prompt - request.num_cached for request in requests)
    assert num_computed < 1050 + 7 * (50 + PAGE_SIZE) + 2 * PAGE_SIZE


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    turns = Turns()
    tokens = [number % VOCAB_SIZE for number in range(SNAPSHOT_TOKENS + 300)]
    turns.answer(turns.request(tokens, max_tokens=1))
    other = turns.request([*tokens[: SNAPSHOT_TOKENS + 20], *range(50)], max_tokens=1)
    turns.answer(other)
    assert other.num_cached == SNAPSHOT_TOKENS
    third = turns.request([*tokens[: SNAPSHOT_TOKENS + 20], *range(60, 100)], max_tokens=1)
    turns.answer(third)
    assert third.num_cached == SNAPSHOT_TOKENS + 16, "where two prompts have parted"


def test_a_shared_beginning_stays_while_other_chats_come_and_go() -> None:
    turns = Turns(num_states=12)
    shared = [number % VOCAB_SIZE for number in range(1000)]
    rng = random.Random(2)

    def chat(tokens: list[int]) -> Request:
        for _ in range(2):
            tokens = [*tokens, *(rng.randrange(VOCAB_SIZE) for _ in range(60))]
            request = turns.request(tokens, max_tokens=20)
            turns.answer(request)
            tokens = list(request.tokens)
        return request

    for _ in range(3):  # the second keeps the snapshot, and the third uses it
        chat(shared)
    for _ in range(10):
        for _ in range(6):
            chat([rng.randrange(VOCAB_SIZE)])
        request = turns.request([*shared, *(rng.randrange(VOCAB_SIZE) for _ in range(60))], 20)
        turns.answer(request)
        assert request.num_cached == 992


def test_a_snapshot_is_kept_where_the_caller_says_that_prompts_part() -> None:
    turns = Turns()
    tokens = [number % VOCAB_SIZE for number in range(400)]
    first = turns.request(tokens, max_tokens=1)
    first.hints = Hints(shared_lengths=(170, 7, 100_000))
    turns.answer(first)
    second = turns.request([*tokens[:170], *range(40)], max_tokens=1)
    turns.answer(second)
    assert second.num_cached == 160


def test_a_snapshot_of_an_answer_stays_once_another_prompt_has_begun_with_it() -> None:
    turns = Turns()
    answer = turns.request(list(range(20)), max_tokens=120)
    turns.scheduler.add(answer)
    while answer.num_output < 50:
        turns.step()
    beginning = answer.tokens[: (len(answer.tokens) - 1) // PAGE_SIZE * PAGE_SIZE]
    other = turns.request([*beginning, *range(50)], max_tokens=1)
    turns.scheduler.add(other)
    while turns.step():
        pass
    assert other.num_cached == len(beginning)
    third = turns.request([*beginning, *range(60, 100)], max_tokens=1)
    turns.answer(third)
    assert third.num_cached == len(beginning)


def test_states_run_short_only_of_snapshots() -> None:
    turns = Turns(num_states=4)
    scheduler_limit = turns.scheduler.config.max_running
    assert scheduler_limit > 2
    for start in range(5):
        request = turns.request([start, *range(60)], max_tokens=20)
        turns.answer(request)
        assert request.num_output == 20
    assert turns.states.num_available == 4


def test_waiting_requests_are_compared_once_for_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(num_states=8)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    config = SchedulerConfig(8192, max_running=1, token_budget=64)
    scheduler = turns.scheduler = Scheduler(
        config, pool, PrefixIndex(pool), Continuous(), states=turns.states
    )
    num_matches = 0
    match = scheduler.prefix_cache.match

    def counting_match(state: RequestState) -> PrefixHit | None:
        nonlocal num_matches
        num_matches += state.request.id != "1"
        return match(state)

    monkeypatch.setattr(scheduler.prefix_cache, "match", counting_match)
    first = turns.request(list(range(40)), max_tokens=100)
    others = [turns.request([9, number, *range(200)], max_tokens=1) for number in range(5)]
    for request in (first, *others):
        scheduler.add(request)
    num_steps = 0
    while not first.is_finished and (plan := scheduler.plan()):
        scheduler.commit(plan, turns.model.run(plan))
        num_steps += 1
    assert num_steps >= 100
    assert num_matches <= num_steps + 2 * len(others), "each of them in each step"


def test_a_kv_memory_that_fits_is_enough_for_pages_and_states() -> None:
    program = hybrid_model()._program
    free_bytes = 10**8
    options = CacheOptions(memory_bytes=9 * 10**7, context_length=2048)
    available = free_bytes + WORKING_BYTES
    size = size_kv_cache(program, options, 256, 0, available, max_running=64)
    assert size.num_states >= 64
    assert size.cache_bytes <= 9 * 10**7
    options = CacheOptions(memory_bytes=size.cache_bytes, context_length=2048)
    resized = size_kv_cache(program, options, 256, 0, available, max_running=64)
    assert resized.num_pages > 0
    with pytest.raises(MemoryLimitError):
        size_kv_cache(
            program, CacheOptions(memory_bytes=2 * 10**8), 256, 0, available, max_running=64
        )


def test_a_static_batch_without_room_for_its_states_is_refused() -> None:
    config = SchedulerConfig(CONTEXT, max_running=64)
    batch = BatchOptions(policy="static", batch_size=9)
    assert with_room_for_states(config, batch, 0) is config
    assert with_room_for_states(config, batch, 24).max_running == 9
    with pytest.raises(MemoryLimitError, match=r"of 9 requests do not fit .* --batch-size to 8,"):
        with_room_for_states(config, batch, 23)
    ahead_config = replace(config, steps_ahead=1)  # two stages: each request has one more slot
    with pytest.raises(MemoryLimitError, match="lower --batch-size to 6, or raise --kv-memory"):
        with_room_for_states(ahead_config, batch, 24)
    assert with_room_for_states(ahead_config, BatchOptions(), 24).max_running == 6


def test_a_request_needs_a_slot_for_each_stage_of_a_pipeline() -> None:
    program = hybrid_model()._program
    memory_bytes = 6 * program.state_bytes + 20 * program.page_bytes(PAGE_SIZE)
    options = CacheOptions(memory_bytes, context_length=256)
    num_states = [
        size_kv_cache(
            program, options, 256, 0, 10**9, max_running=64, mesh=Mesh((1,) * num_stages)
        ).num_states
        for num_stages in (1, 2, 3)
    ]
    assert num_states == [3, 4, 5], "of one request, and one for a snapshot"
