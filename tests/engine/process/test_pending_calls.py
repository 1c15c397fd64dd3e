"""Limits on the calls that wait for an engine process: how many, and of which tenant."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.core.errors import DeadlineError, EngineDiedError, OverloadedError
from twostroke.core.request import NO_HINTS, EmbeddingParams
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.process import messages as wire
from twostroke.engine.process.pending import PendingCalls, RemoteOutputs
from twostroke.engine.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = SchedulerConfig(context_length=100, max_waiting_requests=4, max_waiting_tokens=100)


def run(test: Callable[[Callable[..., None]], None]) -> None:
    """Run `test` with a function that submits prompts of given lengths; no engine process runs."""

    async def inside() -> None:
        pending = PendingCalls(lambda _: None)
        pending.is_up = False

        def submit(*lengths: int, tenant: str = "a", priority: int = 0, n: int = 1) -> None:
            caller, id_ = Caller(priority, tenant), len(pending.open)
            prompts = [[1] * length for length in lengths]
            message: Any = wire.Generate(
                id_, prompts, SamplingParams(n=max(n, 1)), caller, NO_HINTS
            )
            if n == 0:
                message = wire.EmbedTexts(id_, prompts, EmbeddingParams(), caller)
            outputs = RemoteOutputs(message, len(prompts) * max(n, 1), lambda _: None)
            pending.check_room(outputs, CONFIG, 1.5)
            pending.add(outputs)

        test(submit)

    asyncio.run(inside())


def refused(submit: Callable[..., None], message: str, *lengths: int, **submitter: Any) -> None:
    with pytest.raises(OverloadedError, match=message) as caught:
        submit(*lengths, **submitter)
    assert caught.value.facts["room_s"] == 1.5


def test_answers_and_tokens_are_bounded() -> None:
    def test(submit: Callable[..., None]) -> None:
        submit(10, n=3)
        refused(submit, "30 tokens wait", 71)
        submit(10)
        refused(submit, "4 requests wait", 1)

    run(test)


def test_a_prompt_alone_may_be_long_and_texts_are_many() -> None:
    def test(submit: Callable[..., None]) -> None:
        submit(*[1] * 20, n=0)
        submit(1)
        submit(150, tenant="b")
        refused(submit, "150 tokens wait", 1, tenant="b")

    run(test)


def test_one_tenant_leaves_room_for_others_and_less_urgent_for_more() -> None:
    def test(submit: Callable[..., None]) -> None:
        for _ in range(4):
            submit(1)
        refused(submit, "4 requests wait", 1)
        submit(1, priority=-1)
        for _ in range(3):
            submit(1, tenant="b")
        refused(submit, "8 requests wait", 1, tenant="c")  # in all

    run(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_timeout_that_the_engine_did_not_keep_says_whether_anything_was_computed(
    has_begun: bool,
) -> None:
    async def work() -> None:
        pending = PendingCalls(lambda _: None)
        message = wire.Generate(1, [[1]], SamplingParams(), Caller(timeout_s=-1), NO_HINTS)
        outputs = RemoteOutputs(message, 1, lambda _: None)
        pending.add(outputs)
        if has_begun:
            outputs.start()
        pending.end_late(EngineDiedError("It died."))
        with pytest.raises(DeadlineError) as late_error:
            await outputs.accepted
        assert late_error.value.facts["is_unrun"] is not has_begun

    asyncio.run(work())
