"""Adds up the tokens and the costs of replicas and upstreams, by day and since the start."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Self

from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.usage_meter import ProxyLog
from twostroke.server.auth.costs import (
    COUNT_COLUMNS,
    NANOS,
    REPLICAS_SIDE,
    CostOwner,
    add,
    amounts,
    damaged_owners,
)
from twostroke.server.auth.usage import billable_usage
from twostroke.server.auth.usage_header import ReportedUsage
from twostroke.server.storage import RecordsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.fleet.router.overflow_file import OverflowSpec
    from twostroke.fleet.router.replica_registry import ReplicaRegistry
    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.server.auth.costs import CostRows
    from twostroke.server.http.request_context import ServedRequest, TokenUsage
    from twostroke.server.storage import Records

_WRITE_INTERVAL_S: Final = 2.0  # a kill loses at most the costs of this time
_HOUR_S: Final = 3600.0
_UNKNOWN_MODEL: Final = "unknown"
# Replicas that answer health checks, so their machine runs and costs money.
_PAID_STATES: Final = (ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.REFUSED)
_logger = logging.getLogger("twostroke.router")


class Sums:
    """Requests, tokens and cost of the replicas or of an upstream; `input` includes `cached`.

    Costs (`nanos`) are in billionths of the currency. `estimated_requests` and `estimated_nanos`
    count the requests whose answers did not report usage, so that their cost was estimated.
    """

    __slots__ = (
        *("cached", "estimated_nanos", "estimated_requests"),
        *("input", "nanos", "output", "requests"),
    )

    def __init__(self) -> None:
        """Start with all sums at zero."""
        self.requests = self.input = self.cached = self.output = self.nanos = 0
        self.estimated_requests = self.estimated_nanos = 0

    @classmethod
    def of(cls, counts: Iterable[int]) -> Self:
        """Return the sums with these counts, which are in the order of `COUNT_COLUMNS`."""
        sums = cls()
        for name, count in zip(COUNT_COLUMNS, counts, strict=True):
            setattr(sums, name, count)
        return sums

    def add(
        self, *, requests: int, used: TokenUsage | None, nanos: int, is_estimated: bool = False
    ) -> None:
        """Add requests with their tokens and their cost, in billionths of the currency's unit."""
        self.requests += requests
        self.nanos += nanos
        if is_estimated:
            self.estimated_requests += requests
            self.estimated_nanos += nanos
        if used is not None:
            self.input += used.prompt_tokens
            self.cached += used.cached_tokens
            self.output += used.completion_tokens

    @property
    def cost(self) -> float:
        """The cost, in the currency's unit."""
        return self.nanos / NANOS

    @property
    def cost_per_million(self) -> float | None:
        """The cost of a million tokens of prompts and answers; None without tokens."""
        num_tokens = self.input + self.output
        return self.cost * 1e6 / num_tokens if num_tokens else None


