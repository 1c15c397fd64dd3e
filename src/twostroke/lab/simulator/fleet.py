"""Replicas and their router under virtual time: arrivals, ends of steps, KV transfers."""

from __future__ import annotations

import heapq
from array import array
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, cast

from twostroke.core.errors import ContextLengthError, OverloadedError
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.output import Timings
from twostroke.fleet.routing.dispatch import Dispatcher, RoutingKey
from twostroke.fleet.routing.policy import PREFIX_POLICIES
from twostroke.fleet.routing.prompt import block_keys, bytes_of_blocks
from twostroke.lab.measure.requests import REFUSED, RequestLog
from twostroke.lab.simulator.disaggregation import SimulatedTransfers
from twostroke.lab.simulator.page_cache import SimulatedPageCache

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from twostroke.fleet.routing.dispatch import RoutedRequest
    from twostroke.lab.simulator.disaggregation import PrefillSettings
    from twostroke.lab.simulator.load import RequestArrival, Workload
    from twostroke.lab.simulator.page_cache import PageCacheSettings
    from twostroke.lab.simulator.replica import Clock, SimulatedReplica

START_S: Final = 1.0  # virtual time of the start: 0 stands for events that have not happened
_REPORT_INTERVAL_S: Final = 0.5  # between reports of a replica to the router


class FleetEvent(IntEnum):
    """The kinds of events in a simulation; simultaneous events happen in this order."""

    STEP_END = 0  # of a replica
    KV_ARRIVAL = 1  # the pages of a request's prompt arrive
    PAGE_ARRIVAL = 2  # the pages of a request come from the page cache
    WAKE = 3  # a replica's policy may start a batch
    ACTION = 4  # of replicas that fail (`FailingFleet`)
    REQUEST_ARRIVAL = 5


