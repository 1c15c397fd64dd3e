"""Waiting requests: their order, when they may start, and when their deadlines have passed.

Tenants of the same priority share the engine by start-time fair queueing (Goyal, Vin, Cheng,
1996). A virtual clock counts tokens per unit of weight. A request's virtual start is the time at
which the tenant's earlier requests are paid for, or the current virtual time if that is later. The
earliest virtual start goes first, and the virtual time is the latest start of a running request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import DeadlineError
from twostroke.engine.scheduler.config import QueueEstimate, check_deadline, check_queue
from twostroke.engine.scheduler.policy import Queue
from twostroke.engine.scheduler.request_state import PriorityKey, rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from twostroke.core.request import Request
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.policy import Policy
    from twostroke.engine.scheduler.request_state import RequestState


class WaitingQueue:
    """Tickets without pages: those that the policy has let start are `ready`, by rank.

    A preempted request goes back to `ready`.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, clock: Callable[[], float]) -> None:
        self.order = FairOrder(config.max_overtakes)
        self.ready: list[RequestState] = []
        self.pace = StartRate(clock)
        self.tokens: Counter[int] = Counter()  # by priority
        self._config = config
        self._policy = policy
        self._clock = clock
        self._not_ready: dict[str, RequestState] = {}  # by arrival
        self._is_flushed = False

    def __len__(self) -> int:
        return len(self._not_ready) + len(self.ready)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._not_ready.values()
        yield from self.ready

    @property
    def num_tokens(self) -> int:
        """How many tokens the tickets have."""
        return sum(self.tokens.values())

    def check(self, request: Request) -> PriorityKey:
        """Return the rank of a request that comes now.

        Raises:
            OverloadedError: the queue has no place for it, or is too long for its deadline.
        """
        config, num_own = self._config, len(request.tokens)
        rank, tokens = self.order.rank(request), Counter(self.tokens)
        later = self.ready[bisect_left(self.ready, rank, key=rank_of) :]
        later += [ticket for ticket in self._not_ready.values() if ticket.rank > rank]
        for ticket in later:
            tokens[ticket.request.priority] -= len(ticket.request.tokens)
        wait_s = self.pace.wait_s(tokens)
        turn_s = self.pace.wait_s({request.priority: num_own})
        num_requests = len(self) - min(len(later), config.max_waiting_requests)
        num_tokens = max(tokens.total(), self.num_tokens - config.max_waiting_tokens)
        check_queue(config, num_requests, num_tokens, num_own, QueueEstimate(wait_s, turn_s))
        if wait_s is not None:
            waited_s = self._clock() - request.arrival_s if request.arrival_s else 0.0
            check_deadline(request, waited_s, QueueEstimate(wait_s, turn_s))
        return rank

    def add(self, ticket: RequestState) -> None:
        """Queue a new request."""
        self._not_ready[ticket.request.id] = ticket
        if self.order.add(ticket):
            self.ready.sort(key=rank_of)
        self.tokens[ticket.request.priority] += len(ticket.request.tokens)

    def put_back(self, ticket: RequestState) -> None:
        """Queue a request that has lost its pages."""
        insort(self.ready, ticket, key=rank_of)
        self.tokens[ticket.request.priority] += len(ticket.request.tokens)

    def remove(self, ticket: RequestState) -> None:
        """Let a request go, to run or because it has ended."""
        priority = ticket.request.priority
        self.tokens[priority] -= len(ticket.request.tokens)
        if not self.tokens[priority]:
            del self.tokens[priority]
        if self._not_ready.pop(ticket.request.id, None) is None:
            del self.ready[bisect_left(self.ready, ticket.rank, key=rank_of)]

    def flush(self) -> None:
        """Let the policy start those that wait now, without waiting for more."""
        self._is_flushed = bool(self._not_ready)

    def make_ready(self, num_running: int) -> None:
        """Make those ready that the policy lets start in the step that is planned now."""
        self.pace.turn(self.tokens)
        if not self._not_ready or self._policy_wait_s(num_running) != 0:
            return
        for ticket in sorted(self._not_ready.values(), key=rank_of)[: self._policy.size]:
            del self._not_ready[ticket.request.id]
            insort(self.ready, ticket, key=rank_of)
        self._is_flushed = self._is_flushed and bool(self._not_ready)

    @property
    def wait_s(self) -> float | None:
        """Seconds until a request may start if none runs and only time changes; None for never."""
        if self.ready:
            return 0.0
        return self._policy_wait_s(0) if self._not_ready else None

    def _policy_wait_s(self, num_running: int) -> float | None:
        queue = Queue(
            num_waiting=len(self._not_ready),
            num_active=len(self.ready) + num_running,
            oldest_s=next(iter(self._not_ready.values())).request.arrival_s,
            now_s=self._clock(),
            is_flushed=self._is_flushed,
        )
        return self._policy.wait_s(queue)


_MOST_IDLE: Final = 1024  # tenants without requests that are remembered at each level
_RECENT: Final = 8  # requests over which the length of answers is averaged


