"""Usage of API keys: requests and tokens by day, key, tenant and model, with batches apart."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.core.errors import DeadlineError
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.server.storage.row_digests import digest_in_sql, is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from sqlite3 import Connection

    from twostroke.server.http.request_context import ServedRequest, TokenUsage

    Rows = dict["Owner", list[int]]  # requests, input, cached and output tokens

_DAY_S: Final = 86_400
_OWNER_COLUMNS: Final = ("day", "key", "tenant", "model", "is_batch")
_COUNT_COLUMNS: Final = ("requests", "input", "cached", "output")
_COLUMNS: Final = ", ".join((*_OWNER_COLUMNS, *_COUNT_COLUMNS))
_SUM_COLUMNS: Final = ", ".join(
    (
        *(f"CAST(usage.{name} AS BLOB)" for name in _OWNER_COLUMNS),
        *(f"CAST(usage.{name} + excluded.{name} AS BLOB)" for name in _COUNT_COLUMNS),
    )
)
_INCREMENTS: Final = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNT_COLUMNS)
# A sum with a damaged count stays damaged.
_ADD_USAGE: Final = f"""
    INSERT INTO usage ({_COLUMNS}, row_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET {_INCREMENTS},
        row_digest = CASE WHEN usage.row_digest = {digest_in_sql("usage")}
            THEN row_digest({_SUM_COLUMNS}) ELSE usage.row_digest END
"""  # noqa: S608 constants
_SELECT_USAGE: Final = f"""
    SELECT {_COLUMNS}, {is_intact_in_sql("usage")} FROM usage
    WHERE day BETWEEN ? AND ? ORDER BY day, key, tenant, model
"""  # noqa: S608 constants


class Owner(NamedTuple):
    """The owner of a count of usage: a day in UTC, a key id, a tenant, a model, and batch or not.

    The key id is empty for requests without a key.
    """

    day: str
    key: str
    tenant: str
    model: str
    is_batch: bool


class Amount(NamedTuple):
    """How many requests and tokens an `Owner` has used; `input` tokens include `cached` tokens."""

    owner: Owner
    requests: int
    input: int
    cached: int
    output: int


def billable_usage(served_request: ServedRequest) -> TokenUsage | None:
    """Return the tokens of a request that count as usage; None if the request does not count.

    A request counts if it was answered, its client disconnected, or its own timeout ended it. A
    request does not count if the server failed, refused it or did not run it. A batch request that
    was cut off does not count either, since it runs again or has no answer.
    """
    used = served_request.used
    if used is None or (served_request.is_client_gone and served_request.service_tier is not None):
        return None
    is_timed_out = served_request.error == DeadlineError.code
    if served_request.error is not None and not (served_request.is_client_gone or is_timed_out):
        return None
    return used


class UsageBook:
    """Adds up the requests and tokens of API keys until they are written to the database.

    It observes all requests of the server that have ended.
    """

    def __init__(self, model: str) -> None:
        """Begin without usage.

        Usage is counted by the server's own model names; requests that name no model count for
        `model`.
        """
        self._model = model
        self._rows: Rows = {}
        self._day = ""
        self._day_number = -1

    @property
    def is_empty(self) -> bool:
        """Whether all usage has been taken to be written to the database."""
        return not self._rows

    def observe(self, served_request: ServedRequest) -> None:
        """Add a request that has ended, and its tokens, if it counts as usage."""
        used = billable_usage(served_request)
        if used is None:
            return
        id_ = served_request.key.id if served_request.key is not None else ""
        is_batch = served_request.service_tier == BATCH_SERVICE_TIER
        model = served_request.known_model or self._model
        row = self._row(Owner(self._today(), id_, served_request.tenant, model, is_batch))
        row[0] += 1
        row[1] += used.prompt_tokens
        row[2] += used.cached_tokens
        row[3] += used.completion_tokens

    def close(self) -> None:
        """Do nothing, since the `KeyRefresher` has already taken and written all usage."""

    def take(self) -> Rows:
        """Return the usage since the last call, which the caller writes to the database."""
        rows = self._rows
        self._rows = {}
        return rows

    def put_back(self, rows: Rows) -> None:
        """Add usage again that was taken, but could not be written."""
        for owner, counts in rows.items():
            row = self._row(owner)
            row[:] = [count + added for count, added in zip(row, counts, strict=True)]

    def _row(self, owner: Owner) -> list[int]:
        return self._rows.setdefault(owner, [0, 0, 0, 0])

    def _today(self) -> str:
        number = int(time.time() // _DAY_S)
        if number != self._day_number:
            self._day = f"{datetime.fromtimestamp(number * _DAY_S, UTC):%Y-%m-%d}"
            self._day_number = number
        return self._day


def add(db: Connection, rows: Rows) -> None:
    """Add usage to the counts in the database."""
    values: list[tuple[str | int, ...]] = [(*owner, *counts) for owner, counts in rows.items()]
    db.executemany(_ADD_USAGE, [(*row, row_digest(row)) for row in values])


def amounts(db: Connection, since: str, until: str) -> list[Amount]:
    """Return the usage from the day `since` to the day `until`, ordered by day.

    Damaged rows are left out; `damaged_owners` returns their owners.
    """
    return [
        Amount(_owner_of(row), *row[len(_OWNER_COLUMNS) : -1])
        for row in db.execute(_SELECT_USAGE, (since, until))
        if _is_intact(row)
    ]


def damaged_owners(db: Connection, since: str, until: str) -> list[Owner]:
    """Return whose usage is damaged in the database, from the day `since` to the day `until`."""
    return [
        _owner_of(row) for row in db.execute(_SELECT_USAGE, (since, until)) if not _is_intact(row)
    ]


def _owner_of(row: tuple[Any, ...]) -> Owner:
    day, key, tenant, model, is_batch = row[: len(_OWNER_COLUMNS)]
    return Owner(day, key, tenant, model, bool(is_batch))


def _is_intact(row: tuple[Any, ...]) -> bool:
    *counts, is_intact = row[len(_OWNER_COLUMNS) :]
    return bool(is_intact) and all(isinstance(count, int) for count in counts)
