"""The engine loop: failures of single requests, closing, policies, health, counts."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.cpu import greedy_request
from support.engines import tiny_client
from support.steps import Steps
from support.tiny import write_tiny_gguf
from support.waiting import wait_for
from twostroke.core.errors import (
    DeviceLostError,
    EngineStoppedError,
    MemoryLimitError,
    TwostrokeError,
    UsageError,
)
from twostroke.core.message_text import counted_noun
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.request import FinishReason, Hints
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import NO_TOKEN, Slice, StepPlan, StepResult
from twostroke.engine import status
from twostroke.engine.client import Caller
from twostroke.engine.engine import build
from twostroke.engine.faults import StepLimit
from twostroke.engine.status import Health

if TYPE_CHECKING:
    from pathlib import Path

    from support.engines import Backend
    from twostroke.core.request import Request
    from twostroke.engine.client import Client
    from twostroke.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answers(client: Client, prompts: list[list[int]]) -> list[tuple[int, ...] | str]:
    """Compute prompts together; return the tokens of each, or its error."""
    generations = [client.generate(prompt, GREEDY) for prompt in prompts]
    results: list[tuple[int, ...] | str] = []
    for generation in generations:
        try:
            results.append(generation.wait()[0].token_ids)
        except TwostrokeError as error:
            results.append(str(error))
    return results


def test_a_request_that_breaks_a_step_fails_alone(tmp_path: Path) -> None:
    prompts = [[5], [99], [7, 8], [9]]
    with tiny_client(tmp_path) as (client, backend):
        expected = [answers(client, [prompt])[0] for prompt in prompts]
        backend.poison = 99
        backend.gate.clear()
        threading.Timer(0.2, backend.gate.set).start()
        result = answers(client, prompts)
        assert result[0] == expected[0]
        assert result[2:] == expected[2:]
        assert str(result[1]).startswith("The engine failed on this request: ValueError")
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0
        assert client.loop.health is Health.READY


def test_a_request_without_a_token_to_sample_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_client(tmp_path) as (client, backend):
        run = backend.run

        def draw_nothing_for_99(plan: StepPlan) -> StepResult:
            result = run(plan)
            sampling = [part.request for part in plan.slices if part.samples]
            tokens = [
                NO_TOKEN if 99 in request.prompt and request.num_output == 2 else token
                for request, token in zip(sampling, result.tokens, strict=True)
            ]
            return StepResult(tokens, result.logprobs)

        expected = answers(client, [[5]])
        monkeypatch.setattr(backend, "run", draw_nothing_for_99)
        assert answers(client, [[5], [99]]) == [
            *expected,
            "The engine failed on this request: its logits leave no token to sample.",
        ]
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_missing_tokens_after_wrong_drafts_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a right draft they matter, because the request's own next token cannot be sampled."""
    with tiny_client(tmp_path) as (client, _):
        expected = answers(client, [[5]])[0]
    speculation = SpeculationOptions("ngram", count=4)
    with tiny_client(tmp_path, speculation=speculation) as (client, backend):
        run = backend.run

        def draw_nothing_behind_drafts(plan: StepPlan) -> StepResult:
            result = run(plan)
            tokens = iter(result.tokens)
            drawn_tokens = []
            for part in plan.slices:
                mine = [next(tokens) for _ in range(part.num_drawn)]
                drawn_tokens += [*mine[:1], *([NO_TOKEN] * len(mine[1:]))]
            return StepResult(drawn_tokens, result.logprobs)

        monkeypatch.setattr(backend, "run", draw_nothing_behind_drafts)
        wrong = Hints("ngram", (expected[0], (expected[1] + 1) % 280, 7, 8, 9))
        [answer] = client.generate([5], GREEDY, hints=wrong).wait()
        assert answer.token_ids == expected
        assert answer.usage.rejected_tokens > 0
        right = Hints("ngram", tuple(expected))
        with pytest.raises(TwostrokeError, match="leave no token to sample"):
            client.generate([5], GREEDY, Caller(tenant="other"), right).wait()
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_a_broken_loop_fails_all_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    with tiny_client(tmp_path, max_running=1) as (client, backend):
        backend.gate.clear()
        generations = [client.generate([token], GREEDY) for token in (5, 6)]
        backend.is_broken = True
        backend.gate.set()
        for generation in generations:
            with pytest.raises(TwostrokeError, match="The engine stopped"):
                generation.wait()
        assert client.loop.health is Health.STOPPED
        with pytest.raises(EngineStoppedError, match="The engine stopped"):
            client.generate([5], GREEDY)


