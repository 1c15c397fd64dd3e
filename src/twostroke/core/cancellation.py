"""Cancels work in threads, and waits for events without losing a cancellation.

Python cannot stop a thread from outside. So the caller sets an event when no client needs the
result any more, and long loops in the thread call `check_not_cancelled`, which then raises:

    with cancellable(event):
        for line in lines:
            check_not_cancelled()
            ...
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

_thread = threading.local()


class WorkCancelledError(Exception):
    """Raised by `check_not_cancelled` in a thread whose work was cancelled."""


@contextmanager
def cancellable(event: threading.Event) -> Iterator[None]:
    """Let another thread cancel the work of this block by setting `event`.

    Once the event is set, the next `check_not_cancelled` of this thread raises WorkCancelledError.
    The server wraps work of a request that runs in a thread, such as tokenizing a long prompt, in
    this block.
    """
    _thread.event = event
    try:
        yield
    finally:
        _thread.event = None


def check_not_cancelled() -> None:
    """Raise WorkCancelledError if this thread's work was cancelled (see `cancellable`).

    Long loops call this function regularly, because Python cannot stop a thread from outside.
    Outside of a `cancellable` block it does nothing.
    """
    event = getattr(_thread, "event", None)
    if event is not None and event.is_set():
        raise WorkCancelledError


async def wait_until_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until an event is set, at most `timeout_s` seconds; return whether it is set.

    With None for `timeout_s` the wait has no limit. If the task is cancelled at the moment when the
    event is set, `asyncio.CancelledError` is raised. (In Python 3.11, `asyncio.wait_for` would lose
    the cancellation and return.)
    """
    import asyncio  # slow: programs without an event loop do not need it

    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
