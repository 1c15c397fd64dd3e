"""Replicas behind a router under virtual time: requests arrive, steps end, pages move."""

from __future__ import annotations

import heapq
from array import array
from enum import IntEnum
from typing import TYPE_CHECKING, Final, cast

from twostroke.core.errors import ContextLengthError, OverloadedError
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.output import Timings
from twostroke.fleet.routing.dispatch import Dispatcher, RoutingKey
from twostroke.fleet.routing.policy import LOOKS_AT_PREFIXES
from twostroke.fleet.routing.prompt import block_keys, extent
from twostroke.lab.measure.requests import REFUSED, RequestLog
from twostroke.lab.simulator.disaggregation import SimulatedTransfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.fleet.routing.dispatch import RoutedRequest
    from twostroke.lab.simulator.disaggregation import Prefill
    from twostroke.lab.simulator.load import RequestArrival, Workload
    from twostroke.lab.simulator.replica import Clock, SimulatedReplica

START_S: Final = 1.0  # of virtual time: 0 stands for what has not happened
_REPORT_S: Final = 0.5  # after which a replica is asked again what it has evicted


class _Event(IntEnum):
    """What can happen; at the same time, in this order."""

    STEP_END = 0  # of a replica
    HAND_OVER = 1  # the pages of a request's prompt have arrived
    WAKE = 2  # a replica's policy may start a batch
    ARRIVAL = 3  # of a request


