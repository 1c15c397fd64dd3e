"""Sends the requests of a run at their times (open loop), or from clients that wait (closed loop).

The schedule of an open loop is fixed before the run. The latency of each request counts from its
scheduled time, so that a late client cannot hide the time that a request waited.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.lab.bench.answers import ReceivedAnswer
from twostroke.lab.bench.endpoint import ExchangeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.endpoint import EndpointClient
    from twostroke.lab.bench.request_form import PlannedRequest, RequestForm
    from twostroke.lab.bench.requests_to_send import RequestSource

    # Sends a request that was due at a time of the run's clock, and returns its answer.
    Send = Callable[[PlannedRequest, float], Awaitable[MeasuredAnswer]]

_LEAD_S: Final = 0.05  # before the first request of an open loop
_PAUSE_AFTER_FAILURE_S: Final = 0.1  # of a client of a closed loop
_KEPT_TEXTS: Final = 20  # answers whose text is kept, if not all are


class RunClock:
    """The clock of a run: seconds since its start."""

    def __init__(self) -> None:
        """Create a clock that starts now."""
        self._start_s = time.monotonic()

    def start(self) -> None:
        """Set the clock to 0."""
        self._start_s = self._loop_s()

    def now_s(self) -> float:
        """Return the seconds since the start; negative before."""
        return self._loop_s() - self._start_s

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()


class AnswerSender:
    """Sends requests to an endpoint, and returns their measured answers."""

    def __init__(
        self, client: EndpointClient, form: RequestForm, *, keeps_texts: bool = False
    ) -> None:
        """Send requests of a form over a client's connections.

        Without `keeps_texts`, only some answers keep their text.
        """
        self._client = client
        self._keeps_texts = keeps_texts
        self._path = form.path

    async def send(self, planned: PlannedRequest, scheduled_s: float) -> MeasuredAnswer:
        """Send a request that was due at `scheduled_s`; a failure becomes part of the answer."""
        keeps_text = self._keeps_texts or planned.number < _KEPT_TEXTS
        stream = ReceivedAnswer(keeps_text=keeps_text, keeps_reply=planned.turn > 0)
        sent_s = self._client.now_s()
        failure = ""
        try:
            await self._client.post(self._path, planned.body, stream)
        except ExchangeError as error:
            failure = error.kind
        return stream.measured(planned, scheduled_s=scheduled_s, sent_s=sent_s, failure=failure)


class RunLimits(Frozen):
    """The limits of a run: its duration, and the number of its clients.

    Attributes:
        num_clients: clients of a closed loop; None for an open loop.
        duration_s: no request is sent later; None for no limit.
    """

    num_clients: int | None = None
    duration_s: float | None = None


class LoadRunner:
    """Runs a load, and collects the answers.

    Attributes:
        answers: the measured answers so far, in the order in which they ended.
        num_sent: requests sent so far.
        is_stopped: whether `stop` ended the run early.
        is_hopeless: whether the reason was that the objectives could no longer be met.
    """

    def __init__(
        self, send: Send, source: RequestSource, clock: RunClock, limits: RunLimits
    ) -> None:
        """Prepare a run of the requests of `source`."""
        self._send = send
        self._source = source
        self._clock = clock
        self._limits = limits
        self._next_number = 0
        self._tasks: set[asyncio.Task[MeasuredAnswer]] = set()
        self._conversations: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self.answers: list[MeasuredAnswer] = []
        self.num_sent = 0
        self.is_stopped = False
        self.is_hopeless = False

    async def run(self) -> None:
        """Run the load until all answers have come, or `stop` is called."""
        is_open = self._limits.num_clients is None
        self._main = asyncio.create_task(self._run_open() if is_open else self._run_closed())
        try:
            await self._main
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            if not self.is_stopped:
                raise
        finally:
            for task in (*self._tasks, *self._conversations):
                task.cancel()
            await asyncio.gather(*self._tasks, *self._conversations, return_exceptions=True)

    def stop(self, *, is_hopeless: bool = False) -> None:
        """End the run now; requests in progress are cancelled, and their answers are not counted.

        `is_hopeless`: the reason is that too few requests can still meet the objectives.
        """
        self.is_hopeless = is_hopeless and not self.is_stopped
        self.is_stopped = True
        if self._main is not None:
            self._main.cancel()

    async def _run_open(self) -> None:
        count, end_s = self._source.count, self._end_s
        planned = self._source.request(0)
        self._clock.start()
        for number in range(count):
            due_s = self._source.at_s(number) + _LEAD_S
            if due_s - _LEAD_S > end_s:
                break
            # A wait of 0 lets the event loop send the last request if the client is late.
            await asyncio.sleep(max(0.0, due_s - self._clock.now_s()))
            task = self._start(planned, due_s)
            if planned.turn:
                conversation = asyncio.create_task(self._continue(planned, task))
                self._conversations.add(conversation)
                conversation.add_done_callback(self._conversations.discard)
            if number + 1 < count:
                await asyncio.sleep(0)  # the request is sent before the next is written
                planned = self._source.request(number + 1)
        while self._tasks or self._conversations:
            await asyncio.wait({*self._tasks, *self._conversations})

    async def _continue(self, planned: PlannedRequest, task: asyncio.Task[MeasuredAnswer]) -> None:
        """Send the further requests of a conversation, each some time after the last answer."""
        following = self._source.following(planned, await task)
        while following is not None:
            due_s = task.result().ended_s + following.pause_s
            if due_s > self._end_s:
                return
            await asyncio.sleep(max(0.0, due_s - self._clock.now_s()))
            task = self._start(following, due_s)
            following = self._source.following(following, await task)

    async def _run_closed(self) -> None:
        num_clients = min(self._limits.num_clients or 1, self._source.count)
        first_requests = [self._take() for _ in range(num_clients)]
        self._clock.start()
        async with asyncio.TaskGroup() as group:
            for planned in first_requests:
                if planned is not None:
                    group.create_task(self._run_client(planned))

    async def _run_client(self, first_request: PlannedRequest) -> None:
        planned: PlannedRequest | None = first_request
        free_s = self._clock.now_s()
        while planned is not None and free_s <= self._end_s:
            task = self._start(planned, free_s)
            if planned.turn:  # the next request depends on the answer
                following = self._source.following(planned, await task)
                planned = following or self._take()
            else:
                await asyncio.sleep(0)  # the request is sent before the next is written
                planned = self._take()
            answer = await task
            if not answer.is_completed:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                free_s = self._clock.now_s()
            elif planned is not None:
                free_s = answer.ended_s + planned.pause_s
                await asyncio.sleep(max(0.0, free_s - self._clock.now_s()))

    @property
    def _end_s(self) -> float:
        duration_s = self._limits.duration_s
        return math.inf if duration_s is None else duration_s

    def _take(self) -> PlannedRequest | None:
        """Return the next request of the load; None if there is none."""
        number = self._next_number
        if number >= self._source.count:
            return None
        self._next_number += 1
        return self._source.request(number)

    def _start(self, planned: PlannedRequest, due_s: float) -> asyncio.Task[MeasuredAnswer]:
        self.num_sent += 1
        task = asyncio.ensure_future(self._send(planned, due_s))
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[MeasuredAnswer]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        self._error = self._error or task.exception()
        if self._error is None:
            self.answers.append(task.result())
        elif self._main is not None:
            self._main.cancel()
