"""The slices of a step while it is planned, and what is left of its budget.

Rows of a prompt may report log-probabilities (scored rows) or hidden states (pooled rows, for
embeddings). A request that is pooled draws no token: it ends with its last row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.embedding import Pooling
from twostroke.core.request import BATCH_SERVICE, SERVICES
from twostroke.core.step import Slice
from twostroke.engine.scheduler.request_state import rank_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.request import Request
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.request_state import RequestState


class StepBuilder:
    """Slices so far, their owners, and what is left of the budget.

    Attributes:
        most_scored: how many more rows may report log-probabilities of prompts.
        preempted: requests that lost their pages for this step.
        reserved: pages that running requests may still need soon; None if not known.
        urgent: the request for whose prompt lines of batches pause, if they rank after it.
        lines: how many more rows lines of batches may have beside other requests; None if all.
    """

    __slots__ = (
        "_aside",
        "_first",
        "_has_read",
        "budget",
        "lines",
        "most_scored",
        "owners",
        "preempted",
        "reserved",
        "slices",
        "urgent",
    )

    def __init__(self, budget: int, most_scored: int) -> None:
        self.budget = budget
        self.most_scored = most_scored
        self.slices: list[Slice] = []
        self.owners: list[RequestState] = []
        self.preempted: list[Request] = []
        self.reserved: int | None = None
        self.urgent: RequestState | None = None
        self.lines: int | None = None
        self._aside: list[tuple[Slice, RequestState]] = []
        self._first: RequestState | None = None
        self._has_read = False

    def most_rows(self, request: Request, wanted: int) -> int:
        """Return how many of the `wanted` next rows a request may have, by the scored ones."""
        if request.num_unscored <= self.most_scored:
            return wanted
        start = request.num_planned
        return min(wanted, max(start, request.num_scored) - start + self.most_scored)

    def add(self, ticket: RequestState, count: int) -> None:
        """Let a request compute its next `count` tokens."""
        request = ticket.request
        start = request.num_planned
        samples = start + count == len(request.tokens) and request.pooling is None
        scored, pooled = _num_scored(request, count), _num_pooled(request, count)
        self.slices.append(
            Slice(request, start, count, samples, num_scored=scored, num_pooled=pooled)
        )
        self.owners.append(ticket)
        request.num_planned += count
        self.budget -= count
        self.most_scored -= scored
        self._has_read = True
        self._count(ticket, count)

    def preempt(self, ticket: RequestState) -> None:
        """Take out a request that has just lost its pages."""
        self.preempted.append(ticket.request)
        self.reserved = None
        if ticket in self.owners:
            at = self.owners.index(ticket)
            self.budget += self.slices[at].count
            self.most_scored += self.slices[at].num_scored
            del self.slices[at], self.owners[at]

    def pauses(self, ticket: RequestState) -> bool:
        """Whether a request is a line of a batch that lets others go first."""
        if not is_background(ticket) or ticket is self._first:
            return False
        return self.lines == 0 or (self.urgent is not None and self.urgent.rank < ticket.rank)

    def most_for(self, ticket: RequestState) -> int:
        """Return how many more rows a request may have."""
        if self.lines is None or not is_background(ticket):
            return self.budget
        return min(self.budget, self.lines)

    def put_aside(
        self,
        running: Sequence[RequestState],
        behind: Sequence[RequestState],
        ready: Sequence[RequestState],
        most_lines: int,
    ) -> None:
        """Take out lines of batches, with one row each, that slow down others.

        If others run, no more than `most_lines` stay; if others have prompts to read, none does.
        These are among those `behind`, and among those that wait and are `ready`. A line that ranks
        before them stays, and so does the first of all that run, so that no line waits for ever.
        All are in the order of their ranks.
        """
        if not running or not is_background(running[-1]):
            return
        self._first = running[0]
        if not is_background(running[0]):
            self.lines = most_lines
        urgent = [ticket for ticket in (*behind, *ready) if not is_background(ticket)]
        self.urgent = min(urgent, key=rank_of, default=None)
        if self.lines is None and self.urgent is None:
            return
        pairs = list(zip(self.slices, self.owners, strict=True))
        self.slices.clear()
        self.owners.clear()
        for piece, ticket in pairs:
            if self.pauses(ticket):
                self._aside.append((piece, ticket))
                piece.request.num_planned = piece.start
            else:
                self._put(piece, ticket)

    def take_back(self) -> bool:
        """Let nobody pause for a prompt if none could be read; return whether that is so."""
        if self.urgent is None or self._has_read:
            return False
        self.urgent = None
        for piece, ticket in self._aside:
            if ticket.is_running and self.budget and not self.pauses(ticket):  # it has its pages
                self._put(piece, ticket)
                piece.request.num_planned = piece.start + piece.count
                self.budget -= piece.count
        return True

    def _put(self, piece: Slice, ticket: RequestState) -> None:
        self.slices.append(piece)
        self.owners.append(ticket)
        self._count(ticket, piece.count)

    def _count(self, ticket: RequestState, count: int) -> None:
        if self.lines is not None and is_background(ticket):
            self.lines -= count


def is_background(ticket: RequestState) -> bool:
    """Whether a request is a line of a batch."""
    return ticket.request.priority >= SERVICES[BATCH_SERVICE]


def in_turn(running: list[RequestState], config: SchedulerConfig) -> Iterable[RequestState]:
    """Return the running requests that may take part in the next step, by rank.

    If steps may be in flight, each takes its share of those that compute one token at a time, so
    that the steps that follow each other through a pipeline are even. With `draws_ahead`, requests
    that draw ahead take part in every step. The others wait for their tokens and go on together,
    since a step of few rows takes about as long as one of many.
    """
    steps_ahead = config.steps_ahead
    if not steps_ahead:
        return running
    if config.draws_ahead:
        others_are_out = any(map(_awaits_token, running))
        return [t for t in running if t.draws_ahead or _is_ready(t, others_are_out=others_are_out)]
    decoding = [ticket for ticket in running if ticket.request.num_pending < 2]
    share = -(-len(decoding) // (1 + steps_ahead))
    ready = [ticket for ticket in decoding if ticket.request.num_pending]
    later = set(ready[share:])
    return (t for t in running if t.request.num_pending and t not in later)


def _awaits_token(ticket: RequestState) -> bool:
    """Whether a request that does not draw ahead has its row of output in flight."""
    request = ticket.request
    is_out = not request.num_pending and request.num_computed >= request.num_prompt
    return is_out and not ticket.may_draw_ahead


def _is_ready(ticket: RequestState, *, others_are_out: bool) -> bool:
    """Whether a request has tokens to compute, and need not wait for `_awaits_token` ones."""
    num_pending = ticket.request.num_pending
    return num_pending > (0 if ticket.may_draw_ahead or not others_are_out else 1)


def _num_scored(request: Request, count: int) -> int:
    """Return how many of a request's next `count` rows report on the prompt's next token.

    Rows that did so before a preemption do not do it again, and rows in flight will do it. The
    prompt's last row draws.
    """
    if not request.num_unscored:
        return 0
    assert request.num_computed <= request.num_scored, "a row to be scored was passed over"
    end = min(request.num_planned + count, request.num_prompt - 1)
    return max(0, end - max(request.num_planned, request.num_scored))


def _num_pooled(request: Request, count: int) -> int:
    """Return how many of a request's next `count` rows, the last ones, report hidden states.

    Rows that are computed again after a preemption report again.
    """
    match request.pooling:
        case None:
            return 0
        case Pooling.MEAN | Pooling.NONE:
            return count
        case Pooling.LAST:
            return int(request.num_planned + count == len(request.tokens))
