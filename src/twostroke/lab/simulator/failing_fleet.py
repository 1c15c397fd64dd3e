"""Simulated replicas that fail and come back, before a router that retries and continues requests.

The rules are the router's (`fleet/router/forward.py`, `attempts.py`) and the server's
(`engine/process/pending.py`): a request that is lost before its first token is sent again, a stream
continues at another replica after the tokens that its client has, a request for which no replica is
ready waits, and requests in the queue of a server wait there for its next engine.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Final, cast

from twostroke.core.errors import ContextLengthError, OverloadedError
from twostroke.core.frozen import Frozen
from twostroke.core.request import Request
from twostroke.engine.output import Timings
from twostroke.fleet.router.engine_killers import MAX_LOST_ATTEMPTS
from twostroke.lab.measure.requests import COMPLETED, FAILED, REFUSED, RequestLog
from twostroke.lab.simulator.failures import ENGINE, RouterTimes, check_failures
from twostroke.lab.simulator.fleet import START_S, FleetEvent, SimulatedFleet, make_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.lab.simulator.failures import Failure
    from twostroke.lab.simulator.load import Workload
    from twostroke.lab.simulator.replica import Clock, SimulatedReplica

# Why a request was not answered to its end.
NO_REPLICA: Final = "no replica"  # it waited for `wait_s`, and got 503
LOST_STREAM: Final = "lost stream"  # no replica continued the stream within `resume_wait_s`
TOO_MANY_LOSSES: Final = "too many losses"  # each replica that computed it failed
QUEUE_FULL: Final = "queue full"  # of all replicas: 429
NOT_VALID: Final = "not valid"  # too long for the model: 400, whatever fails

_CHECK_INTERVAL_S: Final = 0.5  # between health checks of a replica, as of the router


class Pause(Frozen):
    """A pause in a stream that was lost and continued.

    `request` is the request's number, and `seconds` the time between the last token before the loss
    and the next token.
    """

    request: int
    seconds: float


class FailingFleet(SimulatedFleet):
    """Simulated replicas of one model that fail at given times, and the router before them.

    Attributes:
        causes: why requests were not answered to their end, by number of the request.
        pauses: the pauses of streams that were continued.
        num_failures: failures that happened, while the replica was up.
    """

    def __init__(
        self,
        new_replica: Callable[[], SimulatedReplica],
        num_replicas: int,
        routing: str,
        *,
        clock: Clock,
        vocab_size: int,
        times: RouterTimes,
        overhead_s: float = 0.0,
    ) -> None:
        """Route requests to replicas that `new_replica` builds, also after each failure.

        The other arguments are as for `SimulatedFleet`.
        """
        replicas = [new_replica() for _ in range(num_replicas)]
        super().__init__(
            replicas, routing, clock=clock, vocab_size=vocab_size, overhead_s=overhead_s
        )
        self.causes: dict[int, str] = {}
        self.pauses: list[Pause] = []
        self.num_failures = 0
        self._new_replica = new_replica
        self._times = times
        self._servers = [_Server() for _ in replicas]
        self._replicas: list[SimulatedReplica] = replicas
        self._calls: dict[int, _Call] = {}  # that have not ended
        self._waiting: dict[int, _Call] = {}  # for a ready replica
        self._actions: list[Callable[[], int]] = []

    def run(self, load: Workload, failures: Sequence[Failure] = ()) -> None:
        """Serve all requests of a workload on the simulated replicas, while these fail."""
        check_failures(failures, len(self._replicas))
        for failure in failures:
            self._at(START_S + failure.at_s, _bound(self._fail, failure))
        super().run(load)

    def _handle(self, event: FleetEvent, key: int) -> int:
        if event is FleetEvent.ACTION:
            return self._actions[key]()
        return super()._handle(event, key)

    def _at(self, at_s: float, action: Callable[[], int]) -> None:
        """Call `action` at a virtual time; it returns the index of a replica that it changes."""
        self._actions.append(action)
        self._push(at_s, FleetEvent.ACTION, len(self._actions) - 1)

    # Requests at the router.

    def _arrive(self, number: int) -> int:
        """Route a request that has arrived; return the index of its replica, if it has one."""
        arrival = self._load.arrivals[number]
        call = _Call(number, make_request(number, arrival, self._vocab_size))
        self._calls[number] = call
        return self._send(call)

    def _send(self, call: _Call) -> int:
        """Send a request to a ready replica; let it wait if there is none. Returns the index."""
        while True:
            index = self._choose(call.request, call.failed)
            if index is None:
                break
            if self._submit(call, index):
                return index
        if call.number not in self._calls:  # it was refused
            return 0
        if call.is_refused:
            self._end(call, QUEUE_FULL)
        else:
            self._wait(call)
        return 0

    def _submit(self, call: _Call, index: int) -> bool:
        """Queue a request in the engine of a replica; return False if the replica refuses it."""
        server = self._servers[index]
        server.calls[call.number] = call
        if server.is_down:  # its server keeps the request, or nothing answers
            call.is_submitted = False
            return True
        call.num_sent_tokens = len(call.request.tokens)
        try:
            self._replicas[index].submit(call.request)
        except (ContextLengthError, OverloadedError) as error:
            self._router.end(call.request)
            del server.calls[call.number]
            call.failed.add(index)
            call.is_refused = isinstance(error, OverloadedError)
            if not call.is_refused:
                self._end(call, NOT_VALID)
                call.failed.update(range(len(self._servers)))
            return False
        call.is_submitted = True
        return True

    def _lose(self, call: _Call, index: int) -> None:
        """Let another replica answer or continue a request that its replica has lost."""
        self._router.end(call.request)
        call.take_tokens(self._replicas[index].last_end_s)
        call.failed.add(index)
        call.num_losses += 1
        call.give_up_s = 0.0  # the replica may need time to restart
        call.is_refused = False
        if call.num_losses >= MAX_LOST_ATTEMPTS:
            self._end(call, TOO_MANY_LOSSES)
        elif call.has_begun and not self._times.resume_wait_s:
            self._end(call, LOST_STREAM)
        else:
            call.renew_request(is_admitted=call.has_begun)
            self._at(self._clock.now_s + self._overhead_s, _bound(self._send, call))

    def _wait(self, call: _Call) -> None:
        """Let a request wait until a health check finds a replica ready, or until it gives up."""
        now_s, times = self._clock.now_s, self._times
        if not call.give_up_s:
            call.give_up_s = now_s + (times.resume_wait_s if call.has_begun else times.wait_s)
        if call.give_up_s <= now_s:
            self._give_up(call)
            return
        self._waiting[call.number] = call
        self._at(call.give_up_s, _bound(self._give_up_if_waiting, call, call.give_up_s))
        checks_s = [server.next_check_s(now_s) for server in self._servers if server.is_open]
        if checks_s:  # replicas that have failed the request are ready again
            self._at(min(checks_s), self._wake_waiting)

    def _give_up_if_waiting(self, call: _Call, give_up_s: float) -> int:
        if self._waiting.get(call.number) is call and call.give_up_s == give_up_s:
            self._give_up(call)
        return 0

    def _give_up(self, call: _Call) -> None:
        self._waiting.pop(call.number, None)
        self._end(call, LOST_STREAM if call.has_begun else NO_REPLICA)

    def _wake_waiting(self) -> int:
        """Send the requests that wait for a replica, since a health check found one ready."""
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call.failed.clear()
            self._changed_replicas.add(self._send(call))
        return 0

    def _finish_step(self, index: int) -> None:
        """Record the results of a simulated step: first tokens, pauses, and ends of requests."""
        now_s = self._clock.now_s
        started, finished = self._replicas[index].finish()
        for request in started:
            self._router.begin(request)
            call = self._calls[int(request.id)]
            if call.has_begun:
                self.pauses.append(Pause(call.number, now_s - call.last_token_s))
            else:
                call.first_token_s, call.started_s = now_s, request.started_s
                call.num_cached = request.num_cached
        for request in finished:
            self._router.end(request)
            call = self._servers[index].calls.pop(int(request.id))
            call.last_token_s = now_s
            self._end(call, "")

    def _end(self, call: _Call, cause: str) -> None:
        """Record the end of a request; `cause` says why it was not answered, if it was not."""
        number = call.number
        assert number not in self.logs, "a request ends once"
        del self._calls[number]
        outcome = COMPLETED
        if cause:
            self.causes[number] = cause
            outcome = FAILED if call.has_begun or cause == TOO_MANY_LOSSES else REFUSED
        arrival = self._load.arrivals[number]
        sent_s = START_S + arrival.at_s
        self.logs[number] = RequestLog(
            Timings(sent_s, call.started_s, call.first_token_s, call.last_token_s),
            sent_s,
            num_prompt=arrival.num_prompt,
            num_output=call.request.num_output if cause else arrival.num_output,
            num_cached=call.num_cached,
            outcome=outcome,
        )

    # Failures of replicas.

    def _fail(self, failure: Failure) -> int:
        """Begin a failure, unless the replica is down or has received a notice."""
        index, server, now_s = failure.replica, self._servers[failure.replica], self._clock.now_s
        if server.is_failing:
            return index
        self.num_failures += 1
        server.is_failing = True
        if failure.notice_s:  # it drains: it gets no more requests, and running requests continue
            server.is_open = False
            self._router.set_open(index, is_open=False)
            self._at(now_s + failure.notice_s, _bound(self._end_process, failure))
            return index
        return self._end_process(failure)

    def _end_process(self, failure: Failure) -> int:
        """End the engine or the machine of a replica, and start its successor."""
        index, now_s = failure.replica, self._clock.now_s
        server, replica = self._servers[index], self._replicas[index]
        self._interrupt(index, catch_up=True)
        server.is_down = True
        if failure.kind == ENGINE:
            running = [call for call in server.calls.values() if call.is_started]
            # The server reports the running requests, and the router checks its health at once.
            for call in running:
                del server.calls[call.number]
                self._lose(call, index)
            if running:
                self._close(index, now_s)
            else:
                self._at(server.next_check_s(now_s), _bound(self._close_if_down, failure))
        elif failure.notice_s or not self._times.detection_s:
            self._notice_loss(index)
        else:
            # A successor that answers before resets the old connections.
            detection_s = min(self._times.detection_s, failure.down_s)
            self._at(now_s + detection_s, _bound(self._notice_loss, index))
        for call in server.calls.values():
            call.take_tokens(replica.last_end_s)
            if failure.kind == ENGINE:  # queued requests wait for the next engine
                call.renew_request(is_admitted=call.is_submitted)
                call.is_submitted = False
        self._at(now_s + failure.down_s, _bound(self._restart, failure))
        self._replicas[index] = self._new_replica()
        return index

    def _notice_loss(self, index: int) -> int:
        """Let the router notice that a machine is gone, with all requests that were sent there."""
        server = self._servers[index]
        calls, server.calls = server.calls, {}
        for call in calls.values():
            self._lose(call, index)
        self._close(index, self._clock.now_s)
        return index

    def _close_if_down(self, failure: Failure) -> int:
        server = self._servers[failure.replica]
        if server.is_down:
            self._close(failure.replica, self._clock.now_s)
        return failure.replica

    def _close(self, index: int, checked_s: float) -> None:
        """Send no more requests to a replica, whose health was checked at `checked_s`."""
        server = self._servers[index]
        server.checked_s = checked_s
        server.is_open = False
        self._router.set_open(index, is_open=False)

    def _restart(self, failure: Failure) -> int:
        """Let the successor of an engine or a machine answer requests."""
        index = failure.replica
        server = self._servers[index]
        server.is_down = server.is_failing = False
        waiting, server.calls = server.calls, {}
        for call in waiting.values():
            if not self._submit(call, index):
                self._changed_replicas.add(self._send(call))
        self._at(server.next_check_s(self._clock.now_s), _bound(self._open, index))
        return index

    def _open(self, index: int) -> int:
        """Let a health check find a replica ready, unless it has failed again."""
        server = self._servers[index]
        if not server.is_failing:
            server.is_open = True
            self._router.set_open(index, is_open=True)
            self._wake_waiting()
        return index


class _Server:
    """A server as the router sees it.

    Attributes:
        calls: the requests that the router has sent to it and that have not ended, by number.
        is_open: whether the router sends it requests.
        is_failing: whether it has received a notice or is down.
        is_down: whether it has no engine.
        checked_s: when its health was checked; it is checked at a constant interval from then on.
    """

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}
        self.is_open = True
        self.is_failing = self.is_down = False
        self.checked_s = START_S

    def next_check_s(self, now_s: float) -> float:
        """Return the time of the first health check after `now_s`."""
        num_intervals = math.floor((now_s - self.checked_s) / _CHECK_INTERVAL_S) + 1
        return self.checked_s + num_intervals * _CHECK_INTERVAL_S


class _Call:
    """A request at the router, from its arrival to its end.

    Attributes:
        number: the number of the request in the workload.
        request: the request that was sent to a replica last.
        failed: indices of the replicas that have lost or refused it.
        num_losses: how often a replica has lost it.
        num_sent_tokens: tokens of `request` when the replica received it.
        is_submitted: whether an engine has it; otherwise it waits at its server for an engine.
        is_refused: whether the last replica refused it, because its queue was full.
        give_up_s: when it stops waiting for a replica; 0 before it waits.
        started_s, first_token_s, last_token_s, num_cached: as in its log; 0 before that time.
    """

    __slots__ = (
        *("failed", "first_token_s", "give_up_s", "is_refused", "is_submitted", "last_token_s"),
        *("num_cached", "num_losses", "num_sent_tokens", "number", "request", "started_s"),
    )

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.failed: set[int] = set()
        self.num_losses = self.num_cached = 0
        self.num_sent_tokens = len(request.tokens)
        self.is_submitted = self.is_refused = False
        self.give_up_s = self.started_s = self.first_token_s = self.last_token_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether the client has received a part of the answer."""
        return self.first_token_s > 0

    @property
    def is_started(self) -> bool:
        """Whether an engine computes the request, so that it does not merely wait in a queue."""
        return self.is_submitted and self.request.started_s > 0

    def take_tokens(self, at_s: float) -> None:
        """Record the tokens that the lost engine has computed; the last one came at `at_s`."""
        if self.is_submitted and len(self.request.tokens) > self.num_sent_tokens:
            self.last_token_s = at_s
            self.num_sent_tokens = len(self.request.tokens)

    def renew_request(self, *, is_admitted: bool) -> None:
        """Replace the request by one to another engine, which continues after its tokens.

        `is_admitted` says that no limit of the queue applies.
        """
        lost = self.request
        self.request = Request(
            lost.id,
            cast("list[int]", array("I", lost.tokens)),
            lost.num_prompt,
            lost.params,
            seed=lost.seed,
            is_admitted=is_admitted,
        )


def _bound(action: Callable[..., int], *arguments: object) -> Callable[[], int]:
    """Return a function that calls `action` with these arguments, for the queue of events."""
    return lambda: action(*arguments)
