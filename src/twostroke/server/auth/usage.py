"""Usage of API keys: requests and tokens by day, key, tenant and model, with batches apart."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.core.errors import DeadlineError
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.server.storage.row_digests import COLUMNS
from twostroke.server.storage.sum_table import SumTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from sqlite3 import Connection

    from twostroke.server.http.request_context import ServedRequest, TokenUsage

    Rows = dict["Owner", list[int]]  # requests, input, cached and output tokens

_DAY_S: Final = 86_400
_NUM_OWNER_COLUMNS: Final = 5
_TABLE: Final = SumTable(
    "usage", COLUMNS["usage"][:_NUM_OWNER_COLUMNS], COLUMNS["usage"][_NUM_OWNER_COLUMNS:]
)


class Owner(NamedTuple):
    """The key of a sum of usage: a day in UTC, a key id, a tenant, a model, and batch or not.

    The key id is empty for requests without an API key.
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

    def __init__(self, model: str, clock: Callable[[], float] | None = None) -> None:
        """Start with no usage.

        Usage is counted by the server's own model names; requests that name no model count for
        `model`. `clock` returns the Unix time that decides to which day a request belongs; None
        for this machine's clock.
        """
        self._model = model
        self._clock = clock
        self._rows: Rows = {}
        self._day = ""
        self._day_number = -1

    @property
    def is_empty(self) -> bool:
        """Whether the caller has taken all usage, so that none waits to be written."""
        return not self._rows

    @property
    def num_requests(self) -> int:
        """The number of requests whose usage `take` has not returned yet."""
        return sum(counts[0] for counts in self._rows.values())

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
        """Return the usage since the last call of `take`; the caller writes it to the database.

        Each `Owner` has the numbers of requests and of prompt, cached and answer tokens.
        """
        rows = self._rows
        self._rows = {}
        return rows

    def put_back(self, rows: Rows) -> None:
        """Add usage that `take` has returned, but that could not be written, again."""
        for owner, counts in rows.items():
            row = self._row(owner)
            row[:] = [count + added for count, added in zip(row, counts, strict=True)]

    def _row(self, owner: Owner) -> list[int]:
        return self._rows.setdefault(owner, [0, 0, 0, 0])

    def _today(self) -> str:
        now_s = time.time() if self._clock is None else self._clock()
        number = int(now_s // _DAY_S)
        if number != self._day_number:
            self._day = f"{datetime.fromtimestamp(number * _DAY_S, UTC):%Y-%m-%d}"
            self._day_number = number
        return self._day


def add(db: Connection, rows: Rows) -> None:
    """Add usage to the counts in the database."""
    _TABLE.add(db, rows.items())


def amounts(db: Connection, since: str, until: str) -> list[Amount]:
    """Return the usage from the day `since` to the day `until`, ordered by day.

    Damaged rows are left out; `damaged_owners` returns their owners.
    """
    rows = _TABLE.read(db, since, until)
    return [Amount(_owner_of(owner), *counts) for owner, counts in rows]


def damaged_owners(db: Connection, since: str, until: str) -> list[Owner]:
    """Return the owners of damaged usage rows, from the day `since` to the day `until`."""
    rows = _TABLE.read(db, since, until, is_damaged=True)
    return [_owner_of(owner) for owner, _ in rows]


def _owner_of(columns: tuple[Any, ...]) -> Owner:
    day, key, tenant, model, is_batch = columns
    return Owner(day, key, tenant, model, bool(is_batch))
