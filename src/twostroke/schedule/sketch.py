"""A step plan in the making."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.step import Slice
from twostroke.schedule.pooling import num_pooled
from twostroke.schedule.scoring import num_scored

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.schedule.ticket import Ticket


class Sketch:
    """Slices so far, whose they are, what is left of the budget, and who had to give way.

    Attributes:
        most_scored: how many rows more may report on a prompt's tokens.
        reserved: pages that running requests may still need soon; None until somebody asks.
    """

    __slots__ = ("budget", "most_scored", "owners", "preempted", "reserved", "slices")

    def __init__(self, budget: int, most_scored: int) -> None:
        self.budget = budget
        self.most_scored = most_scored
        self.slices: list[Slice] = []
        self.owners: list[Ticket] = []
        self.preempted: list[Request] = []
        self.reserved: int | None = None

    def add(self, ticket: Ticket, count: int) -> None:
        """Let a request compute its next `count` tokens."""
        request = ticket.request
        start = request.num_computed
        samples = start + count == len(request.tokens) and request.pooling is None
        scored, pooled = num_scored(request, count), num_pooled(request, count)
        self.slices.append(
            Slice(request, start, count, samples, num_scored=scored, num_pooled=pooled)
        )
        self.owners.append(ticket)
        self.budget -= count
        self.most_scored -= scored

    def preempt(self, ticket: Ticket) -> None:
        """Take out a request that has just lost its pages."""
        self.preempted.append(ticket.request)
        self.reserved = None
        if ticket in self.owners:
            at = self.owners.index(ticket)
            self.budget += self.slices[at].count
            self.most_scored += self.slices[at].num_scored
            del self.slices[at], self.owners[at]
