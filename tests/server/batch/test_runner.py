"""How batches run when requests are refused, engines die, keys are revoked and clocks jump."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.batch_bench import DAY_S, App, Bench
from support.waiting import until
from twostroke.core.errors import EngineDiedError, OverloadedError, TwostrokeError
from twostroke.server.batch import messages, openai, queueing
from twostroke.server.batch.stored_batches import Batch
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def records(tmp_path: Path) -> Any:
    with closing(Records(tmp_path)) as open_records:
        yield open_records


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.server.batch.queueing._MAX_PAUSE_S", 0.05)


@pytest.mark.parametrize("protocol", [openai.PROTOCOL, messages.PROTOCOL])
def test_request_that_kills_engines_is_given_up(records: Records, protocol: str) -> None:
    app = App(lambda id_, _: EngineDiedError("It died.") if id_ == "3" else None)
    bench = Bench(records, app)
    bench.protocol = protocol

    async def go() -> Batch:
        await bench.begin(6, protocol)
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert (batch.status, batch.completed, batch.failed) == ("completed", 5, 1)
    assert app.sent == {**{f"{i}": 1 for i in range(6)}, "3": 3}
    if protocol == openai.PROTOCOL:
        response = bench.lines(batch.error_file)["3"]["response"]
        error = response["body"]["error"]
        assert (response["status_code"], error["code"]) == (400, "engine_killer")
    else:
        result = bench.lines(batch.output_file)["3"]["result"]
        assert result["type"] == "errored"
        error = result["error"]["error"]
    assert error["message"] == "The engine died 3 times while it computed this request."


def test_deaths_are_counted_across_servers(records: Records) -> None:
    died = EngineDiedError("It died.")
    next_app = App(lambda _id, _times: died)

    async def first() -> None:
        app = App()

        def fail(_id: str, times: int) -> TwostrokeError:
            if times == 2:
                app.is_open.clear()  # so that the third goes on no further
            return died

        app.fail = fail
        bench = Bench(records, app)
        await bench.begin(1)
        await until(lambda: app.sent.get("0") == 3)
        await bench.runner.stop()

    async def second() -> Batch:
        bench = Bench(records, next_app)
        await bench.runner.start(next_app)
        return await bench.finished_batch()

    asyncio.run(first())
    assert asyncio.run(second()).failed == 1
    assert next_app.sent == {"0": 1}
    assert asyncio.run(records.read(lambda db: db.execute("SELECT * FROM deaths").fetchall())) == []


def test_refused_lines_pause_together_and_say_so_once(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    full = OverloadedError("The queue is full.")
    app.fail = lambda id_, times: full if int(id_) < 8 and times == 1 else None
    bench = Bench(records, app)

    async def go() -> Batch:
        app.is_open.clear()
        await bench.begin(40)
        await until(lambda: len(app.sent) == 8)
        app.is_open.set()
        return await bench.finished_batch()

    with caplog.at_level(logging.INFO, "twostroke.serve"):
        batch = asyncio.run(go())
    assert batch.completed == 40
    assert sum(app.sent.values()) == 48
    [message] = [record.getMessage() for record in caplog.records if "paus" in record.getMessage()]
    assert "refused with status 429 (overloaded)" in message


def test_a_line_that_waited_for_room_minds_a_pause(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.batch.queueing._MAX_PAUSE_S", 0.4)
    times_s: list[float] = []

    def fail(_id: str, _times: int) -> TwostrokeError | None:
        times_s.append(time.monotonic())
        return OverloadedError("Full.") if len(times_s) == 1 else None

    bench = Bench(records, App(fail), num_together=1)

    async def go() -> Batch:
        await bench.begin(3)
        return await bench.finished_batch()

    assert asyncio.run(go()).completed == 3
    assert times_s[1] - times_s[0] > 0.2


def test_fewer_lines_are_sent_while_few_are_taken(records: Records) -> None:
    """The server refuses more than two requests at a time, as for a key with that limit."""
    running, refused = [0], [0]

    class Narrow(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            running[0] += 1
            is_full = running[0] > 2
            refused[0] += is_full
            self.fail = lambda _id, _times: OverloadedError("Two.") if is_full else None
            try:
                await asyncio.sleep(0 if is_full else 0.01)
                await super().__call__(scope, receive, send)
            finally:
                running[0] -= 1

    bench = Bench(records, Narrow())

    async def go() -> Batch:
        await bench.begin(60)
        return await bench.finished_batch()

    assert asyncio.run(go()).completed == 60
    assert refused[0] < 120


def test_tenants_take_turns_however_many_batches_one_has(records: Records) -> None:
    async def run() -> None:
        order, bench = list[str](), Bench(records, App(), num_together=1)

        def may_run(tenant: str) -> bool:  # is asked when the line of a tenant has room
            order.append(tenant)
            return True

        bench.runner._may_run = may_run
        await bench.runner.start(bench.app)
        for i in range(8):
            await bench.add(10, id_=f"a{i}")
        await bench.add(10, id_="b", tenant="ben")
        await until(lambda: order.count("ben") == 10)
        since = order[order.index("ben") :]
        assert len(since) < 40  # of the 90 lines
        await bench.runner.stop()

    asyncio.run(run())


def test_batch_of_a_tenant_without_a_key_is_cancelled(records: Records) -> None:
    valid = {"anna"}
    app = App()
    bench = Bench(records, app, lambda tenant: tenant in valid)

    async def go() -> Batch:
        app.is_open.clear()
        await bench.begin(20)
        await until(lambda: len(app.sent) == 8)
        valid.clear()
        app.is_open.set()
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert batch.status == "cancelled"
    assert [error.code for error in batch.errors] == ["no_valid_key"]
    assert len(app.sent) == 8
    assert batch.completed + batch.failed == 20
    body = openai.body_of(batch, None)
    assert body.errors is not None
    assert "no API key" in body.errors.data[0].message


def test_batch_that_no_runner_has_can_be_cancelled(records: Records) -> None:
    """This happens while a server drains, and before a server has read its batches."""
    app, next_app = App(), App()

    async def first() -> None:
        app.is_open.clear()
        bench = Bench(records, app)
        await bench.begin(3)
        await until(lambda: len(app.sent) == 3)
        await bench.runner.stop()
        assert (await bench.runner.cancel(await bench.read_batch())).status == "cancelling"

    async def second() -> Batch:
        bench = Bench(records, next_app)
        await bench.runner.start(next_app)
        return await bench.finished_batch()

    asyncio.run(first())
    assert asyncio.run(second()).status == "cancelled"
    assert not next_app.sent


def test_batch_that_is_cancelled_after_it_was_read_does_not_run(records: Records) -> None:
    app = App()

    async def go() -> Batch:
        app.is_open.clear()
        bench = Bench(records, app)
        await bench.begin(3)
        await until(lambda: len(app.sent) == 3)
        await bench.runner.stop()
        stale = await bench.read_batch()
        app.sent.clear()
        app.is_open.set()
        bench = Bench(records, app)
        await bench.runner.cancel(stale)
        bench.runner._app = app
        bench.runner._start_task(stale)
        return await bench.finished_batch()

    assert asyncio.run(go()).status == "cancelled"
    assert not app.sent


def test_batch_whose_lines_all_run_ends_with_its_key(records: Records) -> None:
    valid = {"anna"}
    app = App()
    app.is_open.clear()
    bench = Bench(records, app, lambda tenant: tenant in valid)

    async def go() -> Batch:
        await bench.begin(3)
        await until(lambda: len(app.sent) == 3)
        valid.clear()
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert (batch.status, batch.completed, batch.failed) == ("cancelled", 0, 3)
    assert [error.code for error in batch.errors] == ["no_valid_key"]


@pytest.mark.parametrize("jump_s", [-40 * DAY_S, 40 * DAY_S])
def test_clock_that_jumps_does_not_change_the_time_left(
    records: Records, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The time left stays the same while a server runs, and for the next server."""
    wall, boot_s = time.time, [1000.0]
    monkeypatch.setattr(queueing, "since_boot_s", lambda: boot_s[0])
    monkeypatch.setattr("twostroke.server.batch.runner._CHECK_INTERVAL_S", 0.01)

    def closed() -> App:
        app = App()
        app.is_open.clear()
        return app

    async def first() -> None:
        app = closed()
        bench = Bench(records, app)
        await bench.begin(1)
        await until(lambda: bool(app.sent))
        monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
        boot_s[0] += DAY_S - 1
        await asyncio.sleep(0.1)
        assert (await bench.read_batch()).is_open
        await bench.runner.stop()

    async def second() -> Batch:
        app = closed()
        bench = Bench(records, app)
        await bench.runner.start(app)
        await asyncio.sleep(0.1)
        assert (await bench.read_batch()).status == "in_progress"
        boot_s[0] += 2
        return await bench.finished_batch()

    asyncio.run(first())
    assert asyncio.run(second()).status == "expired"


def test_clock_counts_once_the_machine_has_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    batch = Batch(
        id="b",
        tenant="",
        protocol=openai.PROTOCOL,
        endpoint="/v1/completions",
        input_file="f",
        window="24h",
        expires_at=now_s + DAY_S,
        since={"validating": now_s},
    )
    before = queueing.with_boot_deadline(batch)
    assert queueing.seconds_left(before) == pytest.approx(DAY_S, abs=1)
    monkeypatch.setattr(queueing, "boot_id", lambda: "another")
    for passed_s, left_s in ((3600, DAY_S - 3600), (2 * DAY_S, -DAY_S), (-5 * DAY_S, DAY_S)):
        monkeypatch.setattr(time, "time", lambda passed_s=passed_s: now_s + passed_s)
        assert queueing.seconds_left(before) == pytest.approx(left_s, abs=1)
    anew = queueing.with_boot_deadline(replace(before))
    monkeypatch.setattr(time, "time", lambda: now_s + 40 * DAY_S)
    assert queueing.seconds_left(anew) == pytest.approx(DAY_S, abs=1)