def test_closing_lets_running_requests_finish_in_time(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        generation = client.generate([5], GREEDY)
        client.loop.close(drain_s=10)
        assert generation.wait()[0].finish_reason is FinishReason.LENGTH
        assert client.loop.health is Health.STOPPED


def test_closing_ends_requests_that_take_longer(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, backend):
        backend.gate.clear()
        generation = client.generate([5], GREEDY)
        wait_for(lambda: backend.num_steps == 1)
        threading.Timer(0.5, backend.gate.set).start()
        start_s = time.monotonic()
        client.loop.close(drain_s=0.1)
        assert time.monotonic() - start_s < 50
        with pytest.raises(TwostrokeError, match="shut down"):
            generation.wait()


def test_a_loop_can_be_closed_twice_and_then_refuses_requests(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        client.loop.close()
        client.loop.close()
        with pytest.raises(EngineStoppedError, match="shutting down") as caught:
            client.generate([5], GREEDY)
        assert caught.value.http_status == 503


def test_the_backend_forgets_every_ended_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    def forget(self: Backend, request: Request) -> None:
        forgotten.append(request.id)

    with tiny_client(tmp_path) as (client, backend):
        monkeypatch.setattr(type(backend), "forget", forget)
        done = client.generate([5], GREEDY)
        done.wait()
        stopped = client.generate([6], SamplingParams(ignore_eos=True))
        next(stopped.outputs())
        stopped.cancel()
        expected = {*done.request_ids, *stopped.request_ids}
        wait_for(lambda: set(forgotten) == expected)


def test_health_reports_a_stalled_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_client(tmp_path) as (client, backend):
        assert client.loop.health is Health.READY
        monkeypatch.setattr(status, "_STALLED_AFTER_S", 0.05)
        backend.gate.clear()
        generation = client.generate([5], GREEDY)
        wait_for(lambda: client.loop.health is Health.STALLED)
        monkeypatch.undo()
        backend.gate.set()
        generation.wait()
        wait_for(lambda: client.loop.health is Health.READY)


def test_counts_add_up(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        client.generate([5] * 40, GREEDY).wait()
        client.generate([5] * 40, SamplingParams(n=2, max_tokens=1, seed=1)).wait()
        wait_for(lambda: client.loop.snapshot().services["default"].answers == 3)
        totals = client.loop.snapshot().services["default"]
        assert totals.prompt_tokens == 120
        assert totals.cached_tokens == 64
        assert totals.completion_tokens == 8
        strokes = client.loop.snapshot().phases
        assert strokes.prefill.rows == 40 + 2 * 8
        assert strokes.decode.rows == strokes.decode.steps == 5
        assert strokes.decode.bytes > 0
        assert (strokes - strokes).prefill.flops == 0


def engine(folder: Path, **batch: object) -> Engine:
    options = EngineOptions(
        ComputeOptions(backend="reference"),
        CacheOptions(memory_bytes=2_000_000),
        BatchOptions(**batch),  # type: ignore[arg-type]
    )
    return build(str(write_tiny_gguf(folder / "tiny.gguf")), options)


def test_a_static_batch_waits_until_it_is_full(tmp_path: Path) -> None:
    with engine(tmp_path, policy="static", batch_size=3) as built:
        loop = built.client.loop
        first = [built.client.generate([token], GREEDY) for token in (5, 6)]
        time.sleep(0.1)
        assert loop.snapshot().scheduler.num_waiting == 2
        first.append(built.client.generate([7], GREEDY))
        assert all(generation.wait() for generation in first)


def test_a_flush_starts_a_static_batch_that_is_not_full(tmp_path: Path) -> None:
    with engine(tmp_path, policy="static", batch_size=3) as built:
        generation = built.client.generate([5], GREEDY)
        built.client.loop.flush()
        assert generation.wait()


def test_a_dynamic_batch_starts_when_its_time_is_over(tmp_path: Path) -> None:
    with engine(tmp_path, policy="dynamic", batch_size=3, max_wait_s=0.2) as built:
        start_s = time.monotonic()
        [completion] = built.client.generate([5], GREEDY).wait()
        assert time.monotonic() - start_s > 0.19
        assert completion.timings.started_s - completion.timings.arrival_s > 0.19


def test_every_policy_gives_the_same_tokens(tmp_path: Path) -> None:
    prompts = [[5], [6, 7], [8, 9, 10], [11]]
    results = []
    for policy in ("continuous", "dynamic", "static"):
        with engine(tmp_path, policy=policy, batch_size=4, token_budget=5) as built:
            results.append(answers(built.client, prompts))
    assert results[0] == results[1] == results[2]


def test_a_batch_larger_than_max_running_is_refused(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(UsageError, match=r"batch of 9"):
        engine(tmp_path, policy="static", batch_size=9, max_running=8)
    assert threading.active_count() == before


def test_steps_for_which_there_is_no_memory_become_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer changes, and later steps are smaller."""
    prompts = [[*range(5, 60)], [7, 8], [*range(90, 120)]]
    with tiny_client(tmp_path) as (client, backend):
        expected = [answers(client, [prompt])[0] for prompt in prompts]
        run, refused = backend.run, []

        def refuse_large(plan: StepPlan) -> StepResult:
            if (num_rows := sum(plan.counts)) > 20:
                refused.append(num_rows)
                raise MemoryLimitError("The GPU has no memory left.")
            return run(plan)

        monkeypatch.setattr(backend, "run", refuse_large)
        assert answers(client, prompts) == expected
        assert answers(client, prompts[::-1]) == expected[::-1]
        assert refused
        assert refused == sorted(refused, reverse=True)
        assert all(2 * later <= num_rows for num_rows, later in itertools.pairwise(refused))
        events = [record.getMessage() for record in caplog.records]
        tokens = counted_noun(refused[-1] // 2, "token")
        assert events[-1] == f"The GPU has no memory left. Steps compute at most {tokens} now."
        assert len(events) == len(refused)
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_steps_grow_again_when_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps grow after 64 steps without a shortage, or after 128 if there were two."""
    prompt, long = [*range(5, 60)], replace(GREEDY, max_tokens=70)
    with tiny_client(tmp_path) as (client, backend):
        limits = [client.loop.config.step_budget]
        run, is_short = backend.run, True

        def refuse_large(plan: StepPlan) -> StepResult:
            if is_short and sum(plan.counts) > 20:
                raise MemoryLimitError("The GPU has no memory left.")
            return run(plan)

        def generate() -> None:
            assert len(client.generate(prompt, long).wait()[0].token_ids) == 70
            limits.append(client.loop.snapshot().max_step_tokens)

        monkeypatch.setattr(backend, "run", refuse_large)
        assert client.loop.snapshot().num_shortages == 0
        generate()
        lowered, num_shortages = limits[-1], client.loop.snapshot().num_shortages
        assert lowered < 20
        assert num_shortages > 0
        is_short = False
        generate()
        generate()
        assert limits[-1] == 2 * lowered  # after 128 steps
        assert client.loop.snapshot().num_shortages == num_shortages


def test_a_limit_waits_for_twice_as_many_steps_after_each_shortage() -> None:
    plan, error = (
        StepPlan((Slice(greedy_request([1] * 100), 0, 100, samples=True),)),
        MemoryLimitError,
    )
    limit, waits = StepLimit(100), []
    assert not limit.lower(plan, ValueError("no"))
    for _ in range(9):
        assert limit.lower(plan, error("No memory."))
        assert limit.max_tokens == 50
        waits.append(0)
        while limit.max_tokens == 50 and waits[-1] < 10_000:
            limit.count_success()
            waits[-1] += 1
        assert limit.max_tokens == 100
    assert waits == [64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]
    single = StepPlan((Slice(greedy_request([1]), 0, 1, samples=True),))
    assert not limit.lower(single, error("No memory."))
    assert limit.num_shortages == 10


def test_changed_limits_change_steps_but_no_answer(tmp_path: Path) -> None:
    prompts = [[number + 1] * (10 + 7 * number) for number in range(6)]
    with tiny_client(tmp_path, max_running=6, token_budget=64) as (client, _):
        expected = answers(client, prompts)
        loop, plans = client.loop, []
        for limits in ((2, 1), (64, 6), (6, 3)):
            generations = [client.generate(prompt, GREEDY) for prompt in prompts]
            loop.change_limits(*limits)  # while they run
            assert [generation.wait()[0].token_ids for generation in generations] == expected
            plans.clear()
            loop.on_step = plans.append
            assert answers(client, prompts) == expected
            loop.on_step = None
            assert max(plan.num_rows for plan in plans) <= limits[0]
            assert max(len(plan.slices) for plan in plans) <= limits[1]
            assert loop.snapshot().max_step_tokens == limits[0]
            assert (loop.config.token_budget, loop.config.max_running) == limits


@pytest.mark.parametrize(
    ("limits", "field"),
    [((65, 6), "token_budget"), ((64, 7), "max_running"), ((0, 0), "token_budget"),
     ((4, 0), "max_running"), ((4, 5), "token_budget")],
)  # fmt: skip
def test_limits_above_those_at_the_start_are_refused(
    tmp_path: Path, limits: tuple[int, int], field: str
) -> None:
    with tiny_client(tmp_path, max_running=6, token_budget=64) as (client, _):
        with pytest.raises(UsageError) as caught:
            client.loop.change_limits(*limits)
        assert caught.value.field == field
        assert (client.loop.config.token_budget, client.loop.config.max_running) == (64, 6)


def test_a_changed_budget_keeps_a_limit_of_the_memory() -> None:
    plan = StepPlan((Slice(greedy_request([1] * 100), 0, 100, samples=True),))
    limit = StepLimit(100)
    limit.change_budget(80)
    assert (limit.max_tokens, limit.lowered_tokens) == (80, None)
    assert limit.lower(plan, MemoryLimitError("No memory."))
    limit.change_budget(100)
    assert (limit.max_tokens, limit.lowered_tokens) == (50, 50)
    limit.change_budget(40)
    assert limit.max_tokens == 40
    limit.change_budget(100)
    assert limit.max_tokens == 50


def test_a_shortage_with_more_requests_than_the_new_budget_makes_steps_smaller() -> None:
    steps, limit = Steps(token_budget=16), StepLimit(16)
    for name in "abcd":
        steps.add(name, 3, max_tokens=20)
    steps.add("long", 40, max_tokens=2)
    steps.step()
    steps.step()
    steps.add("urgent", 40, max_tokens=2, priority=-1)
    steps.step()
    steps.scheduler.change_limits(2, 2)
    limit.change_budget(2)
    plan = steps.scheduler.plan(limit.lowered_tokens)
    assert plan is not None
    assert (plan.num_rows, len(plan.slices)) == (6, 5)  # 4 decode; one of two prompts is computed
    assert limit.lower(plan, MemoryLimitError("No memory."))
    assert limit.max_tokens == 2
    steps.scheduler.undo_newest_step()
    plan = steps.scheduler.plan(limit.lowered_tokens)
    assert plan is not None
    assert (plan.num_rows, len(plan.slices)) == (4, 4)
    assert not limit.lower(plan, MemoryLimitError("No memory."))  # requests run one by one
    steps.land(plan)
    for _ in range(128):
        limit.count_success()
    assert limit.lowered_tokens is None
    steps.finish()


def test_a_limit_of_the_memory_is_never_above_the_budget_of_a_step() -> None:
    steps = Steps(token_budget=16)
    steps.add("a", 40, max_tokens=1)
    steps.scheduler.change_limits(4, 2)
    plan = steps.scheduler.plan(8)
    assert plan is not None
    assert plan.num_rows == 4


def test_a_device_that_is_lost_ends_the_engine_and_all_callers_learn_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_client(tmp_path) as (client, backend):

        def fail(_: StepPlan) -> StepResult:
            backend.gate.wait()
            raise DeviceLostError("The GPU failed: an illegal memory access was encountered.")

        monkeypatch.setattr(backend, "run", fail)
        backend.gate.clear()
        threading.Timer(0.2, backend.gate.set).start()
        why = "The engine stopped: The GPU failed: an illegal memory access was encountered."
        assert answers(client, [[5], [6, 7]]) == [why, why]
        assert client.loop.health is Health.STOPPED
        with pytest.raises(EngineStoppedError, match="illegal memory access"):
            client.generate([5], GREEDY)
