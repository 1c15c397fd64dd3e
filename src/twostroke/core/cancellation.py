"""Ends work in a thread early when no client needs its result any more.

A thread cannot be stopped from outside. So the caller sets an event, and long loops in the work
call `check_wanted`, which raises in the thread after the event is set.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_thread = threading.local()


class AbandonedError(Exception):
    """The result is not wanted any more."""


@contextmanager
def abandoned_by(event: threading.Event) -> Iterator[None]:
    """Let `check_wanted` raise in this thread, during the block, once `event` is set."""
    _thread.event = event
    try:
        yield
    finally:
        _thread.event = None


def check_wanted() -> None:
    """Raise AbandonedError if the result of this thread's work is not wanted any more."""
    event = getattr(_thread, "event", None)
    if event is not None and event.is_set():
        raise AbandonedError


async def wait_until_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Return whether an event is set, now or within a time; None waits for ever.

    A task that is cancelled in the same instant is cancelled: on Python 3.11 `asyncio.wait_for`
    would return instead, as if nothing had been cancelled.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
