"""The book of costs: a new day begins at zero, and no cost is lost or written twice."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest

from twostroke.fleet.router.cost_book import CostBook
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.overflow_file import BoughtModel, OverflowSpec, UpstreamSpec
from twostroke.fleet.router.replica_registry import ReplicaRegistry
from twostroke.server.auth.costs import NANOS, amounts
from twostroke.server.auth.usage_header import ReportedUsage
from twostroke.server.storage import Records, RecordsError, open_database

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 86_400
USED = ReportedUsage(10, 4, 5)
SPEC = OverflowSpec(
    upstreams=(
        UpstreamSpec(
            name="vendor",
            url="https://vendor.example",
            protocol="openai",
            key_file="key",
            models={"tiny": BoughtModel(model="big-1", input=1, output=1)},
            when=("no_replica",),
            max_cost_per_day=1,
        ),
    )
)


class Failing:
    """Records that cannot be read or written at first."""

    def __init__(self, records: Records, num_failures: int = 0, num_unread: int = 0) -> None:
        """Fail this often, and then use `records`."""
        self._records = records
        self.num_failures = num_failures
        self.num_unread = num_unread

    async def read(self, work: Any) -> Any:
        self.num_unread -= 1
        if self.num_unread >= 0:
            raise RecordsError("The disk is gone.")
        return await self._records.read(work)

    async def write(self, work: Any) -> Any:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise RecordsError("The disk is full.")
        return await self._records.write(work)


def registry() -> ReplicaRegistry:
    return ReplicaRegistry(RouteOptions(replicas=("http://127.0.0.1:9",)))


async def spend(folder: Path, clock: list[float], *costs: float, num_failures: int = 0) -> float:
    """Spend costs in a router's life; return the sum of the day at its end."""
    with closing(Records(folder)) as records:
        failing = cast("Records", Failing(records, num_failures))
        book = CostBook(SPEC, registry(), failing, lambda: clock[0])
        await book.start()
        for cost in costs:
            book.add_bought("vendor", "big-1", USED, cost)
            await book._write()
        await book.stop()
        return book.spent_today("vendor")


def stored(folder: Path) -> list[tuple[Any, ...]]:
    with open_database(folder) as db:
        return [(amount.owner.day, *amount[1:]) for amount in amounts(db, "0000", "9999")]


def test_a_new_day_begins_at_zero(tmp_path: Path) -> None:
    clock = [20_000.0 * DAY_S]
    assert asyncio.run(spend(tmp_path, clock, 0.1, 0.2)) == pytest.approx(0.3)
    assert asyncio.run(spend(tmp_path, clock)) == pytest.approx(0.3)  # from the records
    clock[0] += DAY_S
    assert asyncio.run(spend(tmp_path, clock)) == 0
    assert asyncio.run(spend(tmp_path, clock, 0.5)) == pytest.approx(0.5)
    sums = [(10 * count, 4 * count, 5 * count) for count in (2, 1)]
    assert stored(tmp_path) == [
        ("2024-10-04", 2, *sums[0], round(0.3 * NANOS), 0, 0),
        ("2024-10-05", 1, *sums[1], round(0.5 * NANOS), 0, 0),
    ]


@pytest.mark.parametrize("num_failures", [0, 1, 2, 3])
def test_costs_that_cannot_be_written_wait(num_failures: int, tmp_path: Path) -> None:
    clock = [20_000.0 * DAY_S]
    asyncio.run(spend(tmp_path, clock, 0.1, 0.1, 0.1, num_failures=num_failures))
    assert stored(tmp_path) == [("2024-10-04", 3, 30, 12, 15, round(0.3 * NANOS), 0, 0)]


def test_a_day_that_cannot_be_read_is_unknown_until_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [20_000.0 * DAY_S]
    asyncio.run(spend(tmp_path, clock, 0.3))

    async def restart() -> None:
        with closing(Records(tmp_path)) as records:
            failing = cast("Records", Failing(records, num_unread=2))
            book = CostBook(SPEC, registry(), failing, lambda: clock[0])
            await book.start()
            assert "cannot be read" in book.why_unknown("vendor")
            book.add_bought("vendor", "big-1", USED, 0.1)  # of a request that ran
            for _ in range(2):
                await book._write()
                await book._read_day()
            assert book.why_unknown("vendor") == ""
            assert book.spent_today("vendor") == pytest.approx(0.4)
            await book.stop()

    asyncio.run(restart())
    assert stored(tmp_path) == [("2024-10-04", 2, 20, 8, 10, round(0.4 * NANOS), 0, 0)]
    assert caplog.text.count("none is used until it can") == 1


def test_a_damaged_sum_of_the_day_is_unknown_until_the_day_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [20_000.0 * DAY_S]
    asyncio.run(spend(tmp_path, clock, 0.3))
    with open_database(tmp_path, writes=True) as db:
        db.execute("UPDATE costs SET nanos = 0")

    async def restart() -> None:
        with closing(Records(tmp_path)) as records:
            book = CostBook(SPEC, registry(), records, lambda: clock[0])
            await book.start()
            assert "is damaged" in book.why_unknown("vendor")
            clock[0] += DAY_S
            assert book.why_unknown("vendor") == ""
            await book.stop()

    asyncio.run(restart())
    assert caplog.text.count("what upstream vendor has cost on 2024-10-04 is damaged") == 1


def test_estimates_are_kept_apart_and_outlive_the_router(tmp_path: Path) -> None:
    clock = [20_000.0 * DAY_S]

    async def live(*costs: tuple[float, bool]) -> CostBook:
        with closing(Records(tmp_path)) as records:
            book = CostBook(SPEC, registry(), records, lambda: clock[0])
            await book.start()
            for cost, is_estimated in costs:
                book.add_bought("vendor", "big-1", USED, cost, is_estimated=is_estimated)
            await book.stop()
            return book

    asyncio.run(live((0.3, False), (0.2, True)))
    sums = asyncio.run(live()).today["vendor"]
    assert (sums.requests, sums.nanos) == (2, round(0.5 * NANOS))
    assert (sums.estimated_requests, sums.estimated_nanos) == (1, round(0.2 * NANOS))


def test_costs_that_are_lost_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(spend(tmp_path, [0.0], 0.1, 0.1, num_failures=9))
    assert caplog.text.count("Costs wait: The disk is full.") == 1
    assert caplog.text.count("not written are lost") == 1


def test_many_small_costs_add_up_exactly() -> None:
    book = CostBook(SPEC, registry(), None)
    for _ in range(1000):
        book.add_bought("vendor", "big-1", USED, 1e-6)
    assert book.today["vendor"].nanos == 1000 * 1000
    assert book.since_start["vendor"].cost_per_million == pytest.approx(1e-6 * 1e6 / 15)
