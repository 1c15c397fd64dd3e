"""When a batch's requests are sent, how many at once, its progress, and its deadline."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.cancellation import wait_until_set
from twostroke.server.http.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.server.batch.batch import Batch
    from twostroke.server.http.internal_requests import InternalResponse

_MOST_PAUSE_S: Final = 30.0
_logger = logging.getLogger("twostroke.serve")


class AdaptiveLimit:
    """Lets the lines of one batch through. It belongs to the event loop.

    A refusal halves how many may be under way and begins a pause for all of them, which is logged;
    lines sent before the pause begin no other. Each answer allows one more.
    """

    def __init__(self, batch: str) -> None:
        """Let all lines of a batch through."""
        self._batch = batch
        self._most: float = float("inf")
        self._num_sent = 0
        self._num_pauses = 0
        self._began_s = self._until_s = 0.0  # the pause
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a line may be sent now."""
        return self._num_sent < self._most and time.monotonic() >= self._until_s

    async def wait(self) -> None:
        """Wait until it is open; another line may be quicker then."""
        while not self.is_open:
            left_s = self._until_s - time.monotonic()
            self._changed.clear()
            await wait_until_set(self._changed, left_s if left_s > 0 else None)

    def send(self) -> float:
        """Note that a line is sent, and return the time for `leave`."""
        self._num_sent += 1
        return time.monotonic()

    def leave(self, sent_s: float, answer: InternalResponse | None, *, is_refused: bool) -> None:
        """Note what became of a line sent at `sent_s`; `answer` is None if it was cut off."""
        now_s = time.monotonic()
        if answer is not None and not is_refused:
            self._num_pauses = 0
            self._most += 1
        elif answer is not None and sent_s >= self._began_s:
            self._num_pauses += 1
            pause_s = min(2.0**self._num_pauses / 4, _MOST_PAUSE_S) * random.uniform(0.5, 1.0)
            self._began_s, self._until_s = now_s, now_s + pause_s
            self._most = max(1, self._num_sent // 2)
            message = "Batch %s pauses for %.1f s: its lines are refused with status %d (%s)."
            code = answer.error or "no reason"
            _logger.warning(message, self._batch, pause_s, answer.status, code)
        self._num_sent -= 1
        self._changed.set()


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


class BatchPace:
    """How far a running batch is. It belongs to the event loop."""

    def __init__(self, num_done: int, num_failed: int, total: int) -> None:
        """Begin with what an earlier process has done."""
        self.num_failed = num_failed
        self.num_done = num_done
        self.total = total
        self._began_s, self._num_before = time.monotonic(), num_done

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the pace of this process; None before a line has ended."""
        num_new = self.num_done - self._num_before
        if not num_new:
            return None
        return (time.monotonic() - self._began_s) / num_new * (self.total - self.num_done)


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what differs after each start of the machine."""
    return _BOOT_ID.read_text("ascii").strip()


def since_boot_s() -> float:
    """Return the seconds since the machine's start, those of its sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def anchored(batch: Batch) -> Batch:
    """Return a batch with its deadline in this machine's time."""
    left_s, boot = seconds_left(batch), boot_id()
    return replace(batch, boot=boot, deadline_s=since_boot_s() + left_s)


def seconds_left(batch: Batch) -> float:
    """Return the seconds until the rest of a batch is not run."""
    if batch.boot == boot_id():
        return batch.deadline_s - since_boot_s()
    window_s = batch.expires_at - batch.since["validating"]
    return min(window_s, batch.expires_at - time.time())
