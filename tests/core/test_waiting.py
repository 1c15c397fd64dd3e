"""Whoever waits with a time limit is cancelled, also in the instant in which its wait ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from support.remote import faked
from support.tiny import write_tiny_gguf
from twostroke.core.cancellation import wait_until_set
from twostroke.core.constraint import Constraint
from twostroke.server.batch.queueing import AdaptiveLimit, BatchSlots
from twostroke.server.generation.running import Submission
from twostroke.server.http.errors import ServerStoppingError
from twostroke.server.http.retry_after import RetryAfter
from twostroke.server.models.grammar_compiler import GrammarCompiler
from twostroke.server.models.model_pool import ModelPool
from twostroke.server.models.residency import ModelResidency, ModelUse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    # What waits, and what ends its wait.
    Waiting = tuple[Coroutine[Any, Any, Any], Callable[[], None]]

INSTANTS = range(5)  # rounds of the event loop between the end of the wait and the cancellation


async def cancel_at(waiting: Waiting, instant: int) -> bool:
    """Cancel a task at a certain moment; return whether it was cancelled, not ended before."""
    work, end_wait = waiting
    task = asyncio.create_task(work)
    for _ in range(5):  # it waits now
        await asyncio.sleep(0)
    assert not task.done()
    end_wait()
    for _ in range(instant):
        await asyncio.sleep(0)
    is_late = not task.cancel()
    await asyncio.wait((task,), timeout=10)
    if not task.done():  # it goes on as if nobody had cancelled it
        task.cancel()
        await asyncio.wait((task,))
        return False
    return is_late or task.cancelled()


def event() -> Waiting:
    changed = asyncio.Event()
    return wait_until_set(changed, 60), changed.set


def room_of_batches() -> Waiting:
    room = BatchSlots(lambda: 1)
    room._num_requests = 1
    return room.enter("tenant"), room.leave


def limit_of_a_batch() -> Waiting:
    limit = AdaptiveLimit("batch")
    limit._max_requests = 1
    sent_s = limit.send()
    return limit.wait(), lambda: limit.leave(sent_s, None, is_refused=False)


def pool_of_models() -> Waiting:
    view = ModelUse("model", 1, 1.0, ModelResidency.LOADED)
    engine: Any = SimpleNamespace(
        card=None, residency=ModelResidency.LOADED, num_waiting=0, model_use=lambda now_s: view,
        set_closed=lambda is_closed: None, expected_load_s=1.0,
    )  # fmt: skip
    pool = ModelPool({"model": engine}, budget_bytes=1)
    return pool._manage(), engine.changed


def compiler_of_constraints() -> Waiting:
    compiled: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()

    async def compile_(constraint: Constraint, limit_s: float) -> tuple[str, ...]:
        return await compiled

    compiler = GrammarCompiler(compile_, 60.0)
    return compiler.compile(Constraint("regex", "a")), lambda: compiled.set_result(())


@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize(
    "waiting",
    [event, room_of_batches, limit_of_a_batch, pool_of_models, compiler_of_constraints],
)
def test_no_cancellation_is_lost(waiting: Callable[[], Waiting], instant: int) -> None:
    async def cancel() -> bool:
        return await cancel_at(waiting(), instant)

    assert asyncio.run(cancel())


@pytest.mark.parametrize("instant", INSTANTS)
def test_no_cancellation_of_a_reading_is_lost(tmp_path: Path, instant: int) -> None:
    async def cancel() -> bool:
        async with faked(str(write_tiny_gguf(tmp_path / "tiny.gguf"))) as (engine, _):

            def answer() -> None:
                ((_, reading),) = engine._inquiries.values()
                reading.set_result(engine._last_status)

            return await cancel_at((engine.read(), answer), instant)

    assert asyncio.run(cancel())


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("has_left", [True, False])
def test_a_request_that_is_cut_off_while_its_client_leaves_is_cancelled(
    is_cut: bool, has_left: bool
) -> None:
    async def run() -> type[BaseException] | None:
        accepted = asyncio.Event()
        open_ = set[Any]()

        async def accept() -> None:
            with Submission("online", cast("Any", open_), RetryAfter()):
                await accepted.wait()

        task = asyncio.create_task(accept())
        await asyncio.sleep(0)
        for accepting in list(open_) if is_cut else ():
            accepting.cancel()
        if has_left:
            task.cancel()
        accepted.set()
        await asyncio.wait((task,))
        if task.cancelled():
            return asyncio.CancelledError
        return None if task.exception() is None else type(task.exception())

    stopped = ServerStoppingError if is_cut else None
    assert asyncio.run(run()) is (asyncio.CancelledError if has_left else stopped)


def test_waiting_tells_whether_the_event_was_set_in_time() -> None:
    async def wait() -> list[bool]:
        late_event, early = asyncio.Event(), asyncio.Event()
        early.set()
        return [await wait_until_set(late_event, 0.01), await wait_until_set(early, 0)]

    assert asyncio.run(wait()) == [False, True]
