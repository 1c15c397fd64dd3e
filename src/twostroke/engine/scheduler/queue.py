"""Waiting requests: their order, when they may start, and when their deadlines have passed.

Tenants of the same priority share the engine by start-time fair queueing (Goyal, Vin, Cheng, 1996).
A virtual clock counts tokens per unit of weight. A request's virtual start is the virtual time at
which the tenant's earlier requests are paid for, or the current virtual time if that is later. The
request with the earliest virtual start goes first. The current virtual time is the latest virtual
start of all requests that have started.
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
from twostroke.engine.scheduler.policy import QueueState
from twostroke.engine.scheduler.request_state import PriorityKey, priority_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from twostroke.core.request import Request
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.policy import Policy
    from twostroke.engine.scheduler.request_state import RequestState

_MAX_IDLE_TENANTS: Final = 1024  # tenants without requests that are remembered at each priority
_AVERAGED_REQUESTS: Final = 8  # requests over which the length of outputs is averaged
_MAX_ENDED_ENTRIES: Final = 1000  # entries of ended requests that a deadline heap may keep
_RATE_WINDOW_S: Final = 10.0  # waiting time over which a start rate is averaged
_MIN_TOKENS_PER_S: Final = 1e-9


class WaitingQueue:
    """Requests that wait to run. The batching policy decides which are `ready` to start.

    Attributes:
        order: assigns the priority keys.
        ready: requests that may start as soon as there is room, also preempted ones, sorted by
            priority key.
        start_rate: how many waiting tokens have started per second lately, by priority.
        tokens: number of waiting tokens by priority.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, clock: Callable[[], float]) -> None:
        self.order = FairOrder(config.max_overtakes)
        self.ready: list[RequestState] = []
        self.start_rate = StartRate(clock)
        self.tokens: Counter[int] = Counter()
        self._config = config
        self._policy = policy
        self._clock = clock
        self._not_ready: dict[str, RequestState] = {}  # by request id, in order of arrival
        self._is_flushed = False

    def __len__(self) -> int:
        return len(self._not_ready) + len(self.ready)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._not_ready.values()
        yield from self.ready

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all waiting requests."""
        return sum(self.tokens.values())

    def check(self, request: Request) -> PriorityKey:
        """Return the priority key of a request that arrives now, if the queue has room.

        A request that was admitted before always has room.

        Raises:
            OverloadedError: the queue is full, or too long for the request's deadline.
        """
        config = self._config
        num_new_tokens = len(request.tokens)
        key = self.order.next_key(request)
        if request.is_admitted:
            return key
        later = self.ready[bisect_left(self.ready, key, key=priority_key) :]
        later += [state for state in self._not_ready.values() if state.priority_key > key]
        tokens_before = Counter(self.tokens)
        for state in later:
            tokens_before[state.request.priority] -= len(state.request.tokens)
        estimate = QueueEstimate(
            wait_s=self.start_rate.wait_s(tokens_before),
            delay_s=self.start_rate.wait_s({request.priority: num_new_tokens}),
        )
        check_queue(
            config,
            num_requests=len(self) - min(len(later), config.max_waiting_requests),
            num_tokens=max(tokens_before.total(), self.num_tokens - config.max_waiting_tokens),
            num_new_tokens=num_new_tokens,
            estimate=estimate,
        )
        if estimate.wait_s is not None:
            waited_s = self._clock() - request.arrival_s if request.arrival_s else 0.0
            check_deadline(request, waited_s, estimate)
        return key

    def add(self, state: RequestState) -> None:
        """Queue a new request; it waits until the scheduler starts it."""
        self._not_ready[state.request.id] = state
        if self.order.add(state):
            self.ready.sort(key=priority_key)
        self.tokens[state.request.priority] += len(state.request.tokens)

    def put_back(self, state: RequestState) -> None:
        """Queue a preempted request again; it may restart without asking the batching policy."""
        insort(self.ready, state, key=priority_key)
        self.tokens[state.request.priority] += len(state.request.tokens)

    def remove(self, state: RequestState) -> None:
        """Remove a waiting request that starts or has ended."""
        priority = state.request.priority
        self.tokens[priority] -= len(state.request.tokens)
        if not self.tokens[priority]:
            del self.tokens[priority]
        if self._not_ready.pop(state.request.id, None) is None:
            del self.ready[bisect_left(self.ready, state.priority_key, key=priority_key)]

    def flush(self) -> None:
        """Let the batching policy start the waiting requests, even if they do not fill a batch."""
        self._is_flushed = bool(self._not_ready)

    def make_ready(self, num_running: int) -> None:
        """Move the requests that the batching policy lets start in the next step to `ready`.

        `num_running` is the number of running requests.
        """
        self.start_rate.begin_step(self.tokens)
        if not self._not_ready or self._policy_wait_s(num_running) != 0:
            return
        for state in sorted(self._not_ready.values(), key=priority_key)[: self._policy.size]:
            del self._not_ready[state.request.id]
            insort(self.ready, state, key=priority_key)
        self._is_flushed = self._is_flushed and bool(self._not_ready)

    @property
    def wait_s(self) -> float | None:
        """Seconds until the batching policy starts a waiting request if nothing else happens.

        Nothing else means that no request runs or arrives. None for never.
        """
        if self.ready:
            return 0.0
        return self._policy_wait_s(0) if self._not_ready else None

    def _policy_wait_s(self, num_running: int) -> float | None:
        queue = QueueState(
            num_waiting=len(self._not_ready),
            num_active=len(self.ready) + num_running,
            first_arrival_s=next(iter(self._not_ready.values())).request.arrival_s,
            now_s=self._clock(),
            is_flushed=self._is_flushed,
        )
        return self._policy.wait_s(queue)


class FairOrder:
    """Assigns priority keys to requests, fairly between the tenants of each priority level.

    A tenant is charged for the tokens that are computed for its requests. The tenant with the
    lowest charge, relative to its weight, goes first. A request overtakes only requests that
    arrived shortly before it: less than `max_overtakes` arrivals earlier. The distance grows by
    `max_overtakes` for each priority level by which the later request is more urgent. If there is a
    single tenant, no request overtakes another of the same priority.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._num_arrived = 0
        self._levels: dict[int, _PriorityLevel] = defaultdict(
            partial(_PriorityLevel, max_overtakes)
        )

    def next_key(self, request: Request) -> PriorityKey:
        """Return the priority key of a request that arrives now, without adding the request."""
        return self._levels[request.priority].next_key(request, self._num_arrived)

    def add(self, state: RequestState) -> bool:
        """Add a new request to its tenant's requests, and charge its expected cost.

        If the new request has an earlier deadline than waiting requests of its tenant and priority,
        these requests exchange their priority keys, so that the earliest deadline goes first.
        Returns whether any keys were exchanged.
        """
        self._num_arrived += 1
        return self._levels[state.request.priority].add(state)

    def start(self, state: RequestState) -> None:
        """Correct a tenant's charge at a request's start, when its cached tokens are known."""
        self._levels[state.request.priority].start(state)

    def end(self, state: RequestState) -> None:
        """Correct a tenant's charge at a request's end, when its real cost is known."""
        self._levels[state.request.priority].end(state)