class SimulatedFleet:
    """Simulated replicas of one model, and the router before them.

    Attributes:
        logs: times and counts of each request, by its number in the workload.
        refusals: number of each refused request, and the reason.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        routing: str,
        *,
        clock: Clock,
        vocab_size: int,
        overhead_s: float = 0.0,
        prefill: PrefillSettings | None = None,
        page_cache: PageCacheSettings | None = None,
    ) -> None:
        """Route requests to the replicas by the policy `routing`, a key of `POLICIES`.

        `clock` is the virtual time that all replicas share. A request reaches its replica
        `overhead_s` after it was sent. With `prefill`, the first replicas prefill prompts; requests
        are routed to the other replicas, which decode. With `page_cache`, each replica has one.
        """
        self.logs: dict[int, RequestLog] = {}
        self.refusals: list[tuple[int, str]] = []
        self._replicas = replicas
        self._clock = clock
        self._transfers = SimulatedTransfers(prefill, replicas, clock) if prefill else None
        self._page_caches = (
            [SimulatedPageCache(page_cache, replica, clock) for replica in replicas]
            if page_cache
            else []
        )
        self._loading: dict[int, int] = {}  # the index of the replica that loads a request's pages
        self._num_prefill_replicas = prefill.count if prefill else 0
        indices = range(self._num_prefill_replicas, len(replicas))
        self._router = SimulatedRouter(replicas, indices, routing, clock)
        self._vocab_size = vocab_size
        self._overhead_s = overhead_s
        self._events: list[tuple[float, FleetEvent, int]] = []
        self._first_token_s: dict[str, float] = {}
        self._changed_replicas: set[int] = set()  # may start a step after the current events

    def run(self, load: Workload) -> None:
        """Serve all requests of a workload on the simulated replicas."""
        self._load = load
        begin_s = START_S + self._overhead_s
        for number, arrival in enumerate(load.arrivals):
            self._push(begin_s + arrival.at_s, FleetEvent.REQUEST_ARRIVAL, number)
        while self._next_s() is not None or self._flush_batches():
            now_s = self._clock.now_s = self._events[0][0]
            while self._next_s() == now_s:
                _, event, key = heapq.heappop(self._events)
                self._changed_replicas.add(self._handle(event, key))
            for index in sorted(self._changed_replicas):
                if self._replicas[index].ends_s is None:
                    self._start(index)
            self._changed_replicas.clear()

    @property
    def num_page_loads(self) -> int:
        """For how many requests pages were loaded from the page caches."""
        return sum(page_cache.num_loads for page_cache in self._page_caches)

    @property
    def decisions(self) -> dict[str, int]:
        """How many prompts were prefilled on a prefill replica, or not, by reason."""
        return self._transfers.decisions if self._transfers is not None else {}

    def _next_s(self) -> float | None:
        """Return the time of the simulation's next event; None if there are none.

        Events for the ends of interrupted steps are dropped.
        """
        while self._events:
            at_s, event, key = self._events[0]
            if event is not FleetEvent.STEP_END or self._replicas[key].ends_s == at_s:
                return at_s
            heapq.heappop(self._events)
        return None

    def _handle(self, event: FleetEvent, key: int) -> int:
        """Handle an event of the simulation; return the index of the replica that it changes."""
        if event is FleetEvent.REQUEST_ARRIVAL:
            return self._arrive(key)
        if event is FleetEvent.KV_ARRIVAL:
            return self._receive(key)
        if event is FleetEvent.PAGE_ARRIVAL:
            return self._receive_pages(key)
        if event is FleetEvent.STEP_END:
            self._finish_step(key)
        return key

    def _push(self, at_s: float, event: FleetEvent, key: int) -> None:
        heapq.heappush(self._events, (at_s, event, key))

    def _flush_batches(self) -> bool:
        """Start batches that are not full, because no more requests arrive in the simulation.

        Returns whether there are new events.
        """
        for index, replica in enumerate(self._replicas):
            if replica.scheduler.has_work:
                replica.scheduler.flush()
                self._start(index)
        return bool(self._events)

    def _start(self, index: int) -> None:
        replica = self._replicas[index]
        ends_s = replica.start()
        if ends_s is not None:
            self._push(ends_s, FleetEvent.STEP_END, index)
        elif wait_s := replica.scheduler.wait_s:
            self._push(self._clock.now_s + wait_s, FleetEvent.WAKE, index)

    def _interrupt(self, index: int, *, catch_up: bool) -> None:
        """Stop a replica's fast-forward after its current step, because its requests change.

        With `catch_up`, the replica also applies the steps that have ended.
        """
        replica = self._replicas[index]
        before_s = replica.ends_s
        ends_s = replica.catch_up() if catch_up else replica.interrupt()
        if ends_s is None:
            self._changed_replicas.add(index)
        elif ends_s != before_s:
            self._push(ends_s, FleetEvent.STEP_END, index)

    def _arrive(self, number: int) -> int:
        """Route a request that has arrived, and queue it; return the index of its replica."""
        request = make_request(number, self._load.arrivals[number], self._vocab_size)
        index = self._choose(request)
        assert index is not None, "all replicas are open"
        try:
            state = self._replicas[index].submit(request)
        except (ContextLengthError, OverloadedError) as error:
            self._router.end(request)
            self._refuse(request, error)
            return index
        if self._page_caches:
            arrives_s = self._page_caches[index].load(number, state)
            if arrives_s is not None:
                self._loading[number] = index
                self._push(arrives_s, FleetEvent.PAGE_ARRIVAL, number)
            return index
        if self._transfers is None:
            return index
        remote = self._transfers.consider(index, state)
        if remote is not None:
            prefill_index, prefill_request = remote
            try:
                self._replicas[prefill_index].submit(prefill_request)
            except OverloadedError:
                self._transfers.arrive(number, is_prefilled=False)
            self._changed_replicas.add(prefill_index)
        return index

    def _receive(self, number: int) -> int:
        """Continue a request whose KV pages have arrived; return the index of its replica."""
        assert self._transfers is not None
        index = self._transfers.decoder(number)
        self._interrupt(index, catch_up=True)
        self._transfers.arrive(number)
        return index

    def _receive_pages(self, number: int) -> int:
        """Continue a request whose pages have come from the page cache; return its replica."""
        index = self._loading.pop(number)
        self._interrupt(index, catch_up=True)
        self._page_caches[index].arrive(number)
        return index

    def _choose(self, request: Request, excluded: Collection[int] = ()) -> int | None:
        """Let the router choose a replica for a request; return the replica's index.

        `excluded` are the indices of replicas that may not be chosen. None if all open replicas are
        excluded.
        """
        for index in self._router.due():
            self._interrupt(index, catch_up=True)
            self._router.report(index)
        chosen_index = self._router.choose(request, excluded)
        catches_up = self._transfers is not None or bool(self._page_caches)
        if chosen_index is not None:
            self._interrupt(chosen_index, catch_up=catches_up)
        return chosen_index

    def _finish_step(self, index: int) -> None:
        """Record the results of a simulated step: first tokens, ends of requests, KV transfers."""
        now_s = self._clock.now_s
        started, finished = self._replicas[index].finish()
        if self._transfers is not None and index < self._num_prefill_replicas:
            for request in finished:
                number = int(request.id)
                self._push(self._transfers.arrival_s(number), FleetEvent.KV_ARRIVAL, number)
            return
        for request in started:
            self._first_token_s[request.id] = now_s
            self._router.begin(request)
        for request in finished:
            self._router.end(request)
            number = int(request.id)
            sent_s = request.arrival_s - self._overhead_s
            times = Timings(sent_s, request.started_s, self._first_token_s.pop(request.id), now_s)
            num_output = self._load.arrivals[number].num_output
            self.logs[number] = RequestLog(
                times, sent_s, request.num_prompt, num_output, request.num_cached
            )

    def _refuse(self, request: Request, error: Exception) -> None:
        sent_s, number = self._clock.now_s - self._overhead_s, int(request.id)
        times = Timings(sent_s, 0.0, 0.0, 0.0)
        self.logs[number] = RequestLog(
            times, sent_s, num_prompt=request.num_prompt, num_output=0, outcome=REFUSED
        )
        self.refusals.append((number, str(error)))


class SimulatedRouter:
    """The router of a simulation, with the routing policies and the information of a real one.

    `indices` are the replicas to which it routes.
    """

    def __init__(
        self, replicas: Sequence[SimulatedReplica], indices: range, policy: str, clock: Clock
    ) -> None:
        self._replicas = replicas
        self._indices = indices
        self._clock = clock
        self._knows_prefixes = policy in PREFIX_POLICIES
        self._dispatcher = Dispatcher(policy, clock.read, bytes_of_blocks)
        self._routed_requests: dict[str, RoutedRequest] = {}
        self._next_report_s = 0.0
        for index in indices:
            self._dispatcher.set_open(self._dispatcher.add_replica(str(index)), is_open=True)

    def due(self) -> range:
        """Return the replicas that must report to the router now.

        After each interval these are all replicas, otherwise none. Without a choice of replicas,
        reports would have no effect.
        """
        if len(self._indices) == 1 or self._clock.now_s < self._next_report_s:
            return range(0)
        self._next_report_s = self._clock.now_s + _REPORT_INTERVAL_S
        return self._indices

    def report(self, index: int) -> None:
        """Tell the router which cached pages a replica has evicted, and how many requests wait."""
        stats = self._replicas[index].scheduler.stats()
        self._dispatcher.report(
            index - self._indices.start, 0.0, stats.horizon_s, num_waiting=stats.num_waiting
        )

    def set_open(self, index: int, *, is_open: bool) -> None:
        """Open a replica for new requests after a restart, or close it, as health checks do."""
        if is_open:
            self._dispatcher.reset(index - self._indices.start)
        self._dispatcher.set_open(index - self._indices.start, is_open=is_open)

    def choose(self, request: Request, excluded: Collection[int] = ()) -> int | None:
        """Return the index of the replica to which the router sends a request.

        A real router compares the text of prompts; here the prompt's tokens represent its text.
        `excluded` are the indices of replicas that may not be chosen. None if all open replicas are
        excluded.
        """
        text = array("I", request.prompt).tobytes()
        keys = block_keys(text, request.salt) if self._knows_prefixes else ()
        routing_key = RoutingKey(keys, len(text), keys[0] if keys else int(request.id))
        routed = self._dispatcher.decide(
            routing_key, excluded=[index - self._indices.start for index in excluded]
        )
        if routed is None:
            return None
        self._routed_requests[request.id] = routed
        return self._indices[routed.index]

    def begin(self, request: Request) -> None:
        """Tell the router that a request's first token has arrived."""
        self._dispatcher.record_first_token(self._routed_requests[request.id])

    def end(self, request: Request) -> None:
        """Tell the router that a request has ended."""
        self._dispatcher.end(self._routed_requests.pop(request.id))


def make_request(number: int, arrival: RequestArrival, vocab_size: int) -> Request:
    """Return the request of an arrival, which has this number in the workload."""
    # An array has the methods of a list that the scheduler uses, and is made faster.
    tokens = cast("list[int]", arrival.tokens(number, vocab_size))
    return Request(
        str(number), tokens, arrival.num_prompt, _params(arrival.num_output), seed=number
    )


@lru_cache(maxsize=4096)
def _params(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
