"""A request's place in the order, and its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.engine.kv_cache import PrefixChain


class PriorityKey(NamedTuple):
    """A place in the order; smaller goes first.

    `place` is `turn`, moved by the priority. A turn is a number of an arrival: the request's own
    `arrival`, or that of the first one of its level that it passes. `start` is on its level's
    clock. Of equal starts, those of tenants without other requests (`is_behind` false) go first.
    """

    place: int
    turn: int
    start: float
    is_behind: bool
    arrival: int


@dataclass(slots=True, eq=False)
class RequestState:
    """A request's place in the order, and how far its pages are known to the prefix index.

    Attributes:
        rank: smaller goes first and loses its pages last; fixed when the request is added, unless
            its tenant's later requests have earlier deadlines.
        num_passed: how many of these have taken its rank.
        charged: what its tenant was charged for it so far, in tokens.
        max_len: how many tokens end it.
        chain: keys of its full pages; None without a prefix cache.
        num_published: how many of its pages were taken from the index or offered to it.
        num_known: how many pages of its tokens the index knew of when it started, in the groups
            that see everything; windows may have hidden some from it.
        publish_at: `num_computed` from which another page is full.
        due_at: `num_computed` from which another page is full, or passed by a window.
        awaited: key of the page that another request computes, for which it last waited.
        has_started: whether it has held pages.
        is_running: whether it holds pages; otherwise it waits.
        may_draw_ahead: whether its rows may follow tokens that are not known yet.
    """

    request: Request
    rank: PriorityKey
    max_len: int
    chain: PrefixChain | None
    charged: float = 0.0
    num_passed: int = 0
    num_published: int = 0
    num_known: int = 0
    publish_at: int = 0
    due_at: int = 0
    awaited: bytes | None = None
    has_started: bool = False
    is_running: bool = False
    may_draw_ahead: bool = False

    @property
    def draws_ahead(self) -> bool:
        """Whether its next row is of a token that a step in flight draws."""
        planned = self.request.num_planned
        can_follow = len(self.request.tokens) <= planned < self.max_len - 1
        return self.may_draw_ahead and can_follow


def rank_of(ticket: RequestState) -> PriorityKey:
    """Return the key by which queues are sorted."""
    return ticket.rank
