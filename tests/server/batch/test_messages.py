"""Anthropic's message batches, on a server with `--records`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from support.waiting import wait_for
from twostroke.server.storage import RecordsError

if TYPE_CHECKING:
    import pytest

    from support.servers import LiveServer

PATH = "/v1/messages/batches"
OTHER = {"authorization": "Bearer other"}


def batch_request(id_: object = "a", **params: Any) -> dict[str, Any]:
    chat_params = {
        "max_tokens": 2,
        "temperature": 0,
        "messages": [{"role": "user", "content": "hello"}],
    }
    return {"custom_id": id_, "params": {**chat_params, **params}}


def begin(server: LiveServer, *requests: object) -> Any:
    response = server.http.post(PATH, json={"requests": requests})
    assert response.status_code == 200, response.text
    return response.json()


def finished_batch(server: LiveServer, batch: dict[str, Any]) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        batch = server.http.get(f"{PATH}/{batch['id']}").json()
        if batch["processing_status"] == "ended":
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def results(server: LiveServer, batch: dict[str, Any]) -> dict[str, Any]:
    lines = server.http.get(batch["results_url"]).text.splitlines()
    return {result["custom_id"]: result["result"] for result in map(json.loads, lines)}


def refusal(server: LiveServer, content: bytes | str) -> str:
    headers = {"content-type": "application/json"}
    response = server.http.post(PATH, content=content, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


def test_batch_answers_each_request_as_it_would_be_alone(server: LiveServer) -> None:
    wrong = {
        "bad": batch_request("bad", temperature=2),
        "nobody": batch_request("nobody", model="nobody"),
    }
    begun_batch = begin(server, *(batch_request(f"n{i}") for i in range(10)), *wrong.values())
    assert begun_batch["processing_status"] == "in_progress"
    assert begun_batch["request_counts"]["processing"] == 12
    assert (begun_batch["ended_at"], begun_batch["results_url"], begun_batch["archived_at"]) == (
        None,
        None,
        None,
    )
    batch = finished_batch(server, begun_batch)
    assert batch["request_counts"] == {
        **dict.fromkeys(("processing", "canceled", "expired"), 0),
        "succeeded": 10,
        "errored": 2,
    }
    assert batch["created_at"] < batch["ended_at"] < batch["expires_at"]
    result = results(server, batch)
    assert list(result) == [*(f"n{i}" for i in range(10)), "bad", "nobody"]
    alone = server.http.post("/v1/messages", json=batch_request()["params"]).json()
    for i in range(10):
        assert result[f"n{i}"]["type"] == "succeeded"
        assert result[f"n{i}"]["message"]["content"] == alone["content"]
    for id_, kind in (("bad", "invalid_request_error"), ("nobody", "not_found_error")):
        assert result[id_]["type"] == "errored"
        assert result[id_]["error"]["error"]["type"] == kind
    assert server.http.get("/v1/files").json()["data"] == []


def test_wrong_requests_are_refused_with_their_place(server: LiveServer) -> None:
    for requests, reason in (
        (
            [batch_request("a"), batch_request("b"), batch_request("a")],
            "requests[2].custom_id is the custom_id of requests[0]",
        ),
        (
            [batch_request("a"), batch_request("b", stream=True)],
            "In requests[1]: 'stream' is not possible in a batch.",
        ),
        (
            [batch_request("a"), {"custom_id": "b", "params": []}],
            "requests[1].params must be an object",
        ),
        ([batch_request("")], "In requests[0]: 'custom_id' must be a text"),
        (
            [batch_request("a", system="x" * 4000)],
            "In requests[0]: The line is larger than 4000 bytes.",
        ),
        ([batch_request(f"{i}", messages=0) for i in range(61)], "requests has more than 60 items"),
        ([7] * 61, "requests has more than 60 items"),  # before any is decoded
        ([batch_request("a"), 7], "requests[1] must be an object"),
        ([batch_request(7)], "requests[0].custom_id must be a string"),
        ([], "requests must have at least 1 item"),
        ([{"params": {}}], "requests[0].custom_id is missing"),
    ):
        assert reason in refusal(server, json.dumps({"requests": requests}))
    for text in (b"", b"{", b'{"requests": [{"custom_id": "\xff"}]}', b'{"a": ' + b"[" * 5000):
        assert refusal(server, text)
    large = server.http.post(PATH, json={"requests": [batch_request("a" * 20_000)]})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert server.http.get(PATH).json()["data"] == []
    folders = server.api.batches._records.files  # type: ignore[union-attr]
    assert not [*folders._files.iterdir(), *folders._unfinished.iterdir()]


def test_pretty_printed_request_is_one_line(server: LiveServer) -> None:
    text = json.dumps({"requests": [batch_request("a"), batch_request("b")]}, indent=4)
    response = server.http.post(PATH, content=text, headers={"content-type": "application/json"})
    assert list(results(server, finished_batch(server, response.json()))) == ["a", "b"]


def test_cancelled_batch_keeps_its_results(server: LiveServer) -> None:
    server.backend.gate.clear()
    batch = begin(server, batch_request("a"), batch_request("b"))
    wait_for(lambda: server.num_busy == 2)
    path = f"{PATH}/{batch['id']}"
    early = server.http.get(f"{path}/results")
    assert (early.status_code, server.http.delete(path).status_code) == (400, 400)
    assert "has not ended" in early.json()["error"]["message"]
    cancelled = server.http.post(f"{path}/cancel").json()
    assert cancelled["processing_status"] in {"canceling", "ended"}
    assert cancelled["cancel_initiated_at"]
    server.backend.gate.set()
    batch = finished_batch(server, batch)
    assert batch["request_counts"]["canceled"] == 2
    assert results(server, batch) == {"a": {"type": "canceled"}, "b": {"type": "canceled"}}


def test_requests_that_are_not_run_in_time_expire(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.batch.messages._WINDOW_S", 1)
    server.backend.gate.clear()
    batch = begin(server, batch_request("a"))
    time.sleep(1.1)
    server.backend.gate.set()
    batch = finished_batch(server, batch)
    assert batch["request_counts"]["expired"] == 1
    assert results(server, batch) == {"a": {"type": "expired"}}


def test_ended_batch_is_deleted_with_its_files(server: LiveServer) -> None:
    batch = finished_batch(server, begin(server, batch_request()))
    path = f"{PATH}/{batch['id']}"
    assert server.http.post(f"{path}/cancel").status_code == 400
    assert server.http.delete(path).json() == {"id": batch["id"], "type": "message_batch_deleted"}
    for gone_path in (path, f"{path}/results"):
        response = server.http.get(gone_path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    folder = server.api.batches._records.files._files  # type: ignore[union-attr]
    assert not list(folder.iterdir())


def test_tenants_do_not_see_each_other(server: LiveServer) -> None:
    path = f"{PATH}/{finished_batch(server, begin(server, batch_request()))['id']}"
    for method, batch_path in (
        ("GET", path),
        ("GET", f"{path}/results"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        assert server.http.request(method, batch_path, headers=OTHER).status_code == 404
    assert server.http.get(PATH, headers=OTHER).json()["data"] == []
    assert server.http.get(f"/v1/batches/{path.rpartition('/')[2]}").status_code == 404


def test_lists_come_in_pages_in_both_directions(server: LiveServer) -> None:
    newest, *older = [
        finished_batch(server, begin(server, batch_request()))["id"] for _ in range(5)
    ][::-1]

    def page(**query: Any) -> tuple[list[str], bool]:
        result = server.http.get(PATH, params=query).json()
        ids = [batch["id"] for batch in result["data"]]
        assert (result["first_id"], result["last_id"]) == (
            (ids[0], ids[-1]) if ids else (None, None)
        )
        return ids, result["has_more"]

    assert page() == ([newest, *older], False)
    assert page(limit=2, beta="true") == ([newest, older[0]], True)
    assert page(limit=2, after_id=older[0]) == (older[1:3], True)
    assert page(limit=2, after_id=older[2]) == (older[3:], False)
    assert page(limit=2, before_id=older[3]) == (older[1:3], True)
    assert page(limit=2, before_id=older[0]) == ([newest], False)
    for name, value in (("limit", "0"), ("limit", "1001"), ("after_id", "x"), ("before_id", "x")):
        result = server.http.get(PATH, params={name: value})
        assert result.status_code == 400
        assert name in result.json()["error"]["message"]


def test_results_have_the_scheme_that_the_client_uses(server: LiveServer) -> None:
    batch = finished_batch(server, begin(server, batch_request()))
    headers = {"x-forwarded-proto": "https"}
    body = server.http.get(f"{PATH}/{batch['id']}", headers=headers).json()
    assert body["results_url"] == batch["results_url"].replace("http://", "https://")


def test_full_disk_refuses_a_batch_and_leaves_nothing(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RecordsError("/records/files cannot be used: No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr("twostroke.server.storage.folder.Temporary.keep", fail)
        response = server.http.post(PATH, json={"requests": [batch_request()]})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "api_error")
    assert "/records" not in response.text
    assert server.http.get(PATH).json()["data"] == []
    assert (
        finished_batch(server, begin(server, batch_request()))["request_counts"]["succeeded"] == 1
    )


def test_server_without_records_says_how_to_keep_them(shared_server: LiveServer) -> None:
    response = shared_server.http.get(PATH)
    assert response.status_code == 404
    assert "--records" in response.json()["error"]["message"]
