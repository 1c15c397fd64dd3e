"""What a scheduler shows of itself at one moment, beyond its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.cache import PagePool
    from twostroke.core.request import Request
    from twostroke.schedule.config import SchedulerStats
    from twostroke.schedule.ticket import Ticket


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Who runs, by rank, and what the pages hold: copies, which a later step does not change.

    `held[i]` are the pages of `running[i]`, a tuple for each cache group (with `NO_PAGE`). `counts`
    has how many times each page is referred to, `cached` are those that nobody refers to and that
    the prefix cache knows. `waiting_since_s` is the arrival of who has waited longest, None if
    nobody waits.
    """

    stats: SchedulerStats
    running: tuple[Request, ...]
    held: tuple[tuple[tuple[int, ...], ...], ...]
    counts: tuple[int, ...]
    cached: tuple[int, ...]
    waiting_since_s: float | None


def look(
    stats: SchedulerStats, pool: PagePool, running: Sequence[Ticket], waiting: Iterable[Ticket]
) -> SchedulerView:
    """Copy what there is to see."""
    counts, cached = pool.contents()
    return SchedulerView(
        stats=stats,
        running=tuple([ticket.request for ticket in running]),
        held=tuple([tuple(map(tuple, ticket.request.pages)) for ticket in running]),
        counts=counts,
        cached=cached,
        waiting_since_s=min((ticket.request.arrival_s for ticket in waiting), default=None),
    )
