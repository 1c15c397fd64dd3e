"""Background responses, as clients see them."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.response_events import events_of, kinds_of, plain
from support.servers import live_server
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.generation import response_store as store
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.responses import background
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/responses"


@pytest.fixture
def gated(server: LiveServer) -> Iterator[LiveServer]:
    """Start a server whose engine waits until the test opens a gate."""
    server.backend.gate.clear()
    yield server
    server.backend.gate.set()


def send_request(server: LiveServer, **fields: Any) -> Fields:
    body = {"input": "hello", "max_output_tokens": 8, "temperature": 0, **fields}
    response = server.http.post(PATH, json={"background": True, **body})
    assert response.status_code == 200, response.text
    payload: Fields = response.json()
    return payload


def read(server: LiveServer, id_: str) -> Fields:
    body: Fields = server.http.get(f"{PATH}/{id_}").json()
    return body


def finished_response(server: LiveServer, id_: str) -> Fields:
    wait_for(lambda: read(server, id_)["status"] not in {"queued", "in_progress"})
    return read(server, id_)


def events_from(server: LiveServer, id_: str, after: int | None = None) -> list[Fields]:
    query: Fields = {"stream": "true"}
    if after is not None:
        query["starting_after"] = after
    response = server.http.get(f"{PATH}/{id_}", params=query)
    assert response.status_code == 200, response.text
    return events_of(response.text, first=0 if after is None else after + 1)


def test_response_is_returned_at_once_and_computed_later(gated: LiveServer) -> None:
    queued = send_request(gated)
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    assert read(gated, queued["id"])["status"] == "queued"
    gated.backend.gate.set()
    result = finished_response(gated, queued["id"])
    body = gated.http.post(
        PATH, json={"input": "hello", "max_output_tokens": 8, "temperature": 0}
    ).json()
    assert plain(result) | {"background": False} == plain(body)


def test_events_can_be_followed_from_any_number_and_again_at_the_end(gated: LiveServer) -> None:
    id_ = send_request(gated)["id"]
    with gated.http.stream("GET", f"{PATH}/{id_}", params={"stream": "true"}) as response:
        chunks = response.iter_text()
        first = next(chunks)
        assert "response.queued" in first
        gated.backend.gate.set()
        text = first + "".join(chunks)
    events = events_of(text)
    assert kinds_of(events)[:3] == ["created", "queued", "in_progress"]
    assert events[-1]["response"]["status"] == "incomplete"
    assert events_from(gated, id_) == events
    assert events_from(gated, id_, after=3) == events[4:]


def test_client_that_has_all_events_gets_no_more(server: LiveServer) -> None:
    id_ = send_request(server)["id"]
    finished_response(server, id_)
    run = server.api._background.find(id_)
    assert run is not None
    wait_for(lambda: run.is_over)
    last = events_from(server, id_)[-1]["sequence_number"]
    for after in (last, last + 100):
        assert events_from(server, id_, after=after) == []


def test_client_that_leaves_its_stream_comes_back_for_the_rest(gated: LiveServer) -> None:
    body = {"input": "hello", "max_output_tokens": 8, "background": True, "stream": True}
    body["temperature"] = 0  # a sampled answer may end before its limit
    with gated.http.stream("POST", PATH, json=body) as response:
        begun = next(response.iter_text())
    id_ = begun.split('"id":"')[1].split('"')[0]
    gated.backend.gate.set()
    assert finished_response(gated, id_)["status"] == "incomplete"
    events = events_from(gated, id_, after=1)
    assert kinds_of(events)[0] == "in_progress"
    assert kinds_of(events)[-1] == "incomplete"


def test_response_is_cancelled_once_and_for_all(gated: LiveServer) -> None:
    id_ = send_request(gated, max_output_tokens=40)["id"]
    cancelled = gated.http.post(f"{PATH}/{id_}/cancel").json()
    assert cancelled["status"] == "cancelled"
    response = gated.http.post(f"{PATH}/{id_}/cancel")
    assert (response.status_code, response.json()) == (200, cancelled)
    assert read(gated, id_) == cancelled
    assert kinds_of(events_from(gated, id_)) == ["created", "queued", "incomplete"]
    gated.backend.gate.set()
    gated.wait_idle()
    foreground = gated.http.post(PATH, json={"input": "a", "max_output_tokens": 1}).json()
    refused = gated.http.post(f"{PATH}/{foreground['id']}/cancel")
    assert refused.status_code == 400
    assert "is not in the background" in refused.json()["error"]["message"]
    assert gated.http.post(f"{PATH}/resp_none/cancel").status_code == 404


def test_response_is_deleted_while_it_is_computed(gated: LiveServer) -> None:
    id_ = send_request(gated)["id"]
    assert gated.http.delete(f"{PATH}/{id_}").json()["deleted"]
    gated.backend.gate.set()
    gated.wait_idle()
    assert gated.http.get(f"{PATH}/{id_}").status_code == 404


def test_response_joins_its_conversation_when_it_has_ended(gated: LiveServer) -> None:
    conversation = gated.http.post("/v1/conversations", json={}).json()["id"]
    items = f"/v1/conversations/{conversation}/items"
    id_ = send_request(gated, conversation=conversation)["id"]
    assert gated.http.get(items).json()["data"] == []
    early = gated.http.post(PATH, json={"input": "a", "previous_response_id": id_})
    assert early.json()["error"]["param"] == "previous_response_id"
    gated.backend.gate.set()
    finished_response(gated, id_)
    assert len(gated.http.get(items).json()["data"]) == 2
    body = {"input": "a", "previous_response_id": id_, "max_output_tokens": 1}
    assert gated.http.post(PATH, json=body).status_code == 200


def test_response_that_is_too_large_with_its_conversation_is_stored_alone(
    gated: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated.backend.gate.set()
    first = finished_response(gated, send_request(gated)["id"])
    gated.backend.gate.clear()
    second = send_request(gated, previous_response_id=first["id"])
    monkeypatch.setattr(store, "MAX_CONVERSATION_ITEMS", 3)  # there are four with the answer
    gated.backend.gate.set()
    result = finished_response(gated, second["id"])
    assert result["status"] == "incomplete"
    assert result["store"] is False
    assert result["output"][0]["content"][0]["text"]
    body = {"input": "a", "previous_response_id": second["id"], "max_output_tokens": 1}
    refused = gated.http.post(PATH, json=body)
    assert refused.status_code == 400
    assert "begin another conversation" in refused.json()["error"]["message"]


def test_responses_that_have_ended_do_not_hold_their_prompts(server: LiveServer) -> None:
    id_ = send_request(server)["id"]
    finished_response(server, id_)
    run = server.api._background.find(id_)
    assert run is not None
    wait_for(lambda: run.is_over)
    assert run.encoder is None
    assert events_from(server, id_)


def test_stored_response_without_events_is_streamed_as_a_whole(server: LiveServer) -> None:
    body = {"input": "hello", "max_output_tokens": 3}
    stored = server.http.post(PATH, json=body).json()
    events = events_from(server, stored["id"])
    assert kinds_of(events) == ["created", "in_progress", "incomplete"]
    assert events[-1]["response"] == stored
    [last] = events_from(server, stored["id"], after=7)
    assert last["response"] == stored


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"store": False}, "background"), ({"background": "yes"}, "background")],
)
def test_wrong_use_of_the_background_is_named(
    server: LiveServer, fields: Fields, param: str
) -> None:
    response = server.http.post(PATH, json={"input": "a", "background": True, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"starting_after": "x"}, "starting_after"),
        ({"starting_after": "x", "stream": "true"}, "starting_after"),
        ({"starting_after": "-1", "stream": "true"}, "starting_after"),
    ],
)
def test_wrong_number_of_an_event_is_named(server: LiveServer, query: Fields, param: str) -> None:
    id_ = server.http.post(PATH, json={"input": "a", "max_output_tokens": 1}).json()["id"]
    response = server.http.get(f"{PATH}/{id_}", params=query)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_events_are_bounded_and_the_oldest_are_missed_first(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = background.BackgroundRuns(max_bytes=8000)
    monkeypatch.setattr(server.api, "_background", runs)
    id_ = send_request(server, max_output_tokens=40)["id"]
    wait_for(lambda: read(server, id_)["status"] == "incomplete")
    second = send_request(server, max_output_tokens=40)["id"]
    wait_for(lambda: read(server, second)["status"] == "incomplete")
    assert sum(run.num_bytes for run in runs._runs.values()) <= 8000


def test_client_that_reads_too_slowly_learns_where_to_continue(gated: LiveServer) -> None:
    id_ = send_request(gated, max_output_tokens=40)["id"]
    run = gated.api._background.find(id_)
    assert run is not None
    with gated.http.stream("GET", f"{PATH}/{id_}", params={"stream": "true"}) as response:
        chunks = response.iter_text()
        next(chunks)
        run.first_number += 100  # as if 100 events had come and were dropped
        gated.backend.gate.set()
        text = "".join(chunks)
    *_, last = text.strip().split("\n\n")
    error = json.loads(last.removeprefix("event: error\ndata: "))
    assert error["param"] == "starting_after"
    query: Fields = {"stream": "true", "starting_after": error["sequence_number"]}
    assert gated.http.get(f"{PATH}/{id_}", params=query).status_code == 200
    query["starting_after"] -= 1
    assert gated.http.get(f"{PATH}/{id_}", params=query).status_code == 400


def test_background_survives_a_restart_and_belongs_to_its_key(tmp_path: Path) -> None:
    keys = ApiKeys({"k": "anna", "other": "ben"})
    options = ServeOptions(drain_s=0.1, api_keys=keys)
    anna, ben = ({"authorization": f"Bearer {key}"} for key in ("k", "other"))
    with closing(Records(tmp_path / "records")) as records:
        with live_server(tmp_path, options, records=records) as server:
            server.http.headers.update(anna)
            done = finished_response(server, send_request(server)["id"])
            server.backend.gate.clear()
            cut = send_request(server)["id"]
            for path in (f"{PATH}/{cut}", f"{PATH}/{cut}?stream=true"):
                assert httpx.get(f"{server.url}{path}", headers=ben).status_code == 404
            assert httpx.post(f"{server.url}{PATH}/{cut}/cancel", headers=ben).status_code == 404
        cut_off = (
            "UPDATE answers SET answer = CAST(replace(answer, ?, ?) AS BLOB), row_digest = '' "
            "WHERE id = ?"
        )
        states = (b'"status":"incomplete","background"', b'"status":"queued","background"', cut)
        asyncio.run(records.write(lambda db: db.execute(cut_off, states).rowcount))
        with live_server(tmp_path, options, records=records) as server:
            server.http.headers.update(anna)
            assert read(server, done["id"]) == done
            failed = read(server, cut)
            assert failed["status"] == "failed"
            assert failed["error"]["code"] == "server_error"
