"""How many lines of a batch are sent at once, and when: fewer and later after refusals."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

from twostroke.core.cancellation import wait_until_set

if TYPE_CHECKING:
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
