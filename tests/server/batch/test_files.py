"""Stored files that are missing or have no database row; no file is read on the event loop."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

from support.servers import live_server
from support.waiting import wait_for
from twostroke.server.batch import files, lines, runner
from twostroke.server.http.limits import RequestLimits
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records, RecordsError
from twostroke.server.storage.folder import Temporary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest
    from httpx import Response

    from support.servers import LiveServer

MISSING = "The input file is missing from the server's records: upload it again."
MESSAGES = "/v1/messages/batches"
CHAT_BODY = {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}


def line(number: int) -> str:
    chat = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**chat, "body": CHAT_BODY}) + "\n"


def upload(server: LiveServer, text: str) -> Response:
    form = {"file": ("in.jsonl", text.encode())}
    return server.http.post("/v1/files", data={"purpose": "batch"}, files=form)


def begin(server: LiveServer, file_id: str) -> Any:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
    return server.http.post("/v1/batches", json={**body, "completion_window": "24h"}).json()


def finished_batch(server: LiveServer, path: str, status: str = "status") -> Any:
    last = {"failed", "completed", "ended"}
    wait_for(lambda: server.http.get(path).json()[status] in last)
    return server.http.get(path).json()


def names(records: Records) -> set[str]:
    return {path.name for path in records.files.path("x").parent.iterdir()}


def test_a_misspelt_purpose_is_refused_with_the_nearest_one(server: LiveServer) -> None:
    form = {"file": ("in.jsonl", b"{}")}
    refused = server.http.post("/v1/files", data={"purpose": "user_dta"}, files=form)
    assert refused.status_code == 400
    assert "got 'user_dta'. Did you mean 'user_data'?" in refused.json()["error"]["message"]


def test_batch_whose_input_is_missing_fails_with_a_sentence(
    server: LiveServer, records: Records
) -> None:
    file_id = upload(server, line(0)).json()["id"]
    records.files.remove(file_id)
    batch = finished_batch(server, f"/v1/batches/{begin(server, file_id)['id']}")
    assert batch["status"] == "failed"
    assert [error["message"] for error in batch["errors"]["data"]] == [MISSING]
    content = server.http.get(f"/v1/files/{file_id}/content")
    assert content.status_code == 404
    assert "is missing from the server's records" in content.json()["error"]["message"]


def test_lines_that_ended_before_the_input_was_lost_have_their_results(tmp_path: Path) -> None:
    body = {"requests": [{"custom_id": f"{i}", "params": CHAT_BODY} for i in range(160)]}
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(tmp_path, records=records) as first,
    ):
        file_id = upload(first, "".join(map(line, range(160)))).json()["id"]
        first.backend.pause_s = 1.0  # so that not all of them end before the server stops
        chats = begin(first, file_id)["id"]
        messages = first.http.post(MESSAGES, json=body).json()["id"]
        wait_for(lambda: _num_completed(first, chats) > 0)
    for name in names(records):
        records.files.remove(name)
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(tmp_path, records=records) as second,
    ):
        batch = finished_batch(second, f"/v1/batches/{chats}")
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["message"] == MISSING
        counts = batch["request_counts"]
        assert counts["completed"] > 0
        assert counts["completed"] + counts["failed"] == counts["total"] == 160
        results = second.http.get(f"/v1/files/{batch['output_file_id']}/content").text
        assert len(results.splitlines()) == counts["completed"]
        counts = finished_batch(second, f"{MESSAGES}/{messages}", "processing_status")[
            "request_counts"
        ]
        assert (counts["succeeded"] + counts["errored"], counts["processing"]) == (160, 0)
        results = second.http.get(f"{MESSAGES}/{messages}/results")
        assert results.status_code == (200 if counts["succeeded"] else 400)
        assert counts["succeeded"] or MISSING in results.text


def _num_completed(server: LiveServer, batch_id: str) -> int:
    body = server.http.get(f"/v1/batches/{batch_id}").json()
    return int(body["request_counts"]["completed"])


def test_uploads_that_arrive_take_room(server: LiveServer, records: Records) -> None:
    """A tenant may store 250,000 bytes, and a file may have 100,000."""
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {length}\r\n\r\n--b"
    )
    lengths = (300_000, 300_000, 45_000)
    slow = [server.connect() for _ in lengths]
    for connection, length in zip(slow, lengths, strict=True):
        connection.sendall(head.format(key="k", length=length).encode())
    begun = records.files.path("x").parent.parent / "unfinished"
    wait_for(lambda: len([*begun.iterdir()]) == 3)
    assert upload(server, line(0) * (4500 // len(line(0)))).status_code == 200
    refused = upload(server, line(0) * (9500 // len(line(0))))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    body = {
        "requests": [
            {"custom_id": "a", "params": {**CHAT_BODY, "metadata": {"user_id": "x" * 250}}}
        ]
    }
    other = {"authorization": "Bearer other"}
    assert server.http.post(MESSAGES, json=body, headers=other).status_code == 200
    for connection in slow:
        connection.close()
    wait_for(lambda: not [*begun.iterdir()])
    assert upload(server, line(0) * (95_000 // len(line(0)))).status_code == 200


def test_uploads_at_the_same_time_have_one_bound(
    server: LiveServer, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def all_of_it(*_: object) -> AsyncIterator[int]:
        yield 100_000  # as if nothing else had come

    monkeypatch.setattr(files.StorageQuota, "reserve_for_upload", all_of_it)
    text = line(0) * (95_000 // len(line(0)))
    codes = [upload(server, text).status_code for _ in range(3)]
    assert codes == [200, 200, 413]
    assert len(names(records)) == 2


def test_files_of_a_tenant_are_bounded_in_number(tmp_path: Path) -> None:
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(
            tmp_path, ServeOptions(limits=RequestLimits(max_files=2)), records=records
        ) as server,
    ):
        refused = [upload(server, "") for _ in range(3)][-1]
        assert refused.json()["error"]["message"] == "You have 2 files, the limit. Delete some."
        first = server.http.get("/v1/files").json()["data"][0]["id"]
        assert server.http.delete(f"/v1/files/{first}").status_code == 200
        assert upload(server, "").status_code == 200


def test_batch_whose_results_do_not_fit_fails_with_the_results_that_fit(tmp_path: Path) -> None:
    text, room = "".join(map(line, range(8))), 1500
    options = ServeOptions(drain_s=1, limits=RequestLimits(max_files_bytes=len(text) + room))
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(tmp_path, options, records=records) as server,
    ):

        def lines_of(id_: str) -> list[Any]:
            content = server.http.get(f"/v1/files/{id_}/content").text
            return [json.loads(line) for line in content.splitlines()]

        file_id = upload(server, text).json()["id"]
        batch = finished_batch(server, f"/v1/batches/{begin(server, file_id)['id']}")
        assert batch["status"] == "failed"
        assert [error["code"] for error in batch["errors"]["data"]] == ["no_room"]
        done, rest = lines_of(batch["output_file_id"]), lines_of(batch["error_file_id"])
        assert 0 < batch["request_counts"]["completed"] == len(done) < 8
        assert server.http.get(f"/v1/files/{batch['output_file_id']}").json()["bytes"] <= room
        assert [refusal["error"]["code"] for refusal in rest] == ["batch_failed"] * (8 - len(done))
        for id_ in (file_id, batch["output_file_id"], batch["error_file_id"]):
            assert server.http.delete(f"/v1/files/{id_}").status_code == 200
        body = {"requests": [{"custom_id": f"{i}", "params": CHAT_BODY} for i in range(8)]}
        path = f"{MESSAGES}/{server.http.post(MESSAGES, json=body).json()['id']}"
        counts = finished_batch(server, path, "processing_status")["request_counts"]
        assert counts["succeeded"] > 0, "the first batch took its room with it"
        assert counts["succeeded"] + counts["errored"] == 8
        last = json.loads(server.http.get(f"{path}/results").text.splitlines()[-1])
        assert "do not fit" in last["result"]["error"]["error"]["message"]


def test_open_batches_are_bounded_and_need_room(server: LiveServer, records: Records) -> None:
    server.backend.gate.clear()
    text = line(0) + line(1).replace('"1"', '"b"')
    file_id = upload(server, text).json()["id"]
    begun = [begin(server, file_id) for _ in range(3)]
    assert [batch.get("status") for batch in begun] == ["validating"] * 2 + [None]
    assert begun[2]["error"]["message"] == "2 of your batches have not ended, which is the limit."
    body = {"requests": [{"custom_id": "a", "params": CHAT_BODY}]}
    assert server.http.post(MESSAGES, json=body).status_code == 529
    server.backend.gate.set()
    finished_batch(server, f"/v1/batches/{begun[0]['id']}")
    finished_batch(server, f"/v1/batches/{begun[1]['id']}")
    asyncio.run(
        records.write(lambda db: db.execute("UPDATE files SET bytes = 250000, row_digest = ''"))
    )
    assert begin(server, file_id)["error"]["code"] == "request_too_large"


def test_ended_batches_are_bounded_and_their_files_stay(tmp_path: Path) -> None:
    options = ServeOptions(limits=RequestLimits(max_batches=3))
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(tmp_path, options, records=records) as server,
    ):
        file_id = upload(server, line(0)).json()["id"]
        server.backend.gate.clear()
        first = begin(server, file_id)
        server.http.post(MESSAGES, json={"requests": [{"custom_id": "a", "params": CHAT_BODY}]})
        wrong = upload(server, "no JSON\n").json()["id"]
        failed = [begin(server, wrong)["id"] for _ in range(2)]
        for id_ in failed:
            finished_batch(server, f"/v1/batches/{id_}")
        last = [
            finished_batch(server, f"/v1/batches/{begin(server, wrong)['id']}") for _ in range(2)
        ]
        listed = [batch["id"] for batch in server.http.get("/v1/batches").json()["data"]]
        assert listed == [last[1]["id"], last[0]["id"], first["id"]]  # the first has not ended
        server.backend.gate.set()
        done = finished_batch(server, f"/v1/batches/{first['id']}")
        finished_batch(server, f"/v1/batches/{begin(server, wrong)['id']}")
        assert server.http.get(f"/v1/batches/{first['id']}").status_code == 404
        output = server.http.get(f"/v1/files/{done['output_file_id']}/content")
        assert output.status_code == 200
        assert len(server.http.get(MESSAGES).json()["data"]) == 1


def test_file_whose_row_failed_is_deleted_after_the_next_stored_file(
    server: LiveServer, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RecordsError("/records/records.db cannot be written: the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", fail)
        assert upload(server, line(0)).status_code == 503
    assert len(names(records)) == 1, "its record may be on the disk"
    file_id = upload(server, line(0)).json()["id"]
    wait_for(lambda: names(records) == {file_id})


def test_nothing_is_read_or_written_on_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read, num_works = Temporary.write, lines.next_lines, [0, 0]

    def is_on_loop() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    def noted_write(file: Temporary, data: bytes) -> None:
        assert not is_on_loop()
        num_works[0] += 1
        write(file, data)

    def noted_read(*args: Any, **named: Any) -> Any:
        assert not is_on_loop()
        num_works[1] += 1
        return read(*args, **named)

    monkeypatch.setattr(Temporary, "write", noted_write)
    monkeypatch.setattr(runner, "next_lines", noted_read)
    batch = begin(server, upload(server, line(0) + line(1)).json()["id"])
    assert finished_batch(server, f"/v1/batches/{batch['id']}")["status"] == "completed"
    body = {"requests": [{"custom_id": "a", "params": CHAT_BODY}]}
    response = server.http.post(MESSAGES, json=body)
    assert response.status_code == 200
    finished_batch(server, f"{MESSAGES}/{response.json()['id']}", "processing_status")
    assert min(num_works) >= 2
