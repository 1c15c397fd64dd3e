"""A server in a thread; if it does not stop, the error has the stack of every thread and task."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, Final

from twostroke.server.http.server import Server, bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from starlette.types import ASGIApp

    from twostroke.server.http.server import Application

_DEPTH: Final = 8  # the most frames of a stack that are shown


class ServerThread:
    """A server on a free loopback port, with an event loop in its own thread."""

    def __init__(self, app: ASGIApp, application: Application) -> None:
        """Start the server; return once it answers."""
        self._up = threading.Event()
        self._server = Server(app, application, self._up.set)
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.loop: asyncio.AbstractEventLoop | None = None
        # A daemon, so that one that hangs does not hang the process of the tests as well.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="server-of-a-test", daemon=True
        )
        self._thread.start()
        if not self._up.wait(30):
            raise AssertionError(f"The server does not start.\n{self._doings()}")

    def close(self, timeout_s: float = 15) -> None:
        """Stop the server; raise AssertionError if it still runs after `timeout_s`."""
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            reason = f"The server still runs {timeout_s} s after its stop."
            raise AssertionError(f"{reason}\n{self._doings()}")

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the server's event loop, and wait for its end."""

        async def run() -> None:
            function()

        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(run(), self.loop).result(15)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])

    def _doings(self) -> str:
        """Return the stacks of all threads, and of the tasks of the server's loop."""
        frames, text = sys._current_frames(), ""
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                stack = traceback.format_stack(frames.get(thread.ident or 0), limit=_DEPTH)
                text += f"\nThread {thread.name}:\n{''.join(stack)}"
        for task in asyncio.all_tasks(self.loop) if self.loop is not None else ():
            stack = traceback.StackSummary.extract(_awaiting(task.get_coro())).format()
            text += f"\nTask {task.get_name()}:\n{''.join(stack[-_DEPTH:])}"
        return text


def _awaiting(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a coroutine and of the coroutines that it awaits.

    `print_stack` shows only the first.
    """
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        coroutine = coroutine.cr_await
