"""The costs of a router's replicas and upstreams by day and model, and their table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from twostroke.server.storage.row_digests import COLUMNS
from twostroke.server.storage.sum_table import SumTable

if TYPE_CHECKING:
    from sqlite3 import Connection

    CostRows = dict["CostOwner", list[int]]  # the counts of `COUNT_COLUMNS`

REPLICAS_SIDE: Final = "here"  # the upstream's name in rows of the router's own replicas
NANOS: Final = 10**9  # of the currency's unit; sums of whole numbers do not drift
_NUM_OWNER_COLUMNS: Final = 4
_OWNER_COLUMNS: Final = COLUMNS["costs"][:_NUM_OWNER_COLUMNS]
_SUM_COLUMNS: Final = COLUMNS["costs"][_NUM_OWNER_COLUMNS:]
_ESTIMATE_COLUMNS: Final = COLUMNS["cost_estimates"][_NUM_OWNER_COLUMNS:]
COUNT_COLUMNS: Final = (*_SUM_COLUMNS, *_ESTIMATE_COLUMNS)
_TABLE: Final = SumTable("costs", _OWNER_COLUMNS, _SUM_COLUMNS)
_ESTIMATES: Final = SumTable("cost_estimates", _OWNER_COLUMNS, _ESTIMATE_COLUMNS)


class CostOwner(NamedTuple):
    """The key of a sum of costs: a day in UTC, an upstream, its model, and the currency.

    The costs of the router's own replicas, which are paid by the hour, have the upstream
    `REPLICAS_SIDE` and an empty model.
    """

    day: str
    upstream: str
    model: str
    currency: str


class CostAmount(NamedTuple):
    """The requests, the tokens and the cost of a `CostOwner`; `input` includes `cached`.

    Costs are in billionths of the currency. `estimated_requests` and `estimated_nanos` count the
    requests whose answers did not report usage, so that their cost was estimated.
    """

    owner: CostOwner
    requests: int
    input: int
    cached: int
    output: int
    nanos: int
    estimated_requests: int
    estimated_nanos: int


def add(db: Connection, rows: CostRows) -> None:
    """Add costs to the sums in the database.

    `rows` has the counts of each owner in the order of `COUNT_COLUMNS`.
    """
    num_sums = len(_SUM_COLUMNS)
    _TABLE.add(db, [(owner, counts[:num_sums]) for owner, counts in rows.items()])
    estimates = [(owner, counts[num_sums:]) for owner, counts in rows.items()]
    _ESTIMATES.add(db, [(owner, counts) for owner, counts in estimates if any(counts)])


def amounts(db: Connection, since: str, until: str) -> list[CostAmount]:
    """Return the costs from the day `since` to the day `until`, without damaged rows."""
    estimates = dict(_ESTIMATES.read(db, since, until))
    none_estimated = (0,) * len(_ESTIMATE_COLUMNS)
    return [
        CostAmount(CostOwner(*owner), *counts, *estimates.get(owner, none_estimated))
        for owner, counts in _TABLE.read(db, since, until)
    ]


def damaged_owners(db: Connection, since: str, until: str) -> list[CostOwner]:
    """Return the owners of damaged cost rows, from the day `since` to the day `until`."""
    rows = _TABLE.read(db, since, until, is_damaged=True)
    return [CostOwner(*owner) for owner, _ in rows]
