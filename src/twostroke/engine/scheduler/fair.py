"""The order of requests: first come, first served, with fair shares between tenants.

Start-time fair queueing (Goyal, Vin, Cheng, 1996): a tenant's request starts, on a clock of tokens
for each unit of weight, when the tenant's previous one is paid for, or now if that is past. The
earliest start goes first, and now is the latest start of those that run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.engine.scheduler.request_state import PriorityKey

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.engine.scheduler.request_state import RequestState

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
