"""Room in the engine for lines of batches, which tenants take in turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from twostroke.core.cancellation import wait_until_set
from twostroke.server.http.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S: Final = 0.05  # how often to look whether interactive requests have left room


class BatchSlots:
    """How many lines may be in the engine, and how many are. It belongs to the event loop."""

    def __init__(self, size: Callable[[], int]) -> None:
        """Have room for `size` lines, which changes."""
        self._size = size
        self._num_lines = 0
        self._left = asyncio.Event()  # set when a line leaves
        self._turns = FairQueue()  # of tenants whose lines wait

    async def enter(self, tenant: str) -> None:
        """Wait until there is room for a line of a tenant, and take it."""
        turn = await self._turns.take(tenant)
        try:
            while self._num_lines >= self._size():
                self._left.clear()
                await wait_until_set(self._left, _LOOK_S)
            self._num_lines += 1
        finally:
            self._turns.end(turn)

    def leave(self) -> None:
        """Give the room of a line to another."""
        self._num_lines -= 1
        self._left.set()
