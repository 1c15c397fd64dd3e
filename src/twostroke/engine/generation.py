"""The outputs of requests, read blocking or in an event loop."""

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
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from twostroke.engine.loop import EngineLoop
    from twostroke.engine.request_listener import RequestListener

_MAX_OPEN: Final = 256  # submitted gradually: they fill steps, and leave room to other callers
_RETRY_S: Final = 0.02


class Outputs:
    """The outputs of some requests: what blocking and asynchronous readers have in common."""

    def __init__(self, loop: EngineLoop, mailbox: Mailbox) -> None:
        """Have no request yet."""
        self.mailbox = mailbox
        self.request_ids: list[str] = []
        self._loop = loop
        self._num_ended = 0
        self._waiting: deque[RequestListener] = deque()  # not submitted yet

    def submit(self, listeners: Sequence[RequestListener]) -> None:
        """Submit requests, all or none; raises as `EngineLoop.submit`."""
        self.request_ids += [listener.request.id for listener in listeners]
        self._submit(listeners)

    def submit_gradually(self, listeners: Iterable[RequestListener]) -> None:
        """Submit requests as the queue has room, the others while outputs are read.

        Raises:
            OverloadedError: the queue has no room for the first one.
            EngineStoppedError: the engine no longer runs.
        """
        self._waiting.extend(listeners)
        self.submit_waiting()

    @property
    def num_open(self) -> int:
        """How many submitted requests have not had their last output."""
        return len(self.request_ids) - self._num_ended

    @property
    def is_open(self) -> bool:
        """Whether more outputs will come."""
        return bool(self.num_open or self._waiting)

    def cancel(self) -> None:
        """Stop all requests that still run; their last outputs say so."""
        self._loop.cancel(self.request_ids)
        waiting, self._waiting = self._waiting, deque()
        self.request_ids += [listener.request.id for listener in waiting]
        deliver([(one.mailbox, one.cut(FinishReason.CANCEL)) for one in waiting])

    def note(self, output: Output) -> None:
        """Take in that an output has come."""
        self._num_ended += output.finish_reason is not None

    @property
    def has_waiting(self) -> bool:
        """Whether some requests are not submitted yet."""
        return bool(self._waiting)

    def submit_waiting(self) -> None:
        """Submit those for which the queue has room; OverloadedError if it has for none so far."""
        try:
            while self._waiting and self.num_open < _MAX_OPEN:
                self._submit_first()
        except OverloadedError:
            if not self.request_ids:
                raise
        self._loop.flush()  # no more come now, so no policy needs to wait for them

    def _submit_first(self) -> None:
        """Submit the first that waits; it counts as open before the engine may end it."""
        self.request_ids.append(self._waiting[0].request.id)
        listener = self._waiting.popleft()
        try:
            self._submit([listener])
        except BaseException:
            self._waiting.appendleft(listener)
            self.request_ids.pop()
            raise

    def _submit(self, listeners: Sequence[RequestListener]) -> None:
        self._loop.submit(listeners)

    def _received(self, output: Output) -> Output:
        self.note(output)
        if output.error is not None:
            raise output.error
        if self._waiting:
            self.submit_waiting()
        return output


class Generation(Outputs):
    """The outputs of requests as a blocking iterator."""

    def __init__(self, loop: EngineLoop) -> None:
        """Wait for outputs of `loop`."""
        self._queue: queue.SimpleQueue[Output] = queue.SimpleQueue()
        super().__init__(loop, Mailbox(self._queue.put))

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs as `outputs` does; leaving early cancels the requests."""
        try:
            yield from self.outputs()
        finally:
            self.cancel()

    def outputs(self) -> Iterator[Output]:
        """Yield outputs as they come, until every request has had its last.

        A reader may leave and continue later.

        Raises:
            RequestError: a constraint could not be followed further.
            TwostrokeError: the engine failed on a request.
        """
        while self.is_open:
            if self.num_open:
                yield self._received(self._queue.get())
            else:
                time.sleep(_RETRY_S)  # others fill the queue
                self.submit_waiting()

    def wait(self) -> list[Completion]:
        """Return the whole answers, in the order of their index."""
        return _join_all(list(self), len(self.request_ids))


class AsyncGeneration(Outputs):
    """The outputs of requests as an asynchronous iterator."""

    def __init__(self, loop: EngineLoop) -> None:
        """Wait in the running event loop for outputs of `loop`."""
        from asyncio import Queue, get_running_loop  # blocking callers need no asyncio

        self._queue: asyncio.Queue[Output] = Queue()
        carry = get_running_loop().call_soon_threadsafe
        super().__init__(loop, Mailbox(self._queue.put_nowait, carry))

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as they come, until every request has had its last.

        A reader that leaves early calls `cancel`, or continues later.

        Raises:
            RequestError: a constraint could not be followed further.
            TwostrokeError: the engine failed on a request.
        """
        while self.is_open:
            if self.num_open:
                yield self._received(await self._queue.get())
            else:
                from asyncio import sleep

                await sleep(_RETRY_S)  # others fill the queue
                self.submit_waiting()

    async def wait(self) -> list[Completion]:
        """Return the whole answers, in the order of their index."""
        return _join_all([output async for output in self], len(self.request_ids))

    @property
    def num_unread(self) -> int:
        """How many outputs have come and were not read yet."""
        return self._queue.qsize()


def _join_all(outputs: list[Output], count: int) -> list[Completion]:
    return [join([o for o in outputs if o.index == index]) for index in range(count)]