class _Share:
    """A tenant's requests at one level. `paid` is when the clock will have paid for them all.

    `line` are those that have not started, by rank.
    """

    __slots__ = ("last_start", "line", "num_open", "num_output", "paid")

    def __init__(self, num_output: float) -> None:
        self.paid = self.last_start = 0.0
        self.num_open = 0
        self.line: list[RequestState] = []
        self.num_output = num_output  # of its recent answers, on average


class FairOrder:
    """Ranks all requests, each fairly among those of its priority.

    A request passes only what arrived less than `max_overtakes` before it, and as many more for
    each level of priority that it is more urgent. With a single tenant it passes none of its level.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._num_arrived = 0
        self._levels: dict[int, _Level] = defaultdict(partial(_Level, max_overtakes))

    def rank(self, request: Request) -> PriorityKey:
        """Return the rank of a request that arrives now; `add` takes it in."""
        return self._levels[request.priority].rank(request, self._num_arrived)

    def add(self, ticket: RequestState) -> bool:
        """Take in a request, and charge its tenant what it is expected to cost.

        Its tenant's requests of the same priority that have not started exchange their ranks so
        that the earliest deadline goes first; returns whether any did.
        """
        self._num_arrived += 1
        return self._levels[ticket.request.priority].add(ticket)

    def start(self, ticket: RequestState) -> None:
        """Take in that a request starts, whose cached tokens are known now."""
        self._levels[ticket.request.priority].start(ticket)

    def end(self, ticket: RequestState) -> None:
        """Take in that a request has ended, and charge what it did cost."""
        self._levels[ticket.request.priority].end(ticket)


class _Level:
    """Ranks the requests of one priority.

    Costs are computed tokens: those of prompt and answer that the prefix cache did not have. They
    are what tenants compete for, since a step is a number of computed tokens. A request's
    cost is estimated when it arrives, and corrected when it starts and ends, which moves the
    tenant's later requests.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._now = self._latest = 0.0  # on the clock, and when all would be paid for
        self._open: list[PriorityKey] = []  # of requests that have not ended, in order
        self._shares: dict[str, _Share] = {}
        self._num_output = 0.0  # of anyone's recent answers, on average

    def rank(self, request: Request, arrival: int) -> PriorityKey:
        share, ranks = self._shares.get(request.tenant), self._open
        start, is_behind = self._now, False
        if share is not None:
            start, is_behind = max(start, share.paid, share.last_start), share.num_open > 0
        at = bisect_right(ranks, (start, is_behind, arrival), key=lambda rank: rank[2:])
        first = arrival - self._max_overtakes
        if at < len(ranks) and ranks[at].turn <= first:  # too old to be passed
            at = bisect_right(ranks, first, key=lambda rank: rank.turn)
            start, is_behind = ranks[at - 1].start, True
        turn = ranks[at].turn if at < len(ranks) else arrival
        place = turn + request.priority * self._max_overtakes
        return PriorityKey(place, turn, start, is_behind, arrival)

    def add(self, ticket: RequestState) -> bool:
        request = ticket.request
        share = self._shares.get(request.tenant)
        if share is None:
            self._forget()
            share = self._shares[request.tenant] = _Share(self._num_output)
        insort(self._open, ticket.rank)
        share.num_open += 1
        share.last_start, share.paid = ticket.rank.start, max(self._now, share.paid)
        self._charge(ticket, share, len(request.tokens))
        return self._hurry(share.line, ticket)

    def start(self, ticket: RequestState) -> None:
        request, ticket.has_started = ticket.request, True
        self._now = max(self._now, ticket.rank.start)
        share = self._shares[request.tenant]
        share.line.remove(ticket)
        self._charge(ticket, share, request.num_prompt - request.num_cached)

    def end(self, ticket: RequestState) -> None:
        request = ticket.request
        share = self._shares[request.tenant]
        del self._open[bisect_left(self._open, ticket.rank)]
        share.num_open -= 1
        if not ticket.has_started:
            share.line.remove(ticket)
        self._settle(ticket, share, max(0, request.num_computed - request.num_cached))
        if request.num_output:
            share.num_output += (request.num_output - share.num_output) / _RECENT
            self._num_output += (request.num_output - self._num_output) / _RECENT
        if not self._open:
            self._now = self._latest  # nobody owes anything to those who were not there

    def _hurry(self, line: list[RequestState], ticket: RequestState) -> bool:
        """Put a new request before those with later deadlines, each of which takes the next rank.

        None is passed more than `max_overtakes` times.
        """
        at, deadline_s = len(line), ticket.request.start_by_s
        while at and line[at - 1].request.start_by_s > deadline_s:
            if line[at - 1].num_passed >= self._max_overtakes:
                break
            at -= 1
        line.insert(at, ticket)
        passed = line[at + 1 :]
        for place, other in enumerate(passed):
            line[at + place].rank, other.rank = other.rank, line[at + place].rank
            other.num_passed += 1
        return bool(passed)

    def _charge(self, ticket: RequestState, share: _Share, num_read: int) -> None:
        """Charge for a prompt, and for an answer like the tenant's recent ones."""
        most = ticket.max_len - ticket.request.num_prompt
        self._settle(ticket, share, num_read + min(most, share.num_output))

    def _settle(self, ticket: RequestState, share: _Share, cost: float) -> None:
        share.paid += (cost - ticket.charged) / ticket.request.weight
        ticket.charged = cost
        self._latest = max(self._latest, share.paid)

    def _forget(self) -> None:
        """Forget idle tenants that are paid for; of too many others, those that owe least."""
        if len(self._shares) < len(self._open) + _MOST_IDLE:
            return
        idle = [
            (share.paid, tenant) for tenant, share in self._shares.items() if not share.num_open
        ]
        idle.sort()
        num_paid = bisect_right(idle, self._now, key=lambda one: one[0])
        for _, tenant in idle[: max(num_paid, _MOST_IDLE // 2)]:
            del self._shares[tenant]


_MOST_STALE: Final = 1000  # entries of requests that have ended


class Deadlines:
    """Finds requests past their timeout, and those whose turn has not come in time.

    A timeout ends a request wherever it is. A turn has not come if, after the deadline, a step was
    planned without it: a request is not given up where it only waits for a step to end.
    """

    def __init__(self) -> None:
        self._timeouts, self._turns = _Due(), _Due()
        self._planned_s = -math.inf

    @property
    def next_s(self) -> float | None:
        """When the next timeout may be, by the clock; None for never."""
        return self._timeouts.next_s

    def add(self, ticket: RequestState, num_open: int) -> None:
        """Watch a request, one of `num_open`."""
        request = ticket.request
        self._timeouts.add(request.end_by_s, ticket, num_open)
        if request.start_within_s < request.left_s:
            self._turns.add(request.start_by_s, ticket, num_open)

    def pop(self, now_s: float) -> list[tuple[Request, DeadlineError]]:
        """Return requests that are over, each with the error that says so; a plan follows.

        The fact `is_unrun` of an error says that nothing was computed for its request.
        """
        over = []
        for ticket in self._timeouts.pop(now_s):
            request, text = ticket.request, "was stopped: it took longer than"
            if not ticket.has_started:
                text = "was not run: its turn did not come within"
            error = DeadlineError.of_timeout(request.timeout_s, text)
            error.facts["is_unrun"] = not ticket.has_started
            over.append((request, error))
        for ticket in self._turns.pop(self._planned_s):
            request = ticket.request
            if not ticket.has_started and now_s < request.end_by_s:
                reason = (
                    f"The request was not run: no turn came within {request.start_within_s:g} s."
                )
                over.append((request, DeadlineError(reason, is_unrun=True)))
        self._planned_s = now_s
        return over


class _Due:
    """Tickets by a time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, at_s: float, ticket: RequestState, num_open: int) -> None:
        if at_s == math.inf:
            return
        if len(self._heap) > num_open + _MOST_STALE:
            self._heap = [one for one in self._heap if not one[2].request.is_finished]
            heapq.heapify(self._heap)
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, self._num_added, ticket))

    def pop(self, now_s: float) -> Iterator[RequestState]:
        while self._heap and self._heap[0][0] <= now_s:
            _, _, ticket = heapq.heappop(self._heap)
            if not ticket.request.is_finished:
                yield ticket


_RECENT_S: Final = 10.0  # of waiting, over which a pace is measured
_LEAST: Final = 1e-9  # tokens a second


class StartRate:
    """Measures how many waiting tokens start in a second, for each priority.

    Only the time in which some of the priority were left waiting counts, so a pace is what the
    engine can do, and what more urgent requests leave of it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turned_s = clock()
        self._waited: dict[int, int] = {}  # tokens, when the last step was planned
        self._started: Counter[int] = Counter()  # tokens since then
        self._sums: dict[int, tuple[float, float]] = {}  # recent tokens, and seconds

    def start(self, priority: int, num_tokens: int) -> None:
        """Take in that a request starts."""
        self._started[priority] += num_tokens

    def turn(self, waiting: Mapping[int, int]) -> None:
        """Take in, before a step is planned, how many tokens wait."""
        now_s = self._clock()
        took_s, self._turned_s = now_s - self._turned_s, now_s
        for priority, num_tokens in self._waited.items():
            started = self._started[priority]
            if started < num_tokens:
                kept = math.exp(-took_s / _RECENT_S)
                tokens, seconds = self._sums.get(priority, (0.0, 0.0))
                self._sums[priority] = tokens * kept + started, seconds * kept + took_s
        self._waited = dict(waiting)
        self._started.clear()

    def wait_s(self, tokens: Mapping[int, int]) -> float | None:
        """Return how long tokens by priority take to start; None if nothing has been measured.

        A priority that has not waited yet has the best pace of the others.
        """
        paces = {p: num / s for p, (num, s) in self._sums.items() if num and s}
        if not paces:
            return None
        best = max(paces.values())
        waits = [num / max(paces.get(p, best), _LEAST) for p, num in tokens.items()]
        return max(waits, default=0.0)
