"""Waits for events with a time limit, which never lose a cancellation."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def wait_until_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Return whether an event is set, now or within a time; None waits for ever.

    A task that is cancelled in the same instant is cancelled: on Python 3.11 `asyncio.wait_for`
    would return instead, as if nothing had been cancelled.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
