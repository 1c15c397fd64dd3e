"""Requests that wait: for the batching policy first, then for room."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.schedule.policy import Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.cache import PrefixChain
    from twostroke.core.request import Request
    from twostroke.schedule.policy import Policy


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in the order, and how far its pages are known to the prefix index.

    Attributes:
        rank: smaller goes first and loses its pages last; fixed when the request is added.
        max_len: how many tokens end it.
        chain: keys of its full pages; None without a prefix cache.
        num_published: how many of its pages were taken from the index or offered to it.
        num_known: how many pages of its tokens the index knew of when it started, in the groups
            that see everything; windows may have hidden some from it.
        publish_at: `num_computed` from which another page is full.
        due_at: `num_computed` from which another page is full, or passed by a window.
        awaited: key of the page that another request computes, for which it last waited.
        is_running: whether it holds pages; otherwise it waits.
    """

    request: Request
    rank: tuple[int, int]
    max_len: int
    chain: PrefixChain | None
    num_published: int = 0
    num_known: int = 0
    publish_at: int = 0
    due_at: int = 0
    awaited: bytes | None = None
    is_running: bool = False


class WaitingLine:
    """Tickets without pages: those that the policy has let start are `ready`, by rank.

    A preempted request goes back to `ready`.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self.ready: list[Ticket] = []
        self.num_tokens = 0
        self._policy = policy
        self._clock = clock
        self._not_ready: dict[str, Ticket] = {}  # by arrival
        self._is_flushed = False

    def __len__(self) -> int:
        return len(self._not_ready) + len(self.ready)

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._not_ready.values()
        yield from self.ready

    def add(self, ticket: Ticket) -> None:
        """Queue a new request."""
        self._not_ready[ticket.request.id] = ticket
        self.num_tokens += len(ticket.request.tokens)

    def put_back(self, ticket: Ticket) -> None:
        """Queue a request that has lost its pages."""
        insort(self.ready, ticket, key=rank_of)
        self.num_tokens += len(ticket.request.tokens)

    def remove(self, ticket: Ticket) -> None:
        """Let a request go, to run or because it has ended."""
        self.num_tokens -= len(ticket.request.tokens)
        if self._not_ready.pop(ticket.request.id, None) is None:
            del self.ready[bisect_left(self.ready, ticket.rank, key=rank_of)]

    def flush(self) -> None:
        """Let the policy start those that wait now, without waiting for more."""
        self._is_flushed = bool(self._not_ready)

    def make_ready(self, num_running: int) -> None:
        """Make those ready that the policy lets start."""
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


def rank_of(ticket: Ticket) -> tuple[int, int]:
    """Return the key by which queues are sorted."""
    return ticket.rank
