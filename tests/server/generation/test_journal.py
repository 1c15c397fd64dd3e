"""Stored responses that outlive their server."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.generation.response_store import (
    Journal,
    ResponseStore,
    StoredResponse,
    Tenant,
)
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records, RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from support.servers import LiveServer

PATH = "/v1/responses"
KEYS = ApiKeys({"k": "anna", "other": "ben"})
OTHER = {"authorization": "Bearer other"}


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with closing(Records(tmp_path / "records")) as open_records:
        yield open_records


def serve(folder: Path, records: Records, **options: Any) -> AbstractContextManager[LiveServer]:
    """Start a server on `records`, after the servers that used them before."""
    return live_server(folder, ServeOptions(drain_s=1, **options), records=records)


def answer(server: LiveServer, **fields: Any) -> Any:
    response = server.http.post(PATH, json={"input": "hello", "max_output_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def assert_not_continued(server: LiveServer, id_: str, log: str) -> None:
    """Check that a response with a gap before it is refused with a remedy."""
    fields = {"input": "and?", "previous_response_id": id_}
    refused = server.http.post(PATH, json=fields)
    assert refused.status_code == 500
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert refused.json()["error"]["code"] == "record_damaged"
    assert "is damaged or missing: restore a backup" in refused.json()["error"]["message"]
    [line] = [line for line in log.splitlines() if "read but not continued" in line]
    assert id_ in line


@pytest.mark.parametrize("column", ["id", "answer", "row"])
def test_answers_stay_when_an_earlier_one_is_damaged(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    with serve(tmp_path, records) as server:
        first = answer(server)["id"]
        second = answer(server, previous_response_id=first)["id"]
        third = answer(server, previous_response_id=second)["id"]
    change = "DELETE FROM answers WHERE id = ?"
    if column != "row":
        change = f"UPDATE answers SET {column} = '7' || {column} WHERE id = ?"
    asyncio.run(records.write(lambda db: db.execute(change, (first,)).rowcount))
    for _ in range(2):
        caplog.clear()
        with serve(tmp_path, records) as server:
            assert server.http.get(f"{PATH}/{first}").status_code == 404
            for id_ in (second, third):
                assert server.http.get(f"{PATH}/{id_}").status_code == 200
                assert_not_continued(server, id_, caplog.text)
    query = "SELECT count(*) FROM answers"
    [count] = asyncio.run(records.read(lambda db: db.execute(query).fetchone()))
    assert count == (2 if column == "row" else 3)


def test_conversation_goes_on_after_a_restart(tmp_path: Path, records: Records) -> None:
    with serve(tmp_path, records) as server:
        first = answer(server)
        second = answer(server, previous_response_id=first["id"])
        deleted = answer(server)
        assert server.http.delete(f"{PATH}/{deleted['id']}").json()["deleted"]
        assert server.http.delete(f"{PATH}/{first['id']}").json()["deleted"]
        alone = answer(server, input="and?", temperature=0, previous_response_id=second["id"])
        chat = server.chat(max_tokens=2, store=True, metadata={"a": "b"}).json()
        path = f"/v1/chat/completions/{chat['id']}"
        server.http.post(path, json={"metadata": {"a": "c"}})
        items = server.http.get(f"{PATH}/{second['id']}/input_items").json()
    with serve(tmp_path, records) as server:
        assert server.http.get(f"{PATH}/{second['id']}").json() == second
        assert server.http.get(f"{PATH}/{second['id']}/input_items").json() == items
        for id_ in (first["id"], deleted["id"]):
            assert server.http.get(f"{PATH}/{id_}").status_code == 404
        continued = answer(server, input="and?", temperature=0, previous_response_id=second["id"])
        assert continued["output"][0]["content"] == alone["output"][0]["content"]
        assert continued["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
        assert server.http.get(path).json()["metadata"] == {"a": "c"}
        for id_ in (second["id"], alone["id"], continued["id"]):
            server.http.delete(f"{PATH}/{id_}")
        server.http.delete(path)
    left = asyncio.run(records.read(lambda db: db.execute("SELECT id FROM answers").fetchall()))
    assert left == []


def test_tenants_stay_apart_after_a_restart(tmp_path: Path, records: Records) -> None:
    mine = {"authorization": "Bearer k"}
    with serve(tmp_path, records, api_keys=KEYS) as server:
        id_ = server.http.post(PATH, json={"input": "a"}, headers=mine).json()["id"]
    with serve(tmp_path, records, api_keys=KEYS) as server:
        assert server.http.get(f"{PATH}/{id_}", headers=mine).status_code == 200
        assert server.http.get(f"{PATH}/{id_}", headers=OTHER).status_code == 404
        assert server.http.delete(f"{PATH}/{id_}", headers=OTHER).status_code == 404


def test_a_tenant_changes_no_answer_of_another_with_the_same_id(records: Records) -> None:
    """Ids are random; only records of a stream could bring the id of another tenant's answer."""

    def make(text: bytes) -> StoredResponse:
        return StoredResponse("resp_1", b"[]", text, ())

    async def restored() -> ResponseStore:
        store = ResponseStore(10, 10**6, Journal(records))
        await store.load()
        return store

    for change in ("put", "replace", "remove"):
        store = ResponseStore(10, 10**6, Journal(records))
        anna, ben = Tenant("anna", store), Tenant("ben", store)
        anna.put(make(b'"of Anna"'))
        ben.put(bens := make(b'"of Ben"'))
        if change == "replace":
            ben.replace(bens, b'"new"')
        elif change == "remove":
            ben.remove("resp_1")
        records.post(lambda _: None).result(20)  # after all writes before it
        kept = Tenant("anna", asyncio.run(restored())).find("resp_1")
        assert kept is not None, change
        assert kept.answer == b'"of Anna"', change


