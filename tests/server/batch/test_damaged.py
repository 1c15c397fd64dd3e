"""Inputs and results that the disk damages, while a batch runs and between two servers."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from support.batch_bench import App, Bench
from support.servers import live_server
from support.waiting import until
from twostroke.core.errors import UsageError
from twostroke.server.batch import files, messages, openai, stored_batches
from twostroke.server.batch.offline import BatchProgress, OfflineFiles, ResultFile, run
from twostroke.server.http.internal_requests import InternalResponse
from twostroke.server.http.limits import RequestLimits
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.server.batch.lines import BatchLine
    from twostroke.server.batch.stored_batches import Batch

_NUM_LINES, _NUM_DONE = 200, 16


@pytest.fixture
def records(tmp_path: Path) -> Any:
    with closing(Records(tmp_path)) as open_records:
        yield open_records


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip(path: Path) -> None:
    """Flip a bit of each of the last bytes of a file."""
    rewrite(path, lambda data: data[:-100] + bytes(byte ^ 4 for byte in data[-100:]))


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b'{"custom_id": "stranger"}\n')
    replace(path, lambda path: path.symlink_to(other))


# What becomes of an input, and the code of the batch's error; None if all lines are still there.
DAMAGES: list[tuple[str, Callable[[Path], object], str | None]] = [
    ("bits are flipped", flip, "input_file_changed"),
    ("cut in a line", lambda path: os.truncate(path, path.stat().st_size - 20), "changed"),
    ("cut after a line", lambda path: rewrite(path, _without_last), "changed"),
    ("emptied", lambda path: os.truncate(path, 0), "changed"),
    ("a line is removed", lambda path: rewrite(path, _without_line), "changed"),
    ("lines are appended", lambda path: rewrite(path, lambda data: data + data), None),
    ("rubbish is appended", lambda path: rewrite(path, lambda data: data + b"\xff{"), None),
    ("other lines", lambda path: rewrite(path, lambda data: data.replace(b"id", b"di")), "changed"),
    ("a folder", lambda path: replace(path, lambda path: path.mkdir()), "changed"),
    ("a pipe", lambda path: replace(path, os.mkfifo), "changed"),
    ("a link to another file", link, "changed"),
    ("missing", lambda path: path.unlink(), "input_file_missing"),
]


def _without_last(data: bytes) -> bytes:
    return data[: data.rindex(b"\n", 0, -1) + 1]


def _without_line(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: _NUM_LINES // 2] + lines[_NUM_LINES // 2 + 1 :])


def input_of(records: Records) -> Path:
    [path] = records.files.path("x").parent.iterdir()
    return path


@pytest.mark.parametrize("protocol", [openai.PROTOCOL, messages.PROTOCOL])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("name", "damage", "code"), DAMAGES, ids=[damage[0] for damage in DAMAGES])
def test_results_survive_any_damage_of_the_input(
    records: Records,
    protocol: str,
    name: str,
    damage: Callable[[Path], object],
    code: str | None,
    *,
    restarts: bool,
) -> None:
    app, next_app = App(), App()

    def hold(_id: str, _times: int) -> None:
        if len(app.sent) >= _NUM_DONE:
            app.is_open.clear()

    app.fail = hold  # type: ignore[assignment]
    bench = Bench(records, app)
    bench.protocol = protocol

    async def go() -> Batch:
        await bench.begin(_NUM_LINES, protocol)
        await until(lambda: not app.is_open.is_set())
        if restarts:
            await bench.runner.stop()
            damage(input_of(records))
            last = Bench(records, next_app)
            last.protocol = protocol
            await last.runner.start(next_app)
            return await last.finished_batch()
        damage(input_of(records))
        app.is_open.set()
        app.fail = lambda _id, _times: None
        return await bench.finished_batch()

    batch = asyncio.run(go())
    counts = batch.completed, batch.failed, batch.unrun
    assert all(0 <= count <= batch.total for count in counts), (name, counts)
    assert (batch.total, batch.completed + batch.failed) == (_NUM_LINES, _NUM_LINES)
    lines = bench.lines(batch.output_file)
    assert len(lines) >= batch.completed >= 8
    assert set(lines) <= {f"{number}" for number in range(_NUM_LINES)}, "no stranger's result"
    if code is None:
        assert (batch.status, batch.completed, batch.errors) == ("completed", _NUM_LINES, ())
        return
    # Lines that were read before the damage may be all that there are.
    if batch.status != "completed":
        assert batch.status == "failed"
        assert code in batch.errors[0].code
    else:
        assert not restarts
        assert batch.completed == _NUM_LINES


def test_a_cancelled_batch_with_a_damaged_input_has_its_results(records: Records) -> None:
    app = App()
    bench = Bench(records, app)

    async def go() -> Batch:
        await bench.begin(_NUM_LINES)
        await until(lambda: len(app.sent) >= _NUM_DONE)
        flip(input_of(records))
        await bench.runner.cancel(await bench.read_batch())
        return await bench.finished_batch()

    batch = asyncio.run(go())
    assert batch.status in {"cancelled", "failed"}
    assert 0 < batch.completed <= batch.total == batch.completed + batch.failed
    assert len(bench.lines(batch.output_file)) == batch.completed


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda path: os.truncate(path, 3), 404, "3 of 12 bytes"),
        (lambda path: os.truncate(path, 0), 404, "0 of 12 bytes"),
        (flip, 404, "not those that were stored"),
        (lambda path: path.write_bytes(b'{"a": "xyz"}'), 404, "not those that were stored"),
        (lambda path: replace(path, lambda path: path.mkdir()), 404, "not a file any more"),
        (lambda path: replace(path, os.mkfifo), 404, "not a file any more"),
        (
            lambda path: replace(path, lambda path: path.symlink_to("/etc/passwd")),
            404,
            "not a file",
        ),
        (lambda path: path.unlink(), 404, "is missing"),
    ],
)
def test_damaged_content_is_reported(
    tmp_path: Path, damage: Callable[[Path], object], status: int, words: str
) -> None:
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(tmp_path, records=records) as server,
    ):
        form = {"file": ("x.jsonl", b'{"a": "bcd"}'), "purpose": (None, "batch")}
        id_ = server.http.post("/v1/files", files=form).json()["id"]
        damage(records.files.path(id_))
        answer = server.http.get(f"/v1/files/{id_}/content")
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert server.http.delete(f"/v1/files/{id_}").status_code == 200
        assert server.http.get("/v1/files").json()["data"] == []
        json.loads(server.http.get("/health").text)


def test_files_are_removed_whatever_they_have_become(records: Records) -> None:
    with records.files.begin() as file:
        file.write(b"x")
        file.keep(files.new_id())
    flip(input_of(records))
    for id_ in records.files.ids():
        records.files.remove(id_)
    assert not list(records.files.path("x").parent.iterdir())


def test_a_command_whose_input_changes_keeps_its_results(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    body = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    path.write_text("".join(json.dumps({"custom_id": f"{i}", **body}) + "\n" for i in range(300)))
    progress_counts = list[int]()

    async def send(line: BatchLine) -> InternalResponse:
        if line.custom_id == "9":
            flip(path)
        return InternalResponse(200, {"x-request-id": "r"}, b"{}")

    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    with ResultFile(out, resumes=True) as results, ResultFile(errors, resumes=False) as failures:
        job = OfflineFiles(path, results, failures)
        job.check(RequestLimits())
        progress = BatchProgress(300)
        with pytest.raises(UsageError, match="was changed or damaged while its lines ran"):
            asyncio.run(
                run(
                    job,
                    send,
                    4,
                    RequestLimits(),
                    progress,
                    lambda now: progress_counts.append(now.num_done),
                )
            )
    kept_ids = [json.loads(line)["custom_id"] for line in results.partial.read_text().splitlines()]
    assert {f"{number}" for number in range(9)} < set(kept_ids)
    assert not out.exists()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"id": 3}', b"\xff", 7])
def test_a_damaged_record_of_a_batch_holds_up_no_other(records: Records, body: object) -> None:
    first_app, next_app = App(), App()
    first_app.is_open.clear()

    async def go() -> Batch:
        bench = Bench(records, first_app)
        await bench.begin(3)
        await bench.add(3, id_="spoiled")
        await until(lambda: len(first_app.sent) == 3)
        await bench.runner.stop()
        spoil = "UPDATE batches SET body = ? WHERE id = 'spoiled'"
        await records.write(lambda db: db.execute(spoil, (body,)) and None)
        last = Bench(records, next_app)
        await last.runner.start(next_app)
        listed = await records.read(
            lambda db: stored_batches.page(db, "anna", openai.PROTOCOL, None, 10)
        )
        assert listed is not None
        assert [batch.id for batch in listed] == ["b"]
        return await last.finished_batch()

    assert asyncio.run(go()).completed == 3


_SPOIL = "UPDATE results SET body = ? WHERE line = 3"


@pytest.mark.parametrize("protocol", [openai.PROTOCOL, messages.PROTOCOL])
def test_a_line_whose_result_is_damaged_runs_again(records: Records, protocol: str) -> None:
    first_app, next_app = App(), App()

    async def go() -> tuple[Batch, Bench]:
        bench = Bench(records, first_app)
        bench.protocol = protocol
        first_app.fail = _none_after(first_app, 20)
        await bench.begin(40, protocol)
        await until(lambda: not first_app.is_open.is_set())
        await bench.runner.stop()
        await records.write(lambda db: db.execute(_SPOIL, (b'{"custom_id": "2"}',)) and None)
        last = Bench(records, next_app)
        last.protocol = protocol
        await last.runner.start(next_app)
        return await last.finished_batch(), last

    batch, bench = asyncio.run(go())
    assert (batch.status, batch.completed, batch.failed) == ("completed", 40, 0)
    assert len(bench.lines(batch.output_file)) == 40
    repeated_lines = set(first_app.sent) & set(next_app.sent)
    assert "2" in repeated_lines


def test_a_result_that_is_damaged_as_its_batch_ends_is_reported(records: Records) -> None:
    app = App()

    async def go() -> tuple[Batch, Bench]:
        bench = Bench(records, app)
        app.fail = _none_after(app, 20)
        await bench.begin(40)
        await until(lambda: not app.is_open.is_set())
        await until(lambda: len(_lines_done(records)) >= 8)
        await records.write(lambda db: db.execute(_SPOIL, (b'{"custom_id": "2"}',)) and None)
        app.fail = lambda _id, _times: None
        app.is_open.set()
        return await bench.finished_batch(), bench

    batch, bench = asyncio.run(go())
    assert (batch.status, batch.completed, batch.failed) == ("completed", 39, 1)
    assert len(bench.lines(batch.output_file)) == 39
    [error] = bench.lines(batch.error_file).values()
    assert error["custom_id"] == "2"
    assert "was damaged" in error["error"]["message"]


def _none_after(app: App, count: int) -> Callable[[str, int], None]:
    """Return a function that lets the first `count` batch requests end, and holds the others."""

    def hold(_id: str, _times: int) -> None:
        if len(app.sent) >= count:
            app.is_open.clear()

    return hold


def _lines_done(records: Records) -> set[int]:
    with records.open_reader() as db:
        return stored_batches.count_results(db, "b")[0]


def test_a_command_runs_damaged_results_again_and_keeps_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "in.jsonl"
    body = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    path.write_text("".join(json.dumps({"custom_id": f"{i}", **body}) + "\n" for i in range(9)))
    answer = InternalResponse(200, {"x-request-id": "r"}, b'{"choices": [{"text": "some words"}]}')
    out = tmp_path / "out"
    with (
        ResultFile(out, resumes=True) as output,
        ResultFile(tmp_path / "e", resumes=True) as errors,
    ):
        files_ = OfflineFiles(path, output, errors)
        files_.check(RequestLimits())
        for line in files_.lines(RequestLimits()):
            output.add(line.custom_id, files_.result(line, answer))
    lines = output.partial.read_bytes().splitlines(keepends=True)
    for number, (old, new) in {
        2: (b"words", b"woods"),
        4: (b"{", b"["),
        6: (b'"id"', b'"ie"'),
    }.items():
        lines[number] = lines[number].replace(old, new, 1)
    output.partial.write_bytes(b"".join(lines))
    sent: list[str] = []

    async def send(line: BatchLine) -> InternalResponse:
        sent.append(line.custom_id)
        return answer

    with (
        ResultFile(out, resumes=True) as output,
        ResultFile(tmp_path / "e", resumes=True) as errors,
    ):
        files_ = OfflineFiles(path, output, errors)
        files_.check(RequestLimits())
        asyncio.run(run(files_, send, 1, RequestLimits(), BatchProgress(9), lambda _: None))
    assert sent == ["2", "4", "6"]
    assert f"Damaged results in {output.partial} run again: line 3, 5, 7." in caplog.text
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [f"{i}" for i in range(9)]
    assert {result["response"]["body"]["choices"][0]["text"] for result in results} == {
        "some words"
    }
    assert len({result["id"] for result in results}) == 9
