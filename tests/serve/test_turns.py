"""Tenants take turns at the threads that read long bodies."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server, post_bytes, read_all, wait_for
from twostroke.http.keys import ApiKeys
from twostroke.serve.body.decode import BodyDecoder
from twostroke.serve.options import ServeOptions
from twostroke.serve.turns import Readers

if TYPE_CHECKING:
    from pathlib import Path


def test_long_body_waits_for_one_of_another_tenant_and_not_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, decode = list[bytes](), threading.Event(), BodyDecoder.decode

    def slow(self: BodyDecoder[Any], body: bytes) -> Any:
        begun.append(body[12:16])
        assert may_end.wait(20)
        return decode(self, body)

    monkeypatch.setattr(BodyDecoder, "decode", slow)
    options = ServeOptions(drain_s=1, api_keys=ApiKeys({"k": "anna", "other": "ben"}))
    with live_server(tmp_path, options) as server:
        turns = server.api._readers._turns
        connections = []

        def post(key: str, word: str) -> None:
            body = {"prompt": word * 5000}
            header = f"Authorization: Bearer {key}\r\nConnection: close\r\n"
            connections.append(server.connect())
            connections[-1].sendall(post_bytes("/v1/completions", body, headers=header))

        for _ in range(6):
            post("k", "anna")
        wait_for(lambda: turns.num_waiting("anna") == 4)
        post("other", "ben ")
        wait_for(lambda: turns.num_waiting("ben") == 1)
        may_end.set()
        for connection in connections:
            assert read_all(connection)
    assert len(begun) == 7
    assert begun.index(b"ben ") <= 3  # after the two that ran, and perhaps one more


def test_last_work_waits_for_all_other_and_cancelled_work_keeps_its_turn() -> None:
    async def ask() -> None:
        readers, done, may_end = Readers(1), list[str](), threading.Event()

        def first() -> None:
            assert may_end.wait(20)
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

    asyncio.run(ask())
