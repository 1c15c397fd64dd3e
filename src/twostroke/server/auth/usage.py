"""What keys have used: requests and tokens by day, key, tenant and model; batches apart."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.core.errors import DeadlineError
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.server.storage.row_digests import digest_in_sql, is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from sqlite3 import Connection

    from twostroke.server.http.request_context import ServedRequest, Used

    Rows = dict["Owner", list[int]]  # requests, input, cached and output tokens

_DAY_S: Final = 86_400
_OWNER: Final = ("day", "key", "tenant", "model", "is_batch")
_COUNTS: Final = ("requests", "input", "cached", "output")
_COLUMNS: Final = ", ".join((*_OWNER, *_COUNTS))
_SUM: Final = ", ".join(
    (
        *(f"CAST(usage.{name} AS BLOB)" for name in _OWNER),
        *(f"CAST(usage.{name} + excluded.{name} AS BLOB)" for name in _COUNTS),
    )
)
# A sum with a damaged count stays damaged.
_ADD: Final = f"""
    INSERT INTO usage ({_COLUMNS}, row_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS)},
        row_digest = CASE WHEN usage.row_digest = {digest_in_sql("usage")}
            THEN row_digest({_SUM}) ELSE usage.row_digest END
"""  # noqa: S608 constants
_ALL: Final = f"""
    SELECT {_COLUMNS}, {is_intact_in_sql("usage")} FROM usage
    WHERE day BETWEEN ? AND ? ORDER BY day, key, tenant, model
"""  # noqa: S608 constants


class Owner(NamedTuple):
    """Whose usage it is: the day in UTC, the id of the key (empty without), tenant and model."""

    day: str
    key: str
    tenant: str
    model: str
    is_batch: bool


class Amount(NamedTuple):
    """Requests and tokens; `cached` ones are a part of `input`."""

    owner: Owner
    requests: int
    input: int
    cached: int
    output: int


def counted(served: ServedRequest) -> Used | None:
    """Return what a request has used; None if it does not count.

    Counted are requests that were answered, left by their client, or stopped by its timeout. Those
    that the server failed, and those that it refused or did not run, are not. A line of a batch
    that was cut off is not either: it runs again, or has no answer.
    """
    used = served.used
    if used is None or (served.is_client_gone and served.service is not None):
        return None
    is_late = served.error == DeadlineError.code
    if served.error is not None and not (served.is_client_gone or is_late):
        return None
    return used


class UsageBook:
    """Adds up, as an observer of requests, what is `counted` and not in the records yet."""

    def __init__(self, model: str) -> None:
        """Count for a request's model, whatever name its client has for it, or else for `model`."""
        self._model = model
        self._rows: Rows = {}
        self._day, self._day_number = "", -1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self._rows

    def observe(self, served: ServedRequest) -> None:
        """Count a request that is over."""
        used = counted(served)
        if used is None:
            return
        id_ = served.key.id if served.key is not None else ""
        is_batch = served.service == BATCH_SERVICE_TIER
        model = served.known_model or self._model
        row = self._row(Owner(self._today(), id_, served.tenant, model, is_batch))
        row[0] += 1
        row[1] += used.prompt_tokens
        row[2] += used.cached_tokens
        row[3] += used.completion_tokens

    def close(self) -> None:
        """Do nothing: the rest is taken before."""

    def take(self) -> Rows:
        """Return what is not written yet, to be written by the caller."""
        rows, self._rows = self._rows, {}
        return rows

    def put_back(self, rows: Rows) -> None:
        """Add what could not be written."""
        for owner, counts in rows.items():
            row = self._row(owner)
            row[:] = [old + new for old, new in zip(row, counts, strict=True)]

    def _row(self, owner: Owner) -> list[int]:
        return self._rows.setdefault(owner, [0, 0, 0, 0])

    def _today(self) -> str:
        number = int(time.time() // _DAY_S)
        if number != self._day_number:
            self._day = f"{datetime.fromtimestamp(number * _DAY_S, UTC):%Y-%m-%d}"
            self._day_number = number
        return self._day


def add(db: Connection, rows: Rows) -> None:
    """Add what was used to the records."""
    values: list[tuple[str | int, ...]] = [(*owner, *counts) for owner, counts in rows.items()]
    db.executemany(_ADD, [(*row, row_digest(row)) for row in values])


def amounts(db: Connection, since: str, until: str) -> list[Amount]:
    """Return the amounts used from the day `since` to the day `until`, by day.

    Damaged records are left out; `damaged_owners` names them.
    """
    return [
        Amount(_owner(row), *row[len(_OWNER) : -1])
        for row in db.execute(_ALL, (since, until))
        if _is_whole(row)
    ]


def damaged_owners(db: Connection, since: str, until: str) -> list[Owner]:
    """Return whose records are damaged, from the day `since` to the day `until`."""
    return [_owner(row) for row in db.execute(_ALL, (since, until)) if not _is_whole(row)]


def _owner(row: tuple[Any, ...]) -> Owner:
    day, key, tenant, model, is_batch = row[: len(_OWNER)]
    return Owner(day, key, tenant, model, bool(is_batch))


def _is_whole(row: tuple[Any, ...]) -> bool:
    *counts, is_intact = row[len(_OWNER) :]
    return bool(is_intact) and all(isinstance(count, int) for count in counts)
