"""What the scheduler notes beside a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.cache import PrefixChain
    from twostroke.core.request import Request


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
        due_at: `num_computed` from which another page is full or behind a window.
        awaited: key of the page that it last waited for another request to compute.
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


def rank_of(ticket: Ticket) -> tuple[int, int]:
    """The key by which queues are sorted."""
    return ticket.rank
