"""Readers of requests' outputs: a blocking iterator and an asynchronous one."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import OverloadedError
from twostroke.core.request import FinishReason
from twostroke.engine.output import Completion, Mailbox, Output, deliver, join

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from twostroke.engine.loop import EngineLoop
    from twostroke.engine.request_listener import RequestListener

# Requests of one call that are in the engine at once: enough to fill steps, few enough to leave
# room in the queue to other callers.
_MAX_OPEN_REQUESTS: Final = 256
_RETRY_INTERVAL_S: Final = 0.02


class Outputs:
    """The requests of one call to the engine, and which of their outputs were read.

    `Generation` reads the outputs in a blocking way, `AsyncGeneration` in an event loop.
    """

    def __init__(self, loop: EngineLoop, mailbox: Mailbox) -> None:
        """Start without requests, which will be submitted to `loop`.

        `mailbox` delivers the requests' outputs to the reader.
        """
        self.mailbox = mailbox
        self.request_ids: list[str] = []
        self._loop = loop
        self._num_ended = 0
        self._waiting: deque[RequestListener] = deque()  # not submitted yet

    def submit(self, listeners: Sequence[RequestListener]) -> None:
        """Submit all requests of the call to the engine loop, or none after an error.

        Raises:
            ContextLengthError: a request is longer than the context or the KV cache.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        self.request_ids += [listener.request.id for listener in listeners]
        self._submit(listeners)

    def submit_gradually(self, listeners: Iterable[RequestListener]) -> None:
        """Submit the requests of a large call as the engine's queue has room.

        The requests for which there is no room yet are submitted while outputs are read.

        Raises:
            OverloadedError: the queue has no room for the first request.
            EngineStoppedError: the engine no longer runs.
        """
        self._waiting.extend(listeners)
        self.submit_waiting()

    @property
    def num_open(self) -> int:
        """The number of submitted requests whose last output has not been read."""
        return len(self.request_ids) - self._num_ended

    @property
    def is_open(self) -> bool:
        """Whether a reader must continue, because some requests of the call have unread outputs."""
        return bool(self.num_open or self._waiting)

    def cancel(self) -> None:
        """Cancel all unfinished requests of the call.

        Their last outputs have the finish reason `CANCEL`.
        """
        self._loop.cancel(self.request_ids)
        waiting, self._waiting = self._waiting, deque()
        self.request_ids += [listener.request.id for listener in waiting]
        deliver([(listener.mailbox, listener.cut(FinishReason.CANCEL)) for listener in waiting])

    def count_output(self, output: Output) -> None:
        """Record that `output` was read; the last output of a request ends the request."""
        self._num_ended += output.finish_reason is not None

    @property
    def has_waiting(self) -> bool:
        """Whether some requests of the call are not submitted to the engine yet."""
        return bool(self._waiting)

    def submit_waiting(self) -> None:
        """Submit requests of the call that wait for room in the engine's queue, while it has room.

        Raises:
            OverloadedError: the queue is full, and no request of the call was submitted before.
        """
        try:
            while self._waiting and self.num_open < _MAX_OPEN_REQUESTS:
                self._submit_first()
        except OverloadedError:
            if not self.request_ids:
                raise
        self._loop.flush()  # no policy needs to wait for more requests to fill a batch

    def _submit_first(self) -> None:
        """Submit the first of the call's requests that wait for room in the engine's queue."""
        # Counted as open first: the engine may end the request within `submit`.
        self.request_ids.append(self._waiting[0].request.id)
        listener = self._waiting.popleft()
        try:
            self._submit([listener])
        except BaseException:  # also after Ctrl-C: the request is still to be submitted
            self._waiting.appendleft(listener)
            self.request_ids.pop()
            raise

    def _submit(self, listeners: Sequence[RequestListener]) -> None:
        self._loop.submit(listeners)

    def _received(self, output: Output) -> Output:
        self.count_output(output)
        if output.error is not None:
            raise output.error
        if self._waiting:
            self.submit_waiting()
        return output


class Generation(Outputs):
    """Outputs of the requests of one call as a blocking iterator."""

    def __init__(self, loop: EngineLoop) -> None:
        """Read the outputs of requests that are submitted to the engine loop `loop`."""
        self._queue: queue.SimpleQueue[Output] = queue.SimpleQueue()
        super().__init__(loop, Mailbox(self._queue.put))

    def __iter__(self) -> Iterator[Output]:
        """Yield the outputs of the call's requests; a reader that stops early cancels them."""
        try:
            yield from self.outputs()
        finally:
            self.cancel()

    def outputs(self) -> Iterator[Output]:
        """Yield the outputs of the call's requests as they arrive, until every request has ended.

        A reader may stop and call this again later.

        Raises:
            RequestError: the request's constraint leaves no token to sample.
            TwostrokeError: the engine failed on a request.
        """
        while self.is_open:
            if self.num_open:
                yield self._received(self._queue.get())
            else:
                time.sleep(_RETRY_INTERVAL_S)  # other callers fill the queue
                self.submit_waiting()

    def wait(self) -> list[Completion]:
        """Read all outputs; return the complete answers, sorted by index."""
        return _join_all(list(self), len(self.request_ids))


class AsyncGeneration(Outputs):
    """Outputs of the requests of one call as an asynchronous iterator."""

    def __init__(self, loop: EngineLoop) -> None:
        """Read the outputs of requests to the engine loop `loop`, in the running event loop."""
        from asyncio import Queue, get_running_loop  # blocking callers need no asyncio

        self._queue: asyncio.Queue[Output] = Queue()
        self._deliver: Callable[[Output], None] = self._queue.put_nowait
        schedule = get_running_loop().call_soon_threadsafe
        super().__init__(loop, Mailbox(self._pass_on, schedule))

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the outputs of the call's requests as they arrive, until every request has ended.

        A reader that stops early calls `cancel`, or iterates again later.

        Raises:
            RequestError: the request's constraint leaves no token to sample.
            TwostrokeError: the engine failed on a request.
        """
        while self.is_open:
            if self.num_open:
                yield self._received(await self._queue.get())
            else:
                from asyncio import sleep

                await sleep(_RETRY_INTERVAL_S)  # other callers fill the queue
                self.submit_waiting()

    def redirect(self, deliver: Callable[[Output], None]) -> None:
        """Pass all outputs to `deliver` instead of the iterator, also outputs that have arrived.

        An output with an error is passed on as it is.
        """
        while not self._queue.empty():
            deliver(self._queue.get_nowait())
        self._deliver = deliver

    def _pass_on(self, output: Output) -> None:
        self._deliver(output)

    async def wait(self) -> list[Completion]:
        """Read all outputs; return the complete answers, sorted by index."""
        return _join_all([output async for output in self], len(self.request_ids))

    @property
    def num_unread(self) -> int:
        """The number of outputs that have arrived and were not read yet."""
        return self._queue.qsize()


def _join_all(outputs: list[Output], count: int) -> list[Completion]:
    return [join([output for output in outputs if output.index == index]) for index in range(count)]
