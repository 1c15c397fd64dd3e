"""OpenAI's files and batches, on a server with `--records`."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.waiting import wait_for
from twostroke.server.batch.lines import WrongLineError, parse
from twostroke.server.http.limits import RequestLimits
from twostroke.server.storage import Records, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

CHAT = "/v1/chat/completions"


def line(id_: object = "a", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
    if url == CHAT:
        body["messages"] = [{"role": "user", "content": "hello"}]
    return {"custom_id": id_, "method": "POST", "url": url, "body": {**body, **fields}}


def upload(server: LiveServer, *lines: object, **form: Any) -> Any:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    files = {"file": ("in.jsonl", text.encode())}
    return server.http.post("/v1/files", data={"purpose": "batch", **form}, files=files).json()


def begin(server: LiveServer, *lines: object, window: str = "24h", url: str = CHAT) -> Any:
    body = {"input_file_id": upload(server, *lines)["id"], "endpoint": url}
    response = server.http.post("/v1/batches", json={**body, "completion_window": window})
    assert response.status_code == 200, response.text
    return response.json()


def finished_batch(server: LiveServer, batch: dict[str, Any]) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        batch = server.http.get(f"/v1/batches/{batch['id']}").json()
        if batch["status"] in {"failed", "completed", "expired", "cancelled"}:
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def content(server: LiveServer, file_id: str) -> list[Any]:
    text = server.http.get(f"/v1/files/{file_id}/content").text
    return [json.loads(line) for line in text.splitlines()]


def test_batch_answers_each_line_as_a_request_would(server: LiveServer) -> None:
    batch = begin(server, *(line(f"n{i}", seed=i) for i in range(10)), line("bad", temperature=-1))
    assert (batch["status"], batch["request_counts"]["total"]) == ("validating", 0)
    batch = finished_batch(server, batch)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 11, "completed": 10, "failed": 1}
    stamps = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert stamps == sorted(stamps)
    assert batch["expires_at"] - batch["created_at"] in {86_399, 86_400}
    results = content(server, batch["output_file_id"])
    assert [result["custom_id"] for result in results] == [f"n{i}" for i in range(10)]
    for line_result in results:
        assert (line_result["error"], line_result["response"]["status_code"]) == (None, 200)
        alone = server.chat(
            max_tokens=2, ignore_eos=True, seed=int(line_result["custom_id"][1:])
        ).json()
        assert line_result["response"]["body"]["choices"] == alone["choices"]
    [failed] = content(server, batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    names = {file["filename"] for file in server.http.get("/v1/files").json()["data"]}
    assert names == {"in.jsonl", f"{batch['id']}_output.jsonl", f"{batch['id']}_errors.jsonl"}


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/embeddings", {"input": "hello", "max_tokens": None, "ignore_eos": None}),
        ("/v1/responses", {"input": "hello", "max_tokens": None, "ignore_eos": None}),
    ],
)
def test_other_endpoints_run_too(server: LiveServer, url: str, fields: dict[str, Any]) -> None:
    batch_line = line("a", url, **fields)
    batch_line["body"] = {
        name: value for name, value in batch_line["body"].items() if value is not None
    }
    batch = finished_batch(server, begin(server, batch_line, url=url))
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_all_odd_lines_are_named_and_none_is_run(server: LiveServer) -> None:
    batch = begin(
        server,
        line("a"),
        "{not json",
        line("a"),
        line("b", url="/v1/completions"),
        line("c", stream=True),
        "",
        line(7),
        {**line("d"), "method": "GET"},
        {"custom_id": "e", "method": "POST", "url": CHAT},
        "[" * 100,
    )
    batch = finished_batch(server, batch)
    assert batch["status"] == "failed"
    assert batch["failed_at"]
    results = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
    assert results == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
        (5, "invalid_value"),
        (7, "invalid_value"),
        (8, "invalid_method"),
        (9, "missing_required_parameter"),
        (10, "invalid_json_line"),
    ]
    assert "line 1" in batch["errors"]["data"][1]["message"]
    assert batch["output_file_id"] is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{bad", "The line is not valid JSON: object keys must be strings"),
        (b"[]", "The line is not a JSON object."),
        (
            b'{"custom_id":"a\\ud800"}',
            "JSON: a string has half of a surrogate pair.",
        ),
        (b'{"custom_id":"a\xff"}', "The line is not valid JSON: it is not UTF-8."),
        (b'{"method":"POST"}', "'custom_id' must be a text of 1 to 512 characters."),
        (b'{"custom_id":"a","method":"POST","url":"/","body":"x"}', "'body' is not a JSON object."),
        (b'{"custom_id":1e999}', "'custom_id' must be a smaller number."),
        (b'\xef\xbb\xbf{"url":{"a":[1e999]}}', "'url[...][0]' must be a smaller number."),
        (
            b'{"custom_id":"a","method":"POST","url":"/","body":{"stream":1e999}}',
            "'body.stream' must be a smaller number.",
        ),
    ],
)
def test_errors_of_lines_are_named(text: bytes, sentence: str) -> None:
    with pytest.raises(WrongLineError, match=re.escape(sentence)):
        parse(1, text, RequestLimits())


def test_byte_order_marks_between_lines_are_skipped(server: LiveServer) -> None:
    mark = "\ufeff"  # of each file, where several were joined
    texts = [mark, mark + json.dumps(line("a")), f"{mark}\r", json.dumps(line("b")), mark]
    batch = finished_batch(server, begin(server, *texts))
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_empty_and_too_long_inputs_fail(server: LiveServer) -> None:
    for lines, code in (
        ([""], "empty_file"),
        ([line(f"{i}") for i in range(61)], "too_many_tasks"),
    ):
        batch = finished_batch(server, begin(server, *lines))
        assert batch["errors"]["data"][0]["code"] == code


def test_cancelled_batch_keeps_its_results(server: LiveServer) -> None:
    server.backend.gate.clear()
    batch = begin(server, line("a"), line("b"))
    wait_for(lambda: server.num_busy == 2)
    cancelled = server.http.post(f"/v1/batches/{batch['id']}/cancel").json()
    assert cancelled["status"] in {"cancelling", "cancelled"}
    server.backend.gate.set()
    batch = finished_batch(server, batch)
    assert batch["status"] == "cancelled"
    assert batch["cancelling_at"] <= batch["cancelled_at"]
    assert {result["error"]["code"] for result in content(server, batch["error_file_id"])} == {
        "batch_cancelled"
    }
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    assert server.http.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelled"


def test_ended_batch_cannot_be_cancelled(server: LiveServer) -> None:
    batch = finished_batch(server, begin(server, line()))
    assert server.http.post(f"/v1/batches/{batch['id']}/cancel").status_code == 400


def test_lines_that_are_not_run_in_time_are_errors(server: LiveServer) -> None:
    server.backend.gate.clear()
    batch = begin(server, line("a"), line("b"), window="1s")
    time.sleep(1.1)
    server.backend.gate.set()
    batch = finished_batch(server, batch)
    assert batch["status"] == "expired"
    assert batch["expired_at"]
    codes = [result["error"]["code"] for result in content(server, batch["error_file_id"])]
    assert codes == ["batch_expired"] * 2


def test_tenants_do_not_see_each_other(server: LiveServer) -> None:
    batch = finished_batch(server, begin(server, line()))
    other = {"authorization": "Bearer other"}
    for path in (
        f"/v1/batches/{batch['id']}",
        f"/v1/files/{batch['input_file_id']}",
        f"/v1/files/{batch['output_file_id']}/content",
    ):
        assert server.http.get(path, headers=other).status_code == 404
    cancel = f"/v1/batches/{batch['id']}/cancel"
    assert server.http.post(cancel, headers=other).status_code == 404
    path = f"/v1/files/{batch['input_file_id']}"
    assert server.http.delete(path, headers=other).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert server.http.get(path, headers=other).json()["data"] == []
    body = {
        "input_file_id": batch["input_file_id"],
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    assert server.http.post("/v1/batches", json=body, headers=other).status_code == 404


def test_lists_come_in_pages(server: LiveServer) -> None:
    batch_ids = [finished_batch(server, begin(server, line()))["id"] for _ in range(3)]
    first = server.http.get("/v1/batches", params={"limit": 2}).json()
    assert [item["id"] for item in first["data"]] == batch_ids[:0:-1]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (
        True,
        batch_ids[2],
        batch_ids[1],
    )
    rest = server.http.get("/v1/batches", params={"after": first["last_id"]}).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (batch_ids[:1], False)
    inputs = {"purpose": "batch", "order": "asc", "limit": 2}
    files = server.http.get("/v1/files", params=inputs).json()
    assert (len(files["data"]), files["has_more"]) == (2, True)
    body = server.http.get("/v1/files", params={**inputs, "after": files["last_id"]}).json()
    assert (len(body["data"]), body["has_more"]) == (1, False)
    for path, wrong in (("/v1/files", "order"), ("/v1/batches", "after"), ("/v1/batches", "limit")):
        response = server.http.get(path, params={wrong: "x"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, wrong)


def test_files_are_bounded_and_deleted(server: LiveServer) -> None:
    assert upload(server, "x" * 100_001)["error"]["code"] == "request_too_large"
    file_ids = [upload(server, "x" * 100_000)["id"] for _ in range(2)]
    assert upload(server, "x" * 60_000)["error"]["code"] == "request_too_large"
    assert server.http.delete(f"/v1/files/{file_ids[0]}").json() == {
        "id": file_ids[0],
        "object": "file",
        "deleted": True,
    }
    assert server.http.get(f"/v1/files/{file_ids[0]}").status_code == 404
    assert upload(server, "x" * 60_000)["bytes"] == 60_000


def test_input_of_an_open_batch_stays(server: LiveServer) -> None:
    server.backend.gate.clear()
    batch = begin(server, line())
    wait_for(lambda: server.num_busy == 1)
    assert server.http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 400
    server.backend.gate.set()
    finished_batch(server, batch)
    assert server.http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_wrong_uploads_are_refused(server: LiveServer) -> None:
    post = server.http.post
    assert upload(server, "x", purpose="batch_output")["error"]["param"] == "purpose"
    assert upload(server, "x", other="1")["error"]["param"] == "other"
    assert post("/v1/files", data={"purpose": "batch"}).status_code == 415
    only = {"purpose": (None, b"batch")}
    assert post("/v1/files", files=only).json()["error"]["param"] == "file"
    unnamed = post("/v1/files", files=only | {"file": (None, b"x")}).json()
    assert unnamed["filename"] == "file"
    server.http.delete(f"/v1/files/{unnamed['id']}")
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\n", b"--x--", b"y" * 10_000, b"--x\r\n" + b"h" * 10_000):
        assert post("/v1/files", content=body, headers=headers).status_code == 400
    assert server.http.get("/v1/files").json()["data"] == []


def test_heads_and_fields_of_forms_are_bounded(server: LiveServer) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for form, words in (
        (b"--x\r\n" + b"h" * 10_000, "headers larger than 8192 bytes"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"b" * 10_000, "longer than"),
        (b"--x" + b"\r\nX: y\r\n\r\n\r\n--x" * 20, "twice"),
    ):
        parts = (form[i : i + 500] for i in range(0, len(form), 500))
        answer = server.http.post("/v1/files", content=parts, headers=headers)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_boundary_is_found_wherever_the_form_is_cut(server: LiveServer) -> None:
    text = b"\r\n--b\r\n--bounda\r\n"
    head = b'Content-Disposition: form-data; name="'
    form = b'--boundary\r\n%bpurpose"\r\n\r\nbatch\r\n--boundary\r\n' % head
    form += b'%bfile"; filename="a"\r\n\r\n%b\r\n--boundary--\r\n' % (head, text)
    headers = {"content-type": "multipart/form-data; boundary=boundary"}
    for size in (1, 3, 7, 1000):
        parts = (form[i : i + size] for i in range(0, len(form), size))
        body = server.http.post("/v1/files", content=parts, headers=headers).json()
        assert server.http.get(f"/v1/files/{body['id']}/content").content == text


def test_clients_go_before_lines(server: LiveServer) -> None:
    server.backend.gate.clear()
    begin(server, *(line(f"{i}") for i in range(40)))
    wait_for(lambda: server.num_busy > 0)
    services = {open_request.service_tier for open_request in server.api._open_requests}
    assert services == {"batch"}
    assert server.api.num_running == 0
    server.backend.gate.set()


def test_server_without_records_says_how_to_keep_them(shared_server: LiveServer) -> None:
    for path in ("/v1/files", "/v1/batches"):
        response = shared_server.http.get(path)
        assert response.status_code == 404
        assert "--records" in response.json()["error"]["message"]


def test_next_server_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    with closing(Records(folder)) as records, live_server(tmp_path, records=records) as first:
        first.backend.gate.clear()
        batch = begin(first, *(line(f"{i}") for i in range(30)))
        wait_for(lambda: first.num_busy > 0)
    with closing(Records(folder)) as records, live_server(tmp_path, records=records) as second:
        batch = finished_batch(second, batch)
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        results = [result["custom_id"] for result in content(second, batch["output_file_id"])]
        assert results == [f"{i}" for i in range(30)]


def test_clients_are_answered_while_the_disk_is_full(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twostroke.server.batch.runner._DISK_PAUSE_S", 0.1)
    server.backend.gate.clear()
    batch = begin(server, *(line(f"{i}") for i in range(3)))
    wait_for(lambda: server.num_busy == 3)
    keeping: Any = server.api.batches
    write = keeping._records.write

    async def fail(_work: object) -> None:
        raise RecordsError("/records/records.db cannot be written: the disk is full.")

    keeping._records.write = fail
    server.backend.gate.set()
    wait_for(lambda: "records.db cannot be written" in caplog.text)
    assert server.chat(max_tokens=1).status_code == 200
    refused = server.http.delete(f"/v1/files/{batch['input_file_id']}")
    assert refused.status_code == 503
    assert "/records" not in refused.text
    keeping._records.write = write
    assert finished_batch(server, batch)["request_counts"]["completed"] == 3