class _TenantAccount:
    """A tenant's requests of one priority, and the computed tokens that they are charged.

    Virtual time is the clock of fair queueing, in computed tokens per unit of weight.

    Attributes:
        paid_until: virtual time at which all requests of the tenant will be paid for.
        last_start: virtual start of the tenant's latest request.
        num_unfinished: requests that have not ended.
        waiting: requests that have not started, by priority key.
        mean_output: average number of output tokens of recent requests.
    """

    __slots__ = ("last_start", "mean_output", "num_unfinished", "paid_until", "waiting")

    def __init__(self, mean_output: float) -> None:
        self.paid_until = 0.0
        self.last_start = 0.0
        self.num_unfinished = 0
        self.waiting: list[RequestState] = []
        self.mean_output = mean_output


class _PriorityLevel:
    """Orders the requests of one priority by start-time fair queueing.

    The cost of a request is its number of computed tokens: prompt and output tokens that were not
    in the prefix cache. Tenants compete for computed tokens, since a step has a limited number of
    them. The cost is estimated when a request arrives and corrected when it starts and when it
    ends; the difference between cost and estimate moves the virtual starts of the tenant's later
    requests.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._virtual_time = 0.0
        self._all_paid_at = 0.0  # virtual time at which every tenant's requests are paid for
        self._unfinished: list[PriorityKey] = []  # sorted
        self._accounts: dict[str, _TenantAccount] = {}
        self._mean_output = 0.0  # over all tenants

    def next_key(self, request: Request, arrival: int) -> PriorityKey:
        account, keys = self._accounts.get(request.tenant), self._unfinished
        virtual_start, has_siblings = self._virtual_time, False
        if account is not None:
            virtual_start = max(virtual_start, account.paid_until, account.last_start)
            has_siblings = account.num_unfinished > 0
        index = bisect_right(
            keys,
            (virtual_start, has_siblings, arrival),
            key=lambda key: (key.virtual_start, key.has_siblings, key.arrival),
        )
        max_overtaken_turn = arrival - self._max_overtakes
        if index < len(keys) and keys[index].turn <= max_overtaken_turn:  # too old to be overtaken
            index = bisect_right(keys, max_overtaken_turn, key=lambda key: key.turn)
            virtual_start, has_siblings = keys[index - 1].virtual_start, True
        turn = keys[index].turn if index < len(keys) else arrival
        return PriorityKey(
            position=turn + request.priority * self._max_overtakes,
            turn=turn,
            virtual_start=virtual_start,
            has_siblings=has_siblings,
            arrival=arrival,
        )

    def add(self, state: RequestState) -> bool:
        request = state.request
        account = self._accounts.get(request.tenant)
        if account is None:
            self._forget_idle_tenants()
            account = self._accounts[request.tenant] = _TenantAccount(self._mean_output)
        insort(self._unfinished, state.priority_key)
        account.num_unfinished += 1
        account.last_start = state.priority_key.virtual_start
        account.paid_until = max(self._virtual_time, account.paid_until)
        self._charge_estimate(state, account, len(request.tokens))
        return self._insert_by_deadline(account.waiting, state)

    def start(self, state: RequestState) -> None:
        request = state.request
        state.has_started = True
        self._virtual_time = max(self._virtual_time, state.priority_key.virtual_start)
        account = self._accounts[request.tenant]
        account.waiting.remove(state)
        self._charge_estimate(state, account, request.num_prompt - request.num_cached)

    def end(self, state: RequestState) -> None:
        request = state.request
        account = self._accounts[request.tenant]
        del self._unfinished[bisect_left(self._unfinished, state.priority_key)]
        account.num_unfinished -= 1
        if not state.has_started:
            account.waiting.remove(state)
        self._charge(state, account, max(0, request.num_computed - request.num_cached))
        if request.num_output:
            num_output = request.num_output
            account.mean_output += (num_output - account.mean_output) / _AVERAGED_REQUESTS
            self._mean_output += (num_output - self._mean_output) / _AVERAGED_REQUESTS
        if not self._unfinished:
            self._virtual_time = self._all_paid_at  # an idle engine owes nothing to any tenant

    def _insert_by_deadline(self, waiting: list[RequestState], state: RequestState) -> bool:
        """Insert a new request before its tenant's waiting requests with later deadlines.

        The new request gets the priority key of the first request that it overtakes, and each
        overtaken request gets the key of the request after it. A request is overtaken in this way
        at most `max_overtakes` times. Returns whether any key was exchanged.
        """
        index, deadline_s = len(waiting), state.request.start_by_s
        while index and waiting[index - 1].request.start_by_s > deadline_s:
            if waiting[index - 1].num_times_overtaken >= self._max_overtakes:
                break
            index -= 1
        waiting.insert(index, state)
        overtaken = waiting[index + 1 :]
        for offset, other in enumerate(overtaken):
            earlier = waiting[index + offset]
            earlier.priority_key, other.priority_key = other.priority_key, earlier.priority_key
            other.num_times_overtaken += 1
        return bool(overtaken)

    def _charge_estimate(
        self, state: RequestState, account: _TenantAccount, num_prompt: int
    ) -> None:
        """Charge a tenant for a request: `num_prompt` tokens and an output of average length."""
        max_output = state.max_len - state.request.num_prompt
        self._charge(state, account, num_prompt + min(max_output, account.mean_output))

    def _charge(self, state: RequestState, account: _TenantAccount, cost: float) -> None:
        """Set the number of tokens that a tenant is charged for a request to `cost`.

        The request's earlier charge is replaced.
        """
        account.paid_until += (cost - state.charged_tokens) / state.request.weight
        state.charged_tokens = cost
        self._all_paid_at = max(self._all_paid_at, account.paid_until)

    def _forget_idle_tenants(self) -> None:
        """Drop the accounts of tenants without requests if there are too many accounts.

        The accounts that are paid for first in virtual time are dropped first.
        """
        if len(self._accounts) < len(self._unfinished) + _MAX_IDLE_TENANTS:
            return
        idle = [
            (account.paid_until, tenant)
            for tenant, account in self._accounts.items()
            if not account.num_unfinished
        ]
        idle.sort()
        num_paid = bisect_right(idle, self._virtual_time, key=lambda pair: pair[0])
        for _, tenant in idle[: max(num_paid, _MAX_IDLE_TENANTS // 2)]:
            del self._accounts[tenant]


class Deadlines:
    """Finds requests past their timeout, and requests that did not start in time.

    A timeout ends a waiting or running request. A request misses its deadline to start only if a
    step was planned after the deadline without this request. So a request does not miss its
    deadline only because one step took long.
    """

    def __init__(self) -> None:
        self._timeouts = _DeadlineHeap()
        self._start_deadlines = _DeadlineHeap()
        self._planned_s = -math.inf

    @property
    def next_s(self) -> float | None:
        """The time of the next timeout, on the scheduler's clock; None if there is none."""
        return self._timeouts.next_s

    def add(self, state: RequestState, num_unfinished: int) -> None:
        """Watch a request's deadlines; `num_unfinished` counts all requests that have not ended."""
        request = state.request
        self._timeouts.add(request.end_by_s, state, num_unfinished)
        if request.start_within_s < request.remaining_s:
            self._start_deadlines.add(request.start_by_s, state, num_unfinished)

    def pop(self, now_s: float) -> list[tuple[Request, DeadlineError]]:
        """Return requests that are past a deadline, each with its error.

        The scheduler calls this before each step, and ends the requests. The entry `is_unrun` of an
        error's `facts` says whether nothing was computed for the request.
        """
        expired = []
        for state in self._timeouts.pop(now_s):
            request = state.request
            if state.has_started:
                text = "was stopped: it took longer than"
            else:
                text = "was not run: its turn did not come within"
            error = DeadlineError.of_timeout(request.timeout_s, text)
            error.facts["is_unrun"] = not state.has_started
            expired.append((request, error))
        for state in self._start_deadlines.pop(self._planned_s):
            request = state.request
            if not state.has_started and now_s < request.end_by_s:
                reason = (
                    f"The request was not run: no turn came within {request.start_within_s:g} s."
                )
                expired.append((request, DeadlineError(reason, is_unrun=True)))
        self._planned_s = now_s
        return expired


