"""Files of all purposes, uploads in parts, and Anthropic's files, as clients see them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from twostroke.server.batch import uploads
from twostroke.server.batch.service import delete_expired
from twostroke.server.http.limits import RequestLimits
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]

FILES, UPLOADS = "/v1/files", "/v1/uploads"
ANTHROPIC = {"anthropic-version": "2023-06-01"}
BEN = {"authorization": "Bearer other"}


def begin(server: LiveServer, **fields: Any) -> Fields:
    body = {"filename": "a.txt", "purpose": "user_data", "bytes": 10, "mime_type": "text/plain"}
    response = server.http.post(UPLOADS, json={**body, **fields})
    assert response.status_code == 200, response.text
    payload: Fields = response.json()
    return payload


def part(server: LiveServer, upload: str, data: bytes) -> str:
    form = {"data": ("part", data)}
    response = server.http.post(f"{UPLOADS}/{upload}/parts", files=form)
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "upload.part"
    return str(response.json()["id"])


def complete(server: LiveServer, upload: str, *parts: str, **fields: Any) -> Fields:
    body = {"part_ids": list(parts), **fields}
    payload: Fields = server.http.post(f"{UPLOADS}/{upload}/complete", json=body).json()
    return payload


def store(server: LiveServer, data: bytes, name: str = "a.txt", **fields: Any) -> Any:
    form = {"file": (name, data)}
    body = {"purpose": "user_data", **fields}
    return server.http.post(FILES, data=body, files=form)


@pytest.mark.parametrize(
    "purpose", ["batch", "user_data", "assistants", "evals", "fine-tune", "vision"]
)
def test_files_of_each_purpose_are_stored_byte_for_byte(server: LiveServer, purpose: str) -> None:
    data = bytes(range(256))
    file = store(server, data, purpose=purpose).json()
    assert (file["purpose"], file["bytes"], file["status"]) == (purpose, 256, "processed")
    content = server.http.get(f"{FILES}/{file['id']}/content")
    assert content.content == data
    assert content.headers["content-disposition"].startswith("attachment")
    listed = server.http.get(FILES, params={"purpose": purpose}).json()["data"]
    assert listed == [file]


def test_parts_become_a_file_in_their_order(server: LiveServer, records: Records) -> None:
    upload = begin(server)
    assert (upload["status"], upload["object"]) == ("pending", "upload")
    assert upload["expires_at"] == upload["created_at"] + 3600
    last, first = part(server, upload["id"], b"world"), part(server, upload["id"], b"hello")
    assert server.http.get(FILES).json()["data"] == []  # no part is a file
    assert server.http.get(f"{FILES}/{first}").status_code == 404
    digest = hashlib.md5(b"helloworld", usedforsecurity=False).hexdigest()
    done = complete(server, upload["id"], first, last, md5=digest)
    assert done["status"] == "completed"
    file = done["file"]
    assert server.http.get(f"{FILES}/{file['id']}").json() == file
    assert server.http.get(f"{FILES}/{file['id']}/content").content == b"helloworld"
    assert server.http.get(f"{UPLOADS}/{upload['id']}").json() == done
    assert {path.name for path in records.files.path("x").parent.iterdir()} == {file["id"]}


def test_wrong_parts_are_named_and_can_be_mended(server: LiveServer) -> None:
    id_ = begin(server)["id"]
    first, last = part(server, id_, b"hello"), part(server, id_, b"world")
    other = part(server, begin(server)["id"], b"world")
    for parts, fields, param in (
        ((first,), {}, "part_ids"),
        ((first, other), {}, "part_ids[1]"),
        ((first, first), {}, "part_ids[1]"),
        ((first, last), {"md5": "0" * 32}, "md5"),
    ):
        assert complete(server, id_, *parts, **fields)["error"]["param"] == param
    assert complete(server, id_, first, last)["status"] == "completed"
    assert "completed" in complete(server, id_, first, last)["error"]["message"]


def test_upload_is_completed_by_one_request_at_a_time(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, has_begun, may_go_on = uploads.join_parts, Event(), Event()

    def join_slowly(*args: Any) -> str:
        has_begun.set()
        assert may_go_on.wait(60)
        return join(*args)

    monkeypatch.setattr(uploads, "join_parts", join_slowly)
    id_ = begin(server)["id"]
    parts = part(server, id_, b"hello"), part(server, id_, b"world")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(complete, server, id_, *parts)
        assert has_begun.wait(60)
        second = complete(server, id_, *parts)
        may_go_on.set()
    assert "another request" in second["error"]["message"]
    assert first.result()["status"] == "completed"


def test_cancelled_upload_takes_nothing_more(server: LiveServer, records: Records) -> None:
    id_ = begin(server)["id"]
    part(server, id_, b"hello")
    cancelled = server.http.post(f"{UPLOADS}/{id_}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert server.http.post(f"{UPLOADS}/{id_}/cancel").json() == cancelled
    refused = server.http.post(f"{UPLOADS}/{id_}/parts", files={"data": ("p", b"x")})
    assert refused.status_code == 400
    assert "cancelled" in refused.json()["error"]["message"]
    assert list(records.files.path("x").parent.iterdir()) == []


def test_uploads_are_as_many_as_files_may_be(tmp_path: Path) -> None:
    options = ServeOptions(limits=RequestLimits(max_files=2))
    with (
        closing(Records(tmp_path / "records")) as records,
        live_server(tmp_path, options, records=records) as server,
    ):
        first = begin(server, bytes=0)["id"]
        begin(server, bytes=0)
        body = {"filename": "a.txt", "purpose": "user_data", "bytes": 0}
        refused = server.http.post(UPLOADS, json=body)
        assert refused.status_code == 413
        assert "2 uploads" in refused.json()["error"]["message"]
        for _ in range(2):
            store(server, b"x")
        assert "2 files" in complete(server, first)["error"]["message"]
        assert len(server.http.get(FILES).json()["data"]) == 2


def test_damaged_part_is_reported_and_no_file_is_created(
    server: LiveServer, records: Records
) -> None:
    for damage in ("cut", "removed"):
        id_ = begin(server)["id"]
        first, last = part(server, id_, b"hello"), part(server, id_, b"world")
        if damage == "cut":
            records.files.path(last).write_bytes(b"wor")
        else:
            records.files.path(last).unlink()
        assert "error" in complete(server, id_, first, last)
    assert server.http.get(FILES).json()["data"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bytes": 100_001}, "bytes"),
        ({"bytes": -1}, "bytes"),
        ({"purpose": "anything"}, "purpose"),
        ({"filename": ""}, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "used_at", "seconds": 3600}}, "expires_after.anchor"),
    ],
)
def test_wrong_field_of_an_upload_is_named(server: LiveServer, fields: Fields, param: str) -> None:
    body = {"filename": "a.txt", "purpose": "user_data", "bytes": 10, "mime_type": "text/plain"}
    response = server.http.post(UPLOADS, json={**body, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_uploads_belong_to_their_key_and_count_in_its_room(server: LiveServer) -> None:
    id_ = begin(server, bytes=100_000)["id"]
    for method, path, fields in (
        ("GET", f"{UPLOADS}/{id_}", {}),
        ("POST", f"{UPLOADS}/{id_}/parts", {"files": {"data": ("p", b"x")}}),
        ("POST", f"{UPLOADS}/{id_}/complete", {"json": {"part_ids": []}}),
        ("POST", f"{UPLOADS}/{id_}/cancel", {}),
    ):
        response = server.http.request(method, path, headers=BEN, **fields)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "upload_not_found")
    for _ in range(2):
        part(server, id_, b"x" * 100_000)
    full = server.http.post(f"{UPLOADS}/{id_}/parts", files={"data": ("p", b"x" * 60_000)})
    assert full.status_code == 413


EXPIRIES: list[Fields] = [
    {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
    {"expires_in_seconds": "3600"},
]


@pytest.mark.parametrize("fields", EXPIRIES)
def test_expired_files_and_uploads_are_deleted(
    server: LiveServer, records: Records, fields: Fields
) -> None:
    file = store(server, b"x", **fields).json()
    stays = store(server, b"x").json()
    assert file["expires_at"] == file["created_at"] + 3600
    upload = begin(server, bytes=5, expires_after={"anchor": "created_at", "seconds": 7200})
    part(server, upload["id"], b"hello")
    done = begin(server, bytes=5, expires_after={"anchor": "created_at", "seconds": 7200})
    completed_file = complete(server, done["id"], part(server, done["id"], b"hello"))["file"]
    assert completed_file["expires_at"] == completed_file["created_at"] + 7200
    now_s = time.time()
    asyncio.run(delete_expired(records, now_s))
    assert server.http.get(f"{FILES}/{file['id']}").status_code == 200
    asyncio.run(delete_expired(records, now_s + 3601))
    names = {path.name for path in records.files.path("x").parent.iterdir()}
    assert names == {stays["id"], completed_file["id"]}
    assert server.http.get(f"{FILES}/{file['id']}").status_code == 404
    asyncio.run(delete_expired(records, now_s + 7300))
    assert server.http.get(f"{UPLOADS}/{upload['id']}").status_code == 404
    assert server.http.get(FILES).json()["data"] == [stays]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after[seconds]": "soon"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "used_at"}, "expires_after.anchor"),
        ({"purpose": ""}, "purpose"),
    ],
)
def test_wrong_field_of_a_file_is_named(server: LiveServer, fields: Fields, param: str) -> None:
    response = store(server, b"x", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_results_of_batches_expire_on_request(server: LiveServer) -> None:
    file = store(server, b"", name="in.jsonl", purpose="batch").json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    wrong = {**body, "output_expires_after": {"anchor": "created_at", "seconds": 1}}
    refused = server.http.post("/v1/batches", json=wrong)
    assert refused.json()["error"]["param"] == "output_expires_after.seconds"


def test_anthropics_clients_see_files_in_their_form(server: LiveServer) -> None:
    server.http.headers.update(ANTHROPIC)
    file_objects = [
        server.http.post(f"{FILES}?beta=true", files={"file": (name, b"hello")}).json()
        for name in ("a.txt", "b.json", "c")
    ]
    assert [file["mime_type"] for file in file_objects] == [
        "text/plain",
        "application/json",
        "application/octet-stream",
    ]
    assert {file["type"] for file in file_objects} == {"file"}
    first = file_objects[0]
    assert first["size_bytes"] == 5
    assert server.http.get(f"{FILES}/{first['id']}?beta=true").json() == first
    page = server.http.get(FILES, params={"limit": 2, "beta": "true"}).json()
    assert page["data"] == file_objects[:0:-1]
    assert page["has_more"]
    rest = server.http.get(FILES, params={"page": page["next_page"]}).json()
    assert (rest["data"], rest["next_page"]) == ([first], None)
    newer = server.http.get(FILES, params={"before_id": first["id"], "limit": 1}).json()
    assert newer["data"] == [file_objects[1]]
    named = server.http.get(FILES, params={"ids[]": [first["id"], "file-none"]}).json()
    assert named["data"] == [first]
    deleted = server.http.delete(f"{FILES}/{first['id']}").json()
    assert deleted == {"id": first["id"], "type": "file_deleted"}
    missing = server.http.get(f"{FILES}/{first['id']}")
    assert missing.status_code == 404
    assert missing.json()["type"] == "error"
    wrong = server.http.get(FILES, params={"after_id": "file-none"}).json()
    assert "after_id" in wrong["error"]["message"]
