"""A step plan in the making."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.step import Slice

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.schedule.ticket import Ticket


class Sketch:
    """Slices so far, whose they are, what is left of the budget, and who had to give way.

    Attributes:
        reserved: pages that running requests may still need soon; None until somebody asks.
    """

    __slots__ = ("budget", "owners", "preempted", "reserved", "slices")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.slices: list[Slice] = []
        self.owners: list[Ticket] = []
        self.preempted: list[Request] = []
        self.reserved: int | None = None

    def add(self, ticket: Ticket, count: int) -> None:
        """Let a request compute its next `count` tokens."""
        request = ticket.request
        start = request.num_computed
        samples = start + count == len(request.tokens)
        self.slices.append(Slice(request, start, count, samples=samples))
        self.owners.append(ticket)
        self.budget -= count

    def preempt(self, ticket: Ticket) -> None:
        """Take out a request that has just lost its pages."""
        self.preempted.append(ticket.request)
        self.reserved = None
        if ticket in self.owners:
            at = self.owners.index(ticket)
            self.budget += self.slices[at].count
            del self.slices[at], self.owners[at]
