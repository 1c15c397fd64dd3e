"""How batches end when an unexpected error occurs."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from support.batch_bench import App, Bench
from support.waiting import until
from twostroke.server.batch import lines, messages, openai
from twostroke.server.http.errors import ServerStoppingError
from twostroke.server.http.limits import RequestLimits
from twostroke.server.storage import Records, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.core.errors import TwostrokeError
    from twostroke.server.batch.stored_batches import Batch


@pytest.fixture
def records(tmp_path: Path) -> Any:
    with closing(Records(tmp_path)) as open_records:
        yield open_records


@pytest.mark.parametrize("protocol", [openai.PROTOCOL, messages.PROTOCOL])
def test_unexpected_error_ends_a_batch_with_its_results_so_far(
    records: Records, protocol: str
) -> None:
    app = App()
    bench = Bench(records, app, num_together=1)
    bench.protocol = protocol

    def fail(id_: str, _: int) -> TwostrokeError | None:
        if id_ == "3":
            raise ZeroDivisionError
        return None

    app.fail = fail

    async def go() -> Batch:
        await bench.begin(5, protocol)
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert (batch.status, batch.completed + batch.failed) == ("failed", 5)
    assert 3 <= batch.completed < 5
    assert [error.code for error in batch.errors] == ["internal_error"]
    assert set(bench.lines(batch.output_file)) >= {"0", "1", "2"}


def test_batch_whose_results_cannot_be_written_ends(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> Batch:
        raise ZeroDivisionError

    monkeypatch.setattr("twostroke.server.batch.results.write_result_files", broken)
    bench = Bench(records, App())

    async def go() -> Batch:
        await bench.begin(5)
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert (batch.status, batch.failed, batch.output_file) == ("failed", 5, None)
    assert [error.code for error in batch.errors] == ["internal_error"]


def test_batch_whose_time_passes_while_a_failure_ends_its_lines_has_expired(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            except asyncio.CancelledError:
                await asyncio.sleep(0.4)
                raise

    app, num_asked = Slow(), count()
    app.is_open.clear()
    bench = Bench(records, app, lambda _: next(num_asked) < 2)
    ends_s = time.monotonic() + 0.2
    name = "twostroke.server.batch.runner.seconds_left"
    monkeypatch.setattr(name, lambda _: ends_s - time.monotonic())

    async def go() -> Batch:
        await bench.begin(5)
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert (batch.status, batch.failed) == ("expired", 5)


def test_batches_begin_once_the_records_can_be_read(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.batch.runner._DISK_PAUSE_S", 0.05)
    closed, app = App(), App()
    closed.is_open.clear()
    read = records.read

    async def first() -> None:
        bench = Bench(records, closed)
        await bench.begin(3)
        await until(lambda: len(closed.sent) == 3)
        await bench.runner.stop()
        with pytest.raises(ServerStoppingError):
            await bench.add(3, id_="late")

    async def failing(*_: object) -> Any:
        monkeypatch.setattr(records, "read", read)
        raise RecordsError("The database cannot be used.")

    async def second() -> Batch:
        bench = Bench(records, app)
        monkeypatch.setattr(records, "read", failing)
        await bench.runner.start(app)
        await until(lambda: len(app.sent) == 3)
        return await bench.finished_batch()

    asyncio.run(first())
    assert asyncio.run(second()).status == "completed"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_line_as_long_as_the_limit_is_read_with_its_end(tmp_path: Path, end: bytes) -> None:
    text = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'
    path = tmp_path / "in.jsonl"
    path.write_bytes((text + end) * (2 if end else 1))
    limits = RequestLimits(max_body_bytes=len(text))
    found_lines, next_offset = lines.next_lines(path, lines.ReadOffset(), set(), limits)
    assert (len(found_lines), next_offset) == (2 if end else 1, None)
    with pytest.raises(lines.WrongLineError):
        lines.next_lines(
            path, lines.ReadOffset(), set(), RequestLimits(max_body_bytes=len(text) - 1)
        )


def test_batch_that_is_made_while_others_are_read_runs_once(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.batch.runner._START_TIMEOUT_S", 0.0)
    app, read = App(), records.read
    may_go_on = asyncio.Event()

    async def slow(work: Any) -> Any:
        if getattr(work, "__name__", "") == "open_batches":
            await may_go_on.wait()
        return await read(work)

    async def go() -> Batch:
        monkeypatch.setattr(records, "read", slow)
        app.is_open.clear()
        bench = Bench(records, app)
        await bench.begin(3)
        may_go_on.set()
        await until(lambda: len(app.sent) == 3)
        await asyncio.sleep(0.2)
        app.is_open.set()
        return await bench.finished_batch()

    assert asyncio.run(go()).completed == 3
    assert set(app.sent.values()) == {1}
