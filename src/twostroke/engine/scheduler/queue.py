"""Requests that wait: for the batching policy first, then for room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from typing import TYPE_CHECKING

from twostroke.engine.scheduler.config import QueueEstimate, check_deadline, check_queue
from twostroke.engine.scheduler.fair import FairOrder
from twostroke.engine.scheduler.policy import Queue
from twostroke.engine.scheduler.request_state import rank_of
from twostroke.engine.scheduler.start_rate import StartRate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.core.request import Request
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.policy import Policy
    from twostroke.engine.scheduler.request_state import PriorityKey, RequestState


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
