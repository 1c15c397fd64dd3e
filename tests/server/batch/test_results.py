"""How results become files: tenants take turns, and the database's copies are deleted later."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.server.batch import files, openai, results, stored_batches
from twostroke.server.batch.results import write_result_files
from twostroke.server.batch.runner import BatchRunner
from twostroke.server.batch.stored_batches import Batch
from twostroke.server.http.fair_queue import Readers
from twostroke.server.http.limits import RequestLimits
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from pathlib import Path

_INSERT = "INSERT INTO results (batch, line, kind, body) VALUES (?, ?, 'ok', ?)"


@pytest.fixture
def records(tmp_path: Path) -> Any:
    with closing(Records(tmp_path)) as open_records:
        yield open_records


async def add(records: Records, id_: str, tenant: str, num_lines: int, num_results: int) -> Batch:
    """Store a batch that sends no more requests; some of its lines have no result."""
    with records.files.begin() as file:
        for i in range(num_lines):
            line = {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": {}}
            file.write(json.dumps(line).encode() + b"\n")
        body = files.new_file(files.new_id(), file.num_bytes, "in.jsonl")
        file.keep(body.id)
    batch = Batch(
        id=id_,
        tenant=tenant,
        protocol=openai.PROTOCOL,
        endpoint="/v1/completions",
        input_file=body.id,
        window="24h",
        expires_at=time.time() + 60,
        status="cancelling",
        ends_as="cancelled",
        total=num_lines,
        output_file=files.new_id(),
        error_file=files.new_id(),
    )

    def keep(db: Any) -> None:
        files.insert(db, body, tenant)
        stored_batches.insert(db, batch)
        db.executemany(_INSERT, ((id_, i + 1, b'{"result":1}') for i in range(num_results)))

    await records.write(keep)
    return batch


def count(db: Any) -> dict[str, int]:
    return dict(db.execute("SELECT batch, count(*) FROM results GROUP BY batch"))


def test_writing_results_leaves_the_threads_of_others_alone(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, parse = Event(), results.parse

    def slow(*args: Any) -> Any:
        may_go.wait(60)
        return parse(*args)

    monkeypatch.setattr(results, "parse", slow)

    async def go() -> None:
        batches = [await add(records, f"{i}", "anna", 1, 0) for i in range(40)]
        readers = Readers(1)
        ends = [
            asyncio.create_task(
                write_result_files(records, readers, batch, openai.FORM, RequestLimits())
            )
            for batch in batches
        ]
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(5):
                await asyncio.to_thread(int)  # as uploads do
        finally:
            may_go.set()
        assert {batch.status for batch in await asyncio.gather(*ends)} == {"cancelled"}

    asyncio.run(go())


def test_long_results_of_a_tenant_are_written_between_other_tenants_results(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_WRITE_SLICE_S", 0)
    ended_batches = []

    async def go() -> None:
        batches = [await add(records, "a", "anna", 500, 250), await add(records, "b", "ben", 3, 1)]
        readers = Readers(1)

        async def end(batch: Batch) -> None:
            ended_batches.append(
                await write_result_files(records, readers, batch, openai.FORM, RequestLimits())
            )

        await asyncio.gather(*map(end, batches))

    asyncio.run(go())
    assert [(batch.id, batch.completed, batch.unrun) for batch in ended_batches] == [
        ("b", 1, 2),
        ("a", 250, 250),
    ]
    texts = [records.files.path(str(batch.output_file)).read_text() for batch in ended_batches]
    assert [len(text.splitlines()) for text in texts] == [1, 250]


def test_results_are_dropped_few_at_once(records: Records) -> None:
    async def go() -> None:
        ended_batches = await add(records, "a", "anna", 2500, 2500)
        await add(records, "open", "anna", 5, 5)
        await write_result_files(records, Readers(1), ended_batches, openai.FORM, RequestLimits())
        assert await records.read(count) == {"a": 2500, "open": 5}
        seen = list[int]()
        while await records.write(stored_batches.drop_results):
            seen.append((await records.read(count)).get("a", 0))
        assert seen == [1500, 500, 0]
        large = [("large", i, bytes(3 << 20)) for i in range(4)]
        await records.write(lambda db: db.executemany(_INSERT, large))
        assert await records.write(stored_batches.drop_results)
        assert await records.read(count) == {"large": 2, "open": 5}

    asyncio.run(go())


def test_server_that_died_before_results_were_dropped_leaves_that_to_the_next(
    tmp_path: Path,
) -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("no line is left")

    async def first(records: Records) -> Batch:
        batch = await add(records, "a", "anna", 5, 3)
        await add(records, "open", "anna", 2, 2)
        limits = RequestLimits()
        return await write_result_files(records, Readers(1), batch, openai.FORM, limits)

    async def second(records: Records) -> None:
        runner = BatchRunner(
            records, {"openai": openai.FORM}, RequestLimits(), lambda: 1, lambda _: True
        )
        runner._run = lambda _batch: asyncio.sleep(0)  # type: ignore[assignment, method-assign]
        await runner.start(app)
        async with asyncio.timeout(10):
            while await records.read(count) != {"open": 2}:  # noqa: ASYNC110 of a task
                await asyncio.sleep(0.005)
        await runner.stop()

    with closing(Records(tmp_path)) as records:
        ended_batch = asyncio.run(first(records))
    with closing(Records(tmp_path)) as records:
        asyncio.run(second(records))
        result = asyncio.run(
            records.read(lambda db: stored_batches.find(db, "a", "anna", openai.PROTOCOL))
        )
        assert (result, ended_batch.completed, ended_batch.unrun) == (ended_batch, 3, 2)
        assert len(records.files.path(str(ended_batch.output_file)).read_text().splitlines()) == 3
