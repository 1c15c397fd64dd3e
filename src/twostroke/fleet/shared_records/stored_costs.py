"""Costs in the store, for `twostroke usage --by upstream`.

The functions correspond to `server/auth/costs.py`, for a connection to Redis in place of a
database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.fleet.shared_records.stored import are_intact, sum_rows
from twostroke.server.auth.costs import COUNT_COLUMNS, CostAmount, CostOwner

if TYPE_CHECKING:
    from collections.abc import Iterable

_owner_decoder: Final = msgspec.json.Decoder(tuple[str, str, str])


def amounts(store: Any, since: str, until: str) -> list[CostAmount]:
    """Return the costs from the day `since` to the day `until`, without damaged rows."""
    return [
        CostAmount(owner, *(int(counts.get(name, 0)) for name in COUNT_COLUMNS))
        for owner, counts in _costs(store, since, until)
        if are_intact(counts, COUNT_COLUMNS)
    ]


def damaged_owners(store: Any, since: str, until: str) -> list[CostOwner]:
    """Return the owners of damaged cost rows, from the day `since` to the day `until`."""
    return [
        owner
        for owner, counts in _costs(store, since, until)
        if not are_intact(counts, COUNT_COLUMNS)
    ]


def _costs(store: Any, since: str, until: str) -> Iterable[tuple[CostOwner, dict[str, bytes]]]:
    for day, text, counts in sum_rows(store, "cost-days", "costs:", since, until):
        try:
            owner = CostOwner(day, *_owner_decoder.decode(text))
        except msgspec.MsgspecError:
            yield CostOwner(day, text, "", ""), {"damaged": b""}
        else:
            yield owner, counts
