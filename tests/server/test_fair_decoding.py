"""Tenants take turns at the threads that decode long bodies."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server, post_bytes, read_all
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.body.decode import BodyDecoder
from twostroke.server.http import fair_queue as turns
from twostroke.server.http.fair_queue import FairQueue, Readers
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path


def test_long_body_waits_for_one_of_another_tenant_and_not_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, decode = list[bytes](), threading.Event(), BodyDecoder.decode

    def slow(self: BodyDecoder[Any], body: bytes) -> Any:
        begun.append(body[12:16])
        assert may_end.wait(60)
        return decode(self, body)

    monkeypatch.setattr(BodyDecoder, "decode", slow)
    options = ServeOptions(drain_s=1, api_keys=ApiKeys({"k": "anna", "other": "ben"}))
    with live_server(tmp_path, options) as server:
        line = server.api._readers._queue
        connections = []

        def post(key: str, word: str) -> None:
            body = {"prompt": word * 5000}
            header = f"Authorization: Bearer {key}\r\nConnection: close\r\n"
            connections.append(server.connect())
            connections[-1].sendall(post_bytes("/v1/completions", body, headers=header))

        for _ in range(6):
            post("k", "anna")
        wait_for(lambda: line.num_waiting("anna") == 5)  # one thread is for others
        post("other", "ben ")
        wait_for(lambda: b"ben " in begun)  # while all others wait
        may_end.set()
        for connection in connections:
            assert read_all(connection)
    assert len(begun) == 7


def test_last_work_waits_for_all_other_and_cancelled_work_keeps_its_turn() -> None:
    async def submit() -> None:
        readers, done, may_end = Readers(1), list[str](), threading.Event()

        def first() -> None:
            assert may_end.wait(60)
            done.append("first")

        running = asyncio.create_task(readers.run("a", first))
        await asyncio.sleep(0.01)
        last = asyncio.create_task(readers.run("b", done.append, "last", is_last=True))
        await asyncio.sleep(0)
        others = [asyncio.create_task(readers.run("a", done.append, word)) for word in "xyz"]
        await asyncio.sleep(0)
        running.cancel()
        others[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not done
        may_end.set()
        await asyncio.gather(last, others[0], others[2])
        assert done == ["first", "x", "z", "last"]
        readers.close()

    asyncio.run(submit())


def test_new_tenant_gets_no_credit_for_time_before_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def submit() -> None:
        clock_s, order, fair_queue = [0.0], list[str](), FairQueue()
        monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))

        async def use(tenant: str) -> None:
            turn = await fair_queue.take(tenant)
            order.append(tenant)
            clock_s[0] += 10
            fair_queue.end(turn)

        async def queue(tenant: str, count: int) -> list[asyncio.Task[None]]:
            tasks = [asyncio.create_task(use(tenant)) for _ in range(count)]
            await asyncio.sleep(0)
            return tasks

        begun = await fair_queue.take("a")
        waiting = asyncio.create_task(fair_queue.take("batch", is_last=True))
        tasks = await queue("a", 5)
        fair_queue.end(begun)
        last = await waiting
        tasks += await queue("a", 3) + await queue("b", 9)
        fair_queue.end(last)
        await asyncio.gather(*tasks)
        assert order[5:9] == ["b", "a", "b", "a"]

    asyncio.run(submit())


def test_cancelled_calls_do_not_count_as_waiting() -> None:
    async def submit() -> None:
        fair_queue = FairQueue()
        turn = await fair_queue.take("a")
        waiting = [asyncio.create_task(fair_queue.take("a")) for _ in range(3)]
        await asyncio.sleep(0)
        assert fair_queue.num_waiting("a") == 3
        for task in waiting[:2]:
            task.cancel()
        await asyncio.sleep(0)
        assert fair_queue.num_waiting("a") == 1
        fair_queue.end(turn)
        fair_queue.end(await waiting[2])

    asyncio.run(submit())
