"""A transfer that goes on, and what was asked for of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from twostroke.cache.tiers import PageKey
    from twostroke.core.request import Request
    from twostroke.schedule.transfers import Transfer

# How a transfer ended.
DONE: Final = "done"
PARTIAL: Final = "partial"  # the prefill engine did not have all pages
NO_ROOM: Final = "no_room"
LATE: Final = "late"
LOST: Final = "lost"  # the connection ended
CANCELLED: Final = "cancelled"
FAULT: Final = "fault"  # the prefill engine could not read the prompt
OUTCOMES: Final = (DONE, PARTIAL, NO_ROOM, LATE, LOST, CANCELLED, FAULT)


@dataclass(slots=True, eq=False)
class Ongoing:
    """A transfer. Until `num_writing` is 0 its pages are not given back."""

    id: int
    request: Request
    transfer: Transfer
    keys: dict[tuple[int, int], PageKey]  # wanted, by group and place
    flops: float
    expected_s: float
    began_s: float
    patience_s: float
    due_s: float
    offers: set[int] = field(default_factory=set)
    asked: set[PageKey] = field(default_factory=set)
    num_pending: int = 0
    num_writing: int = 0
    is_finished: bool = False  # nothing more is offered
    fault: str | None = None
    has_ended: bool = False


@dataclass(slots=True)
class Fetching:
    """Pages that were asked for, and those of the same offer that follow."""

    one: Ongoing
    offer: int
    keys: list[PageKey]
    rest: list[tuple[int, PageKey, int]]  # place in the offer, key, page there
    began_s: float