class SimulatedFleet:
    """Replicas of one model, and the router before them.

    Attributes:
        logs: what happened to each request, in the order of arrival.
        refusals: why requests were refused: the number of the request and the sentence.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        routing: str,
        clock: Clock,
        vocab_size: int,
        overhead_s: float = 0.0,
        prefill: Prefill | None = None,
    ) -> None:
        """Route by the policy of this name, a key of `POLICIES`.

        A request reaches its replica `overhead_s` after it was sent. With `prefill`, the first
        replicas read prompts for the others, which requests come to.
        """
        self.logs: dict[int, RequestLog] = {}
        self.refusals: list[tuple[int, str]] = []
        self._replicas, self._clock = replicas, clock
        self._handovers = SimulatedTransfers(prefill, replicas, clock) if prefill else None
        self._num_readers = prefill.count if prefill else 0
        among = range(self._num_readers, len(replicas))
        self._route = _SimulatedRouter(replicas, among, routing, clock)
        self._vocab_size, self._overhead_s = vocab_size, overhead_s
        self._events: list[tuple[float, _Event, int]] = []
        self._first_s: dict[str, float] = {}
        self._touched: set[int] = set()  # replicas that may start a step after this moment's events

    def run(self, load: Workload) -> None:
        """Serve all requests of a load."""
        self._load, begin_s = load, START_S + self._overhead_s
        for number, one in enumerate(load.arrivals):
            self._push(begin_s + one.at_s, _Event.ARRIVAL, number)
        while self._next_s() is not None or self._flush():
            now_s = self._clock.now_s = self._events[0][0]
            while self._next_s() == now_s:
                _, event, key = heapq.heappop(self._events)
                self._touched.add(self._happen(event, key))
            for index in sorted(self._touched):
                if self._replicas[index].ends_s is None:
                    self._start(index)
            self._touched.clear()

    @property
    def decisions(self) -> dict[str, int]:
        """The decisions about prompts that readers could read, by reason."""
        return self._handovers.decisions if self._handovers is not None else {}

    def _next_s(self) -> float | None:
        """Return when the next event happens; ends of steps that were interrupted do not."""
        while self._events:
            at_s, event, key = self._events[0]
            if event is not _Event.STEP_END or self._replicas[key].ends_s == at_s:
                return at_s
            heapq.heappop(self._events)
        return None

    def _happen(self, event: _Event, key: int) -> int:
        """Let an event happen; return the replica that it concerns."""
        if event is _Event.ARRIVAL:
            return self._arrive(key)
        if event is _Event.HAND_OVER:
            return self._receive(key)
        if event is _Event.STEP_END:
            self._take(key)
        return key

    def _push(self, at_s: float, event: _Event, key: int) -> None:
        heapq.heappush(self._events, (at_s, event, key))

    def _flush(self) -> bool:
        """Let batches start that are not full, because no more requests come."""
        for index, replica in enumerate(self._replicas):
            if replica.scheduler.has_work:
                replica.scheduler.flush()
                self._start(index)
        return bool(self._events)

    def _start(self, index: int) -> None:
        replica = self._replicas[index]
        ends_s = replica.start()
        if ends_s is not None:
            self._push(ends_s, _Event.STEP_END, index)
        elif wait_s := replica.scheduler.wait_s:
            self._push(self._clock.now_s + wait_s, _Event.WAKE, index)

    def _interrupt(self, index: int, *, is_seen: bool) -> None:
        """Let a replica decide about its next step, or also show all that it has done by now."""
        replica = self._replicas[index]
        before_s, ends_s = replica.ends_s, replica.catch_up() if is_seen else replica.interrupt()
        if ends_s is None:
            self._touched.add(index)
        elif ends_s != before_s:
            self._push(ends_s, _Event.STEP_END, index)

    def _arrive(self, number: int) -> int:
        """Route a request; return the index of its replica."""
        request = _request(number, self._load.arrivals[number], self._vocab_size)
        index = self._choose(request)
        try:
            ticket = self._replicas[index].submit(request)
        except (ContextLengthError, OverloadedError) as error:
            self._route.end(request)
            self._refuse(request, error)
            return index
        if self._handovers is not None and (found := self._handovers.consider(index, ticket)):
            reader, prompt = found
            try:
                self._replicas[reader].submit(prompt)
            except OverloadedError:
                self._handovers.arrive(number, is_read=False)
            self._touched.add(reader)
        return index

    def _receive(self, number: int) -> int:
        """Let a request go on whose pages have arrived; return the index of its replica."""
        assert self._handovers is not None
        index = self._handovers.decoder(number)
        self._interrupt(index, is_seen=True)
        self._handovers.arrive(number)
        return index

    def _choose(self, request: Request) -> int:
        """Return the index of a replica for a request."""
        for index in self._route.due():
            self._interrupt(index, is_seen=True)
            self._route.report(index)
        index = self._route.choose(request)
        self._interrupt(index, is_seen=self._handovers is not None)
        return index

    def _take(self, index: int) -> None:
        """Note the first tokens and the ends of a step, and the prompts that others wait for."""
        now_s = self._clock.now_s
        begun, ended = self._replicas[index].finish()
        if self._handovers is not None and index < self._num_readers:
            for request in ended:
                number = int(request.id)
                self._push(self._handovers.finished(number), _Event.HAND_OVER, number)
            return
        for request in begun:
            self._first_s[request.id] = now_s
            self._route.begin(request)
        for request in ended:
            self._route.end(request)
            number = int(request.id)
            sent_s = request.arrival_s - self._overhead_s
            times = Timings(sent_s, request.started_s, self._first_s.pop(request.id), now_s)
            wanted = self._load.arrivals[number].num_output
            self.logs[number] = RequestLog(
                times, sent_s, request.num_prompt, wanted, request.num_cached
            )

    def _refuse(self, request: Request, error: Exception) -> None:
        sent_s, number = self._clock.now_s - self._overhead_s, int(request.id)
        times = Timings(sent_s, 0.0, 0.0, 0.0)
        self.logs[number] = RequestLog(times, sent_s, request.num_prompt, 0, 0, REFUSED)
        self.refusals.append((number, str(error)))


class _SimulatedRouter:
    """The router before some of the replicas: it knows of them what a real one would."""

    def __init__(
        self, replicas: Sequence[SimulatedReplica], among: range, policy: str, clock: Clock
    ) -> None:
        self._replicas, self._among, self._clock = replicas, among, clock
        self._looks = policy in LOOKS_AT_PREFIXES
        self._dispatcher = Dispatcher(policy, clock.read, extent)
        self._tickets: dict[str, RoutedRequest] = {}
        self._due_s = 0.0
        for index in among:
            self._dispatcher.open(self._dispatcher.join(str(index)), is_open=True)

    def due(self) -> range:
        """Return the replicas that are to be asked now: from time to time, all of them."""
        if not self._looks or self._clock.now_s < self._due_s:
            return range(0)
        self._due_s = self._clock.now_s + _REPORT_S
        return self._among

    def report(self, index: int) -> None:
        """Take in what a replica has evicted."""
        stats = self._replicas[index].scheduler.stats()
        self._dispatcher.report(index - self._among.start, 0.0, stats.horizon_s)

    def choose(self, request: Request) -> int:
        """Return a replica's index for a request, whose tokens stand for the prompt's text."""
        text = array("I", request.tokens).tobytes()
        keys = block_keys(text, request.salt) if self._looks else ()
        asked = RoutingKey(keys, len(text), keys[0] if keys else int(request.id))
        ticket = self._dispatcher.decide(asked)
        assert ticket is not None, "all replicas are open"
        self._tickets[request.id] = ticket
        return self._among[ticket.place]

    def begin(self, request: Request) -> None:
        """Note a first token."""
        self._dispatcher.begin(self._tickets[request.id])

    def end(self, request: Request) -> None:
        """Note an end."""
        self._dispatcher.end(self._tickets.pop(request.id))


def _request(number: int, one: RequestArrival, vocab_size: int) -> Request:
    params = SamplingParams(max_tokens=one.num_output, temperature=0.0, ignore_eos=True)
    # An array does all that the scheduler asks of a list: it grows at its end and is cut.
    tokens = cast("list[int]", one.tokens(number, vocab_size))
    return Request(str(number), tokens, one.num_prompt, params, seed=number)