class CostBook:
    """The costs of a router's replicas and of its upstreams.

    It observes requests that replicas have answered; `add_bought` adds requests that upstreams have
    answered. With a database (`records`), the sums of each day outlive the router. While the
    database cannot be read, today's spending is unknown, and no upstream may be used;
    `why_unknown` gives the reason. Call the methods only in the event loop's thread.

    Attributes:
        today: the sums of this day (UTC), by the name of an upstream, or `here` for the replicas.
        since_start: the sums since the router's start, by the same names.
        bought_nanos: the price that today's tokens of the replicas would have had at upstreams, in
            billionths; each model has the prices of the first upstream with this model.
    """

    def __init__(
        self,
        spec: OverflowSpec,
        fleet: ReplicaRegistry,
        records: Records | None,
        clock: Callable[[], float] = time.time,
        shared_records: SharedRecords | None = None,
    ) -> None:
        """Count costs by the prices of `spec`.

        Args:
            spec: the overflow file.
            fleet: the replicas.
            records: the database for the sums; None if the sums are not stored, or are shared.
            clock: returns the Unix time, which determines the day.
            shared_records: the store of several routers that share the sums; None without a store.
        """
        self._clock = clock if shared_records is None else shared_records.time
        self._shared_records = shared_records
        self._spec = spec
        self._fleet = fleet
        self._records = records
        self._sides = (REPLICAS_SIDE, *(upstream.name for upstream in spec.upstreams))
        self._day = ""
        self._unwritten: CostRows = {}
        self._hours_counted_s = time.monotonic()
        self._hour_remainder = 0.0  # of a billionth, so that nothing is lost between two counts
        self._has_complained = False
        self._is_day_read = records is None and shared_records is None
        self._read_failure = ""
        self._damaged_sides: frozenset[str] = frozenset()  # whose sums of this day are damaged
        self._models_without_price: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.since_start = {side: Sums() for side in self._sides}
        self.today = {side: Sums() for side in self._sides}
        self.bought_nanos = 0
        if shared_records is not None:
            shared_records.costs.on_report = self._take_report
        self._begin_day()

    @property
    def day(self) -> str:
        """The day of `today`, in UTC; a new day begins with new sums."""
        self._begin_day()
        return self._day

    async def start(self) -> None:
        """Read the sums of this day from the database, and start to write new costs to it."""
        await self._read_day()
        self._hours_counted_s = time.monotonic()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop writing costs regularly, and write the costs that are not written yet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._count_hours()
            await self._write(is_last=True)
            if self._records is not None and self._unwritten:
                _logger.error("Costs that were not written are lost.")

    def observe(self, served_request: ServedRequest) -> None:
        """Add a request that a replica has answered, if its tokens count as usage."""
        log = served_request.running
        if not isinstance(log, ProxyLog) or log.upstream:
            return
        used = billable_usage(served_request)
        if used is None:
            return
        model = served_request.known_model or _UNKNOWN_MODEL
        assert log.used is not None
        nanos = self._nanos_of_replicas(model, log.used)
        self._add(REPLICAS_SIDE, model, requests=1, used=used, nanos=nanos)
        self._add_bought_elsewhere(model, log.used)

    def close(self) -> None:
        """Do nothing, since `stop` has already written all costs."""

    def add_bought(
        self,
        upstream: str,
        model: str,
        used: ReportedUsage,
        cost: float,
        *,
        is_estimated: bool = False,
    ) -> None:
        """Add the tokens and the cost of a request that an upstream has computed.

        `cost` is in the currency's unit. `is_estimated` says that the upstream has not reported
        the tokens.
        """
        nanos = round(cost * NANOS)
        self._add(upstream, model, requests=1, used=used, nanos=nanos, is_estimated=is_estimated)

    def why_unknown(self, upstream: str) -> str:
        """Return why today's spending at an upstream is not known; empty if it is known."""
        self._begin_day()
        if not self._is_day_read:
            source = "the records" if self._shared_records is None else "the store"
            return f"What it has cost on this day cannot be read from {source}."
        if upstream in self._damaged_sides:
            return "The record of what it has cost on this day (UTC) is damaged."
        return ""

    def room(self, upstream: str, limit: float) -> float:
        """Return the cost that this router's running requests may reach together at an upstream.

        This is the rest of the day's `limit`. If several routers share the limit, the costs that
        the other routers have reserved are subtracted; while the store does not answer, each router
        has an equal part.
        """
        room, shared = limit - self.spent_today(upstream), self._shared_records
        if shared is None:
            return room
        account = self._account(upstream)
        room -= shared.costs.others_reserved.get(account, 0) / NANOS
        if not shared.is_away:
            return room
        cost_alone = shared.costs.unreported_nanos(self.day, account) / NANOS
        return (room + cost_alone) / shared.costs.num_routers - cost_alone

    def reserve(self, upstream: str, cost: float) -> None:
        """Tell other routers, if they share costs, what this router's running requests may cost.

        `cost` is the maximum total cost of these requests at an upstream, in the currency's unit;
        the next `exchange` sends it.
        """
        if self._shared_records is not None:
            reserved = self._shared_records.costs.reserved
            reserved[self._account(upstream)] = round(cost * NANOS)

    async def exchange(self) -> None:
        """Send this router's reserved costs to the store, and get the other routers' costs."""
        if self._shared_records is not None:
            await self._shared_records.exchange_costs()

    def spent_today(self, upstream: str) -> float:
        """Return the cost of an upstream on this day, in the currency's unit."""
        self._begin_day()
        return self.today[upstream].cost

    @property
    def bought_cost(self) -> float:
        """The cost of `bought_nanos`, in the currency's unit."""
        return self.bought_nanos / NANOS

    @property
    def knows_cost_here(self) -> bool:
        """Whether the overflow file has prices of the replicas, by the hour or by tokens."""
        replicas = self._spec.replicas
        return replicas.price_per_hour is not None or bool(replicas.models)

    def _add_bought_elsewhere(self, model: str, used: ReportedUsage) -> None:
        """Add to `bought_nanos` the price that a replica's tokens would have had elsewhere.

        The price is the price at the first upstream that has the model.
        """
        for upstream in self._spec.upstreams:
            if (bought := upstream.find_model(model)) is not None:
                self.bought_nanos += round(bought.cost(used) * NANOS)
                break

    def _nanos_of_replicas(self, model: str, used: ReportedUsage) -> int:
        """Return the cost of a replica's tokens in billionths; 0 if the model has no price."""
        prices = self._spec.replicas.models
        if not prices:
            return 0
        if model not in prices:
            if model not in self._models_without_price and len(self._models_without_price) < 100:
                self._models_without_price.add(model)
                reason = (
                    "The overflow file has no price of %r in `replicas`: its tokens count as free."
                )
                _logger.warning(reason, model)
            return 0
        return round(prices[model].cost(used) * NANOS)

    def _add(
        self,
        side: str,
        model: str,
        *,
        requests: int,
        used: TokenUsage | None,
        nanos: int,
        is_estimated: bool = False,
    ) -> None:
        self._begin_day()
        for sums in (self.today[side], self.since_start[side]):
            sums.add(requests=requests, used=used, nanos=nanos, is_estimated=is_estimated)
        if self._records is None and self._shared_records is None:
            return
        owner = CostOwner(self._day, side, model, self._spec.currency)
        tokens = (0, 0, 0)
        if used is not None:
            tokens = (used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        estimates = (requests, nanos) if is_estimated else (0, 0)
        self._add_unwritten(owner, (requests, *tokens, nanos, *estimates))

    def _add_unwritten(self, owner: CostOwner, counts: Iterable[int]) -> None:
        if self._shared_records is not None:
            self._shared_records.add_costs(owner, counts)
            return
        sums = self._unwritten.setdefault(owner, [0] * len(COUNT_COLUMNS))
        sums[:] = [total + count for total, count in zip(sums, counts, strict=True)]

    def _begin_day(self) -> None:
        """Reset the sums of `today` if the day (UTC) has changed."""
        day = f"{datetime.fromtimestamp(self._clock(), UTC):%Y-%m-%d}"
        if day != self._day:
            self._day = day
            self.today = {side: Sums() for side in self._sides}
            self.bought_nanos = 0
            self._damaged_sides = frozenset()

    def _account(self, side: str) -> str:
        return f"{side} {self._spec.currency}"

    def _take_report(self) -> None:
        """Replace the sums of `today` by the sums of all routers, which the store has reported."""
        assert self._shared_records is not None
        shared, day = self._shared_records.costs, self.day
        self.today = {side: Sums.of(shared.sums(day, self._account(side))) for side in self._sides}
        names = [upstream.name for upstream in self._spec.upstreams]
        damaged = frozenset(name for name in names if self._account(name) in shared.damaged)
        self._note_damage(damaged - self._damaged_sides)
        self._damaged_sides = damaged
        self._is_day_read = True

    def _note_damage(self, sides: Iterable[str]) -> None:
        for side in sorted(sides):
            text = (
                "The record of what upstream %s has cost on %s is damaged: it is not used on this "
                "day (UTC), since it may have reached max_cost_per_day. Restore a backup to use it."
            )
            _logger.error(text, side, self._day)

    async def _read_day(self) -> None:
        """Read the sums of this day from the database, and add them to `today`, once.

        If reading fails, it is tried again later. Until it succeeds, nothing is written, so that no
        cost is added twice.
        """
        records, day, currency = self._records, self.day, self._spec.currency
        if records is None or self._is_day_read:
            return
        try:
            rows = await records.read(lambda db: amounts(db, day, day))
            damaged = await records.read(lambda db: damaged_owners(db, day, day))
        except RecordsError as error:
            if not self._read_failure:
                self._read_failure = str(error)
                text = (
                    "What the upstreams have cost today cannot be read, and none is used until it "
                    "can: %s"
                )
                _logger.error(text, error)  # noqa: TRY400 the sentence is enough
            return
        if day != self.day:  # the next day has begun meanwhile
            return
        self._is_day_read = True
        for row in rows:
            side = row.owner.upstream
            if side in self.today and row.owner.currency == currency:
                used = ReportedUsage(row.input, row.cached, row.output)
                sums = self.today[side]
                sums.add(requests=row.requests, used=used, nanos=row.nanos)
                sums.estimated_requests += row.estimated_requests
                sums.estimated_nanos += row.estimated_nanos
                if side == REPLICAS_SIDE:
                    self._add_bought_elsewhere(row.owner.model, used)
        if self._read_failure:
            self._read_failure = ""
            _logger.info("The costs of this day were read: upstreams are used again.")
        sides = {owner.upstream for owner in damaged} & {each.name for each in self._spec.upstreams}
        self._damaged_sides = frozenset(sides)
        self._note_damage(sides)

    def _count_hours(self) -> None:
        """Add the price of the replicas since the last count, if they cost by the hour."""
        now_s = time.monotonic()
        elapsed_s, self._hours_counted_s = now_s - self._hours_counted_s, now_s
        price = self._spec.replicas.price_per_hour
        if not price:
            return
        count: float = sum(
            replica.state in _PAID_STATES for replica in self._fleet.replicas.values()
        )
        if self._shared_records is not None:  # each router counts its part of the same replicas
            count /= self._shared_records.costs.num_routers
        cost = count * price * elapsed_s / _HOUR_S * NANOS + self._hour_remainder
        self._hour_remainder = cost % 1
        if cost >= 1:
            self._add(REPLICAS_SIDE, "", requests=0, used=None, nanos=int(cost))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_INTERVAL_S)
            self._count_hours()
            await self._read_day()
            await self._write()

    async def _write(self, *, is_last: bool = False) -> None:
        """Write new costs to the database; if this fails, they are written the next time.

        `is_last` says that the router stops: costs are then written even if the sums of the day
        were never read.
        """
        if self._records is None or not self._unwritten or not (self._is_day_read or is_last):
            return
        rows, self._unwritten = self._unwritten, {}
        try:
            await self._records.write(lambda db: add(db, rows))
        except RecordsError as error:
            for owner, counts in rows.items():
                self._add_unwritten(owner, counts)
            if not self._has_complained:
                _logger.error("Costs wait: %s", error)  # noqa: TRY400 the sentence is enough
            self._has_complained = True
        else:
            self._has_complained = False
