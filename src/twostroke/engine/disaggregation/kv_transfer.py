"""A transfer that goes on, and what was asked for of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from twostroke.engine.disaggregation.messages import WRITTEN

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.engine.disaggregation import messages
    from twostroke.engine.disaggregation.placement import RemotePrefill
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler.transfers import Transfer

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
class KvTransfer:
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
    firsts: tuple[int, ...]  # the first places that are wanted, by group
    offers: set[int] = field(default_factory=set)
    asked: set[PageKey] = field(default_factory=set)
    num_pending: int = 0
    num_writing: int = 0
    is_finished: bool = False  # nothing more is offered
    fault: str | None = None
    has_ended: bool = False

    def choose(self, offer: messages.Offer) -> list[tuple[int, PageKey, int]]:
        """Return what to ask for of an offer: (place in it, key, page there).

        Each page is named once, however often it was offered, and neighbours follow each other.
        """
        named = [
            (at, self.keys.get((group, place)), page)
            for at, (group, place, page) in enumerate(offer.pages)
        ]
        found = {
            key: (at, key, page)
            for at, key, page in named
            if key in self.transfer.wanted and key not in self.asked
        }
        self.asked.update(found)
        return sorted(found.values(), key=lambda one: one[2])


def begin(
    id_: int, request: Request, chosen: RemotePrefill, patience_s: float, groups: int
) -> KvTransfer:
    """Return a transfer that begins; it waits for `patience_s` beyond what it should take."""
    transfer, now_s = chosen.transfer, time.monotonic()
    places = {key: place for place, key in enumerate(transfer.keys, transfer.first_place)}
    keys = {(group, places[key]): (group, key) for group, key in chosen.wanted}
    firsts = [transfer.first_place + len(transfer.keys)] * groups
    for group, place in keys:
        firsts[group] = min(firsts[group], place)
    patience_s += 3 * chosen.seconds
    return KvTransfer(
        *(id_, request, transfer, keys, chosen.flops, chosen.seconds),
        *(now_s, patience_s, now_s + patience_s, tuple(firsts)),
    )


@dataclass(slots=True)
class PageFetch:
    """Pages that were asked for, and those of the same offer that follow.

    `how` is a word of `messages`.
    """

    one: KvTransfer
    offer: int
    keys: list[PageKey]
    rest: list[tuple[int, PageKey, int]]  # place in the offer, key, page there
    began_s: float
    how: str

    @property
    def is_written(self) -> bool:
        """Whether its transfer counts it in `num_writing` until its answer comes."""
        return self.how == WRITTEN
