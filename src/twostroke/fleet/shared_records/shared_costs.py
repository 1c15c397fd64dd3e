"""Costs that several routers share: the sums of each day, and reserved costs of open requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from twostroke.server.auth.costs import COUNT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twostroke.server.auth.costs import CostOwner, CostRows

_NANOS: Final = COUNT_COLUMNS.index("nanos")
_NUM_COUNTS: Final = len(COUNT_COLUMNS)


class SharedCosts:
    """A router's view of the costs that routers share, and the costs to send to the store.

    An account is a text with the name of an upstream, or `here` for the replicas, and a currency.
    `SharedRecords` sends new rows together with the usage, so that each row is added once.

    Attributes:
        on_report: called after each reply of the store; None if the router has no upstreams.
        rows: costs that were not sent yet.
        reserved: the maximum cost of this router's running requests, in billionths, by account.
        others_reserved: the maximum cost of all other routers' running requests, by account; also
            of routers that have died on this day.
        num_routers: the routers that share the store, with this one.
        damaged: accounts whose sums of the day are damaged in the store.
    """

    def __init__(self) -> None:
        """Start with no costs."""
        self.on_report: Callable[[], None] | None = None
        self.rows: CostRows = {}
        self.reserved: dict[str, int] = {}
        self.others_reserved: dict[str, int] = {}
        self.num_routers = 1
        self.damaged: frozenset[str] = frozenset()
        self._sent_rows: CostRows = {}
        self._day = ""
        self._sums: dict[str, list[int]] = {}  # by account, as the store has reported them last

    @property
    def has_unwritten(self) -> bool:
        """Whether there are costs that the store has not confirmed yet."""
        return bool(self.rows or self._sent_rows)

    def sums(self, day: str, account: str) -> list[int]:
        """Return the counts of an account on a day, in the order of `COUNT_COLUMNS`.

        The counts are sums over all routers, and include this router's rows that the store has not
        confirmed yet.
        """
        counts = list(self._sums.get(account, [0] * _NUM_COUNTS))
        if day != self._day:
            counts = [0] * _NUM_COUNTS
        for rows in (self.rows, self._sent_rows):
            for owner, row in rows.items():
                if owner.day == day and account_of(owner) == account:
                    counts = [count + added for count, added in zip(counts, row, strict=True)]
        return counts

    def unreported_nanos(self, day: str, account: str) -> int:
        """Return this router's cost of a day that the store has not confirmed yet."""
        return sum(
            row[_NANOS]
            for rows in (self.rows, self._sent_rows)
            for owner, row in rows.items()
            if owner.day == day and account_of(owner) == account
        )

    def take(self) -> list[Any]:
        """Return the new rows in the form of the script; the caller sends them until `confirm`."""
        self._sent_rows, self.rows = self.rows, {}
        return [
            (
                owner.day,
                _fields(json.dumps(owner[1:]), counts),
                _fields(account_of(owner), counts),
            )
            for owner, counts in self._sent_rows.items()
        ]

    def confirm(self) -> None:
        """Note that the store has the rows of the last `take`."""
        self._sent_rows = {}

    def request(self, day: str) -> dict[str, Any]:
        """Return the part of a batch about costs: reservations, and the last sums of the day.

        With these sums, the script restores sums that were removed or are damaged in the store.
        """
        if day != self._day:
            self._day, self._sums, self.damaged = day, {}, frozenset()
        sums: dict[str, str] = {}
        for account, counts in self._sums.items():
            sums |= dict(_fields(account, counts))
        reserved = {account: str(nanos) for account, nanos in self.reserved.items()}
        return {"day": day, "sums": sums, "reserved": reserved}

    def take_report(self, report: list[Any], num_routers: int) -> None:
        """Apply the script's report: the sums of the day, and the other routers' reservations."""
        self.num_routers = num_routers
        sums, damaged = dict[str, list[int]](), set[str]()
        for field, count in _pairs(report[0]).items():
            name, _, account = field.partition(" ")
            if name not in COUNT_COLUMNS or not count.isdecimal():
                damaged.add(account)
                continue
            counts = sums.setdefault(account, [0] * _NUM_COUNTS)
            counts[COUNT_COLUMNS.index(name)] = int(count)
        self._sums = self._sums | {key: sums[key] for key in sums if key not in damaged}
        self.damaged = frozenset(damaged)
        self.others_reserved = {key: int(count) for key, count in _pairs(report[1]).items()}
        if self.on_report is not None:
            self.on_report()


def account_of(owner: CostOwner) -> str:
    """Return the account to which a row of costs belongs: its upstream and its currency."""
    return f"{owner.upstream} {owner.currency}"


def _fields(owner: str, counts: list[int]) -> list[tuple[str, str]]:
    named = zip(COUNT_COLUMNS, counts, strict=True)
    return [(f"{name} {owner}", str(count)) for name, count in named if count]


def _pairs(values: list[bytes]) -> Mapping[str, str]:
    """Convert a flat list of names and values, as Redis returns a hash, to a dictionary."""
    texts = [value.decode("utf-8", "replace") for value in values]
    return dict(zip(texts[::2], texts[1::2], strict=True))
