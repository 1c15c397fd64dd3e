"""When a batch's requests are sent: how many at once, how fast, and until which deadline."""

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

    from twostroke.server.batch.stored_batches import Batch
    from twostroke.server.http.internal_requests import InternalResponse

_MAX_PAUSE_S: Final = 30.0
_logger = logging.getLogger("twostroke.serve")


class AdaptiveLimit:
    """Limits how many requests of one batch run at the same time; a busy server lowers the limit.

    A request that is refused because the server is busy lowers the limit to half of the batch's
    running requests, and starts a pause of the batch, which is logged. Refusals of requests that
    were sent before the pause start no further pause. Each answer raises the limit by one. Call the
    methods only in the event loop's thread.
    """

    def __init__(self, batch: str) -> None:
        """Start without a limit; `batch` is the batch's id, for the log."""
        self._batch = batch
        self._max_requests: float = float("inf")
        self._num_sent = 0
        self._num_pauses = 0
        self._pause_start_s = self._pause_end_s = 0.0
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the batch may send a request now: it does not pause, and is below its limit."""
        return self._num_sent < self._max_requests and time.monotonic() >= self._pause_end_s

    async def wait(self) -> None:
        """Wait until the batch may send a request.

        Another request of the batch may be sent first, so the caller checks `is_open` again.
        """
        while not self.is_open:
            left_s = self._pause_end_s - time.monotonic()
            self._changed.clear()
            await wait_until_set(self._changed, left_s if left_s > 0 else None)

    def send(self) -> float:
        """Count a request that is being sent; return the current time, to pass to `leave`."""
        self._num_sent += 1
        return time.monotonic()

    def leave(self, sent_s: float, answer: InternalResponse | None, *, is_refused: bool) -> None:
        """Adapt the limit when a request of the batch has ended.

        Args:
            sent_s: the result of `send` for this request.
            answer: the response; None if the request was cut off.
            is_refused: whether the server refused the request because it is busy.
        """
        now_s = time.monotonic()
        if answer is not None and not is_refused:
            self._num_pauses = 0
            self._max_requests += 1
        elif answer is not None and sent_s >= self._pause_start_s:
            self._num_pauses += 1
            pause_s = min(2.0**self._num_pauses / 4, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
            self._pause_start_s = now_s
            self._pause_end_s = now_s + pause_s
            self._max_requests = max(1, self._num_sent // 2)
            _logger.warning(
                "Batch %s pauses for %.1f s: its lines are refused with status %d (%s).",
                self._batch,
                pause_s,
                answer.status,
                answer.error or "no reason",
            )
        self._num_sent -= 1
        self._changed.set()


_POLL_S: Final = 0.05  # how often to check whether interactive requests leave room


class BatchSlots:
    """Limits how many requests of all batches together are in the engine at the same time.

    Tenants take turns. Call the methods only in the event loop's thread.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        """Allow as many requests at a time as `size` returns, which may change."""
        self._size = size
        self._num_requests = 0
        self._slot_freed = asyncio.Event()
        self._queue = FairQueue()  # tenants take turns

    async def enter(self, tenant: str) -> None:
        """Wait for a slot in which a tenant's batch request may be in the engine, and take it."""
        slot = await self._queue.take(tenant)
        try:
            while self._num_requests >= self._size():
                self._slot_freed.clear()
                await wait_until_set(self._slot_freed, _POLL_S)
            self._num_requests += 1
        finally:
            self._queue.end(slot)

    def leave(self) -> None:
        """Free the slot of a batch request that has left the engine."""
        self._num_requests -= 1
        self._slot_freed.set()


class BatchPace:
    """The progress and speed of a running batch, which the API reports.

    Use it only in the event loop's thread.
    """

    def __init__(self, num_done: int, num_failed: int, total: int) -> None:
        """Start with the results that earlier server processes have stored.

        Args:
            num_done: the number of requests that have a result.
            num_failed: the number of these results that are failures.
            total: the number of all requests of the batch.
        """
        self.num_failed = num_failed
        self.num_done = num_done
        self.total = total
        self._start_s = time.monotonic()
        self._num_done_before = num_done

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds to the batch's end; None while this process has no result."""
        num_new = self.num_done - self._num_done_before
        if not num_new:
            return None
        return (time.monotonic() - self._start_s) / num_new * (self.total - self.num_done)


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of the machine's current boot, which the Linux kernel chooses."""
    return _BOOT_ID.read_text("ascii").strip()


def since_boot_s() -> float:
    """Return the seconds since the machine was booted, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def with_boot_deadline(batch: Batch) -> Batch:
    """Return a copy of a batch that has its deadline also in seconds since the current boot.

    This deadline is used until the next boot, because the clock that counts seconds since the boot
    cannot be set by hand. After a reboot the deadline in wall-clock time is used, since only the
    wall clock has counted the time in which the machine was off.
    """
    left_s = seconds_left(batch)
    return replace(batch, boot=boot_id(), deadline_s=since_boot_s() + left_s)


def seconds_left(batch: Batch) -> float:
    """Return the seconds until a batch's deadline, at most its whole completion window.

    Requests that have not run by then expire.
    """
    if batch.boot == boot_id():
        return batch.deadline_s - since_boot_s()
    window_s = batch.expires_at - batch.since["validating"]
    return min(window_s, batch.expires_at - time.time())
