"""Memory: freed memory returns to the system, and a body is held only once."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.requests import Request

from twostroke.core import process_tuning
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.limits import RequestLimits, body_of
from twostroke.server.http.request_context import STATE_KEY, ServedRequest

if TYPE_CHECKING:
    from starlette.types import Message


def _own_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(
        int(size) << 10 for size in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE)
    )


def test_freed_heap_memory_returns_to_the_system() -> None:
    if not process_tuning.return_freed_memory():
        pytest.skip("this C library has no malloc_trim")
    blocks = [b"x" * (100_000 + i) for i in range(400)]
    kept_blocks = blocks[::20]
    del blocks
    before = _own_bytes()
    process_tuning.return_freed_memory()
    assert _own_bytes() < before - 20 * 2**20
    assert len(kept_blocks) == 20


class Node:
    """An object that may refer to itself, so that only the garbage collector frees it."""


def test_a_server_frees_cycles_and_trims_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        trims, done = [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def trim() -> bool:
            trims.append(node_reference())
            if len(trims) == 3:
                loop.call_soon_threadsafe(done.set)
            return True

        monkeypatch.setattr(process_tuning, "return_freed_memory", trim)
        monkeypatch.setattr(process_tuning, "_TRIM_INTERVAL_S", 0.001)
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        node_reference = weakref.ref(node)
        del node
        task = asyncio.create_task(process_tuning.return_freed_memory_regularly())
        await done.wait()
        task.cancel()
        assert trims[:3] == [None] * 3

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_body_that_waits_to_be_read_is_in_memory_once() -> None:
    num_chunks, size = 32, 1 << 16
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    scope["state"] = {STATE_KEY: ServedRequest("r", error_form(scope), "POST", "/")}
    sent = iter(range(num_chunks, 0, -1))

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(size), "more_body": next(sent) > 1}

    async def wait() -> int:
        async with body_of(Request(scope, receive), RequestLimits()) as body:
            assert len(body) == num_chunks * size
            return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        assert asyncio.run(wait()) < 1.5 * num_chunks * size
    finally:
        tracemalloc.stop()
