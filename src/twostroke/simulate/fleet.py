"""Replicas behind a router under virtual time: requests arrive, steps end, nothing else happens."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from twostroke.cache.prefix import PrefixChain
from twostroke.core.errors import ContextLengthError, OverloadedError
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.output import Timings
from twostroke.measure.requests import REFUSED, RequestLog
from twostroke.schedule.routing import LOOKS_AT_PREFIXES, ROUTES, ReplicaView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.simulate.load import Arrival, Load
    from twostroke.simulate.replica import Clock, Replica

START_S: Final = 1.0  # of virtual time: 0 stands for what has not happened


class Fleet:
    """Replicas of one model, and the router before them.

    Attributes:
        logs: what happened to each request, in the order of arrival; those of requests that have
            not ended are None.
        refusals: why requests were refused: the number of the request and the sentence.
    """

    def __init__(
        self, replicas: Sequence[Replica], routing: str, clock: Clock, vocab_size: int
    ) -> None:
        """Route by the policy of this name, a key of `ROUTES`."""
        self.logs: list[RequestLog | None] = []
        self.refusals: list[tuple[int, str]] = []
        self._replicas, self._clock = replicas, clock
        self._route, self._looks = ROUTES[routing], routing in LOOKS_AT_PREFIXES
        self._vocab_size = vocab_size
        self._ends: list[tuple[float, int]] = []  # of steps, with their replica
        self._first_s: dict[str, float] = {}

    def run(self, load: Load) -> None:
        """Serve all requests of a load."""
        arrivals, at = load.arrivals, 0
        self.logs = [None] * len(arrivals)
        while at < len(arrivals) or self._ends:
            next_s = START_S + arrivals[at].at_s if at < len(arrivals) else float("inf")
            if self._ends and self._ends[0][0] <= next_s:
                self._clock.now_s, index = heapq.heappop(self._ends)
                self._take(self._replicas[index])
                self._start(index)
                continue
            self._clock.now_s = next_s
            touched = set()
            while at < len(arrivals) and START_S + arrivals[at].at_s == next_s:
                touched.add(self._submit(at, arrivals[at]))
                at += 1
            for index in sorted(touched):
                if self._replicas[index].ends_s is None:
                    self._start(index)

    def _submit(self, number: int, arrival: Arrival) -> int:
        """Route a request, which may be refused; return the index of its replica."""
        request = Request(
            str(number),
            arrival.tokens(number, self._vocab_size),
            arrival.num_prompt,
            SamplingParams(max_tokens=arrival.num_output, temperature=0.0, ignore_eos=True),
            seed=number,
        )
        index = self._route(number, self._views(request))
        try:
            self._replicas[index].submit(request)
        except (ContextLengthError, OverloadedError) as error:
            now_s = self._clock.now_s
            times = Timings(now_s, 0.0, 0.0, 0.0)
            self.logs[number] = RequestLog(times, now_s, arrival.num_prompt, 0, 0, REFUSED)
            self.refusals.append((number, str(error)))
        return index

    def _views(self, request: Request) -> list[ReplicaView]:
        hits = [0] * len(self._replicas)
        if self._looks:
            chain = PrefixChain(self._replicas[0].page_size, request.salt)
            hits = [one.scheduler.num_hit(request, chain) for one in self._replicas]
        return [
            ReplicaView(one.num_requests, one.num_tokens, hit)
            for one, hit in zip(self._replicas, hits, strict=True)
        ]

    def _start(self, index: int) -> None:
        ends_s = self._replicas[index].start()
        if ends_s is not None:
            heapq.heappush(self._ends, (ends_s, index))

    def _take(self, replica: Replica) -> None:
        """Note the first tokens and the ends of a step."""
        now_s = self._clock.now_s
        begun, ended = replica.finish()
        self._first_s.update({request.id: now_s for request in begun})
        for request in ended:
            first_s = self._first_s.pop(request.id)
            times = Timings(request.arrival_s, request.started_s, first_s, now_s)
            self.logs[int(request.id)] = RequestLog(
                times, times.arrival_s, request.num_prompt, request.num_output, request.num_cached
            )