def test_next_server_may_keep_fewer_or_none(tmp_path: Path, records: Records) -> None:
    with serve(tmp_path, records) as server:
        ids = [answer(server)["id"] for _ in range(5)]
    for count in (2, 0):
        with serve(tmp_path, records, max_stored=count) as server:
            statuses = [server.http.get(f"{PATH}/{id_}").status_code for id_ in ids]
            assert statuses == [404] * (5 - count) + [200] * count


def test_full_disk_costs_no_answer_and_delays_a_deletion(
    tmp_path: Path,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(writes: Any) -> None:
        for _, done in writes:
            done.set_exception(RecordsError("The database /records cannot be written."))

    with serve(tmp_path, records) as server:
        stored_id = answer(server)["id"]
        wait_for(records._writes.empty)
        with monkeypatch.context() as patch:
            patch.setattr(records, "_write", fail)
            lost = [answer(server)["id"] for _ in range(3)]
            wait_for(lambda: "missing after a restart" in caplog.text)
            assert caplog.text.count("missing after a restart") == 1
            refused = server.http.delete(f"{PATH}/{stored_id}")
            assert (refused.status_code, "/records" in refused.text) == (503, False)
            assert all(
                server.http.get(f"{PATH}/{id_}").status_code == 200 for id_ in (stored_id, *lost)
            )
        continued = answer(server, previous_response_id=lost[0])["id"]
    with serve(tmp_path, records) as server:
        assert server.http.get(f"{PATH}/{stored_id}").status_code == 200
        assert {server.http.get(f"{PATH}/{id_}").status_code for id_ in lost} == {404}
        assert server.http.get(f"{PATH}/{continued}").status_code == 200
        assert_not_continued(server, continued, caplog.text)


def test_restart_restores_all_stored_responses_after_any_operations(records: Records) -> None:
    def stored_state(store: ResponseStore) -> Any:
        return {
            tenant: [
                (response.id, response.answer, [step.id for step in response.conversation()])
                for response in responses.by_id.values()
            ]
            for tenant, responses in store.responses_by_tenant.items()
        }

    for seed in range(30):
        draw = random.Random(seed)
        store = ResponseStore(8, 20_000, Journal(records))
        asyncio.run(store.load())
        drafts: list[tuple[Tenant, StoredResponse]] = []
        for step in range(60):
            tenant = Tenant(draw.choice("ab"), store)
            stored_responses = list(tenant._responses.by_id.values())
            match draw.choice(["put", "remove", "replace"]):
                case "put":  # which others may overtake
                    is_chat = draw.random() < 0.2  # which nothing continues
                    steps = [response for response in stored_responses if "chat" not in response.id]
                    previous = None if is_chat else draw.choice([None, *steps])
                    text = b'"%s"' % (b"x" * draw.randrange(3000))
                    id_ = f"{seed}-{step}" + "-chat" * is_chat
                    drafts.append(
                        (tenant, StoredResponse(id_, b"[]", text, (f"i{id_}",), previous))
                    )
                    if draw.random() < 0.7:
                        owner, put_response = drafts.pop(draw.randrange(len(drafts)))
                        owner.put(put_response)
                case "remove" if stored_responses:
                    asyncio.run(tenant.forget(draw.choice(stored_responses).id))
                case "replace" if chats := [
                    response for response in stored_responses if "chat" in response.id
                ]:
                    tenant.replace(draw.choice(chats), b'"new"')
        restored = ResponseStore(8, 20_000, Journal(records))
        asyncio.run(records.write(lambda _: None))
        asyncio.run(restored.load())
        assert stored_state(restored) == stored_state(store)
        assert restored.num_bytes == store.num_bytes
