"""Memory that was freed goes back to the system."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from twostroke.http import heap


def _own_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(one) << 10 for one in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))


def test_holes_in_the_heap_are_given_back() -> None:
    if not heap.trim():
        pytest.skip("this C library has no malloc_trim")
    blocks = [b"x" * (100_000 + i) for i in range(400)]
    kept = blocks[::20]
    del blocks
    before = _own_bytes()
    heap.trim()
    assert _own_bytes() < before - 20 * 2**20
    assert len(kept) == 20


def test_a_server_trims_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        times, done = [0], asyncio.Event()
        loop = asyncio.get_running_loop()

        def trim() -> bool:
            times[0] += 1
            if times[0] == 3:
                loop.call_soon_threadsafe(done.set)
            return True

        monkeypatch.setattr(heap, "trim", trim)
        monkeypatch.setattr(heap, "_EVERY_S", 0.001)
        task = asyncio.create_task(heap.trim_regularly())
        await done.wait()
        task.cancel()

    asyncio.run(main())