class _DeadlineHeap:
    """A heap of unfinished requests by deadline.

    Entries of ended requests stay until they are popped, or until they are too many.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_s: float, state: RequestState, num_unfinished: int) -> None:
        if deadline_s == math.inf:
            return
        if len(self._heap) > num_unfinished + _MAX_ENDED_ENTRIES:
            self._heap = [entry for entry in self._heap if not entry[2].request.is_finished]
            heapq.heapify(self._heap)
        self._num_added += 1
        heapq.heappush(self._heap, (deadline_s, self._num_added, state))

    def pop(self, now_s: float) -> Iterator[RequestState]:
        while self._heap and self._heap[0][0] <= now_s:
            _, _, state = heapq.heappop(self._heap)
            if not state.request.is_finished:
                yield state


class StartRate:
    """Measures how many waiting tokens start per second, for each priority.

    Time counts for a priority only while some of its tokens are left waiting. So the rate of a
    priority is the speed of the engine, less the share that more urgent requests take.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_began_s = clock()
        self._waiting: dict[int, int] = {}  # tokens by priority when the last step was planned
        self._started: Counter[int] = Counter()  # tokens by priority since then
        self._sums: dict[int, tuple[float, float]] = {}  # recent tokens and seconds by priority

    def start(self, priority: int, num_tokens: int) -> None:
        """Record that a request with `num_tokens` waiting tokens starts."""
        self._started[priority] += num_tokens

    def begin_step(self, waiting: Mapping[int, int]) -> None:
        """Record how many tokens wait with each priority, before a step is planned."""
        now_s = self._clock()
        took_s = now_s - self._step_began_s
        self._step_began_s = now_s
        for priority, num_tokens in self._waiting.items():
            num_started = self._started[priority]
            if num_started < num_tokens:
                decay = math.exp(-took_s / _RATE_WINDOW_S)
                tokens, seconds = self._sums.get(priority, (0.0, 0.0))
                self._sums[priority] = tokens * decay + num_started, seconds * decay + took_s
        self._waiting = dict(waiting)
        self._started.clear()

    def wait_s(self, tokens: Mapping[int, int]) -> float | None:
        """Return the seconds until waiting tokens have started; None without measurements.

        `tokens` has the number of waiting tokens of each priority. A priority whose rate was not
        measured yet is assumed to have the best rate of all priorities.
        """
        rates = {
            priority: num_tokens / seconds
            for priority, (num_tokens, seconds) in self._sums.items()
            if num_tokens and seconds
        }
        if not rates:
            return None
        best_rate = max(rates.values())
        waits = [
            num_tokens / max(rates.get(priority, best_rate), _MIN_TOKENS_PER_S)
            for priority, num_tokens in tokens.items()
        ]
        return max(waits, default=0.0)
