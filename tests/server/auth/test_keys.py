"""API keys of the database: how a running server reads changes, and how they are stored."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.keys import add, keyed_server, revoke
from support.waiting import wait_for
from twostroke.cli.keys import command as keys_command
from twostroke.core.errors import UsageError
from twostroke.server.auth import stored_keys as kept
from twostroke.server.auth.key_refresher import KeyRefresher
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.auth.usage import UsageBook
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.http.logs import FIGURES
from twostroke.server.storage import DamagedRowError, Records, RecordsError, open_database
from twostroke.server.storage.schema import MIGRATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer


def status(server: LiveServer, text: str) -> int:
    return server.http.get("/v1/models", headers={"x-api-key": text}).status_code


def test_key_made_while_the_server_runs_is_accepted_and_revoked_without_a_restart(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "records"
    _, first = add(folder)
    with keyed_server(folder, tmp_path) as server:
        assert status(server, first) == 200
        key, second = add(folder, "other", "ben")
        assert status(server, second) == 401
        wait_for(lambda: status(server, second) == 200)
        revoke(folder, key)
        wait_for(lambda: status(server, second) == 401)
        assert status(server, first) == 200


def test_first_key_closes_an_open_server_and_revoking_the_last_does_not_open_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "records"
    with keyed_server(folder, tmp_path) as server, httpx.Client(base_url=server.url) as http:

        def send_request(key: str) -> int:
            return http.get("/v1/models", headers={"x-api-key": key}).status_code

        assert send_request("") == 200
        assert http.get("/openapi.json").json()["security"] == []
        key, text = add(folder)
        wait_for(lambda: send_request("") == 401)
        assert send_request(text) == 200
        body = http.get("/openapi.json", headers={"x-api-key": text}).json()
        assert body["security"] != []
        revoke(folder, key)
        wait_for(lambda: send_request(text) == 401)
        assert send_request("") == 401
    with keyed_server(folder, tmp_path) as server:  # started again
        assert server.http.get("/v1/models").status_code == 401
        assert status(server, text) == 401


def test_stream_of_a_revoked_key_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    key, text = add(folder)
    headers = {"x-api-key": text}
    body = {"prompt": "hello", "max_tokens": 4, "stream": True, "ignore_eos": True}
    with keyed_server(folder, tmp_path) as server:
        server.backend.gate.clear()
        results: list[str] = []

        def read() -> None:
            with server.http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                results.extend(response.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: server.num_busy == 1)
        revoke(folder, key)
        wait_for(lambda: status(server, text) == 401)
        server.backend.gate.set()
        reader.join()
        assert results[-2:] == ["data: [DONE]", ""]


def test_keys_of_a_file_stay_valid_beside_keys_of_the_database(tmp_path: Path) -> None:
    folder, file = tmp_path / "records", tmp_path / "keys"
    file.write_text("ben sk-file\n")
    _, text = add(folder)
    with keyed_server(folder, tmp_path, file) as server:
        assert [status(server, key) for key in (text, "sk-file", "sk-other")] == [200, 200, 401]


def test_expired_key_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    _, text = add(folder, expires_at=time.time() + 2)
    keys = ApiKeys.read(None, None, folder)
    assert keys is not None
    assert keys.find(text.encode()) is not None
    wait_for(lambda: keys.find(text.encode()) is None)
    assert keys.are_required


def test_last_use_is_stored_by_the_minute(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    _, text = add(folder)
    with keyed_server(folder, tmp_path) as server:
        assert status(server, text) == 200
    with open_database(folder) as db:
        [(_, used)] = kept.all_keys(db)
    assert used is not None
    assert used % 60 == 0
    assert 0 <= time.time() - used < 120


def test_no_key_is_in_the_records_or_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    key, text = add(folder)
    caplog.set_level(logging.DEBUG, "twostroke")
    with keyed_server(folder, tmp_path, access_log=True) as server:
        assert status(server, text) == 200
        revoke(folder, key)
        wait_for(lambda: status(server, text) == 401)
    secret = text.rpartition("-")[2][-20:]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert all(secret.encode() not in path.read_bytes() for path in files)
    assert secret not in caplog.text
    figures = [getattr(record, FIGURES, {}) for record in caplog.records]
    assert all(secret not in str(figure) for figure in figures)
    assert {figure["key"] for figure in figures if figure.get("status") == 200} == {key.id}


def test_locked_records_leave_the_keys_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    add(folder)

    class Broken:
        async def read(self, _work: Any) -> Any:
            raise RecordsError("The database is locked by another program.")

    keys = ApiKeys.read(None, None, folder)
    refresher = KeyRefresher(Broken(), keys, UsageBook("tiny"))  # type: ignore[arg-type]

    async def look() -> None:
        await refresher.start()
        await refresher.stop()

    asyncio.run(look())
    assert keys is not None
    assert keys.are_required
    assert caplog.text.count("Keys stay as they are: The database is locked") == 1


def test_last_use_waits_for_records_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    key, text = add(folder)
    keys = ApiKeys.read(None, None, folder)
    assert keys is not None
    assert keys.find(text.encode()) == key

    async def look() -> None:
        with closing(Records(folder)) as records:

            async def fail(_work: Any) -> Any:
                raise RecordsError("The disk is full.")

            refresher, write = KeyRefresher(records, keys, UsageBook("tiny")), records.write
            records.write = fail  # type: ignore[method-assign]
            await refresher._refresh(records, writes=True)
            records.write = write  # type: ignore[method-assign]
            await refresher._refresh(records, writes=True)

    asyncio.run(look())
    with open_database(folder) as db:
        [(_, last_used)] = kept.all_keys(db)
    assert last_used is not None


def test_names_are_free_again_once_revoked_and_changes_grow(tmp_path: Path) -> None:
    key, _ = add(tmp_path)
    with pytest.raises(UsageError, match="There is a key 'app'"):
        add(tmp_path)
    revoke(tmp_path, key)
    newer, _ = add(tmp_path)
    with open_database(tmp_path, writes=True) as db:
        assert kept.find(db, "app") == newer
        assert kept.newest_change(db) == 3
        changed = kept.change(db, newer, limits=KeyLimits(parallel=2))
        assert kept.newest_change(db) == 4
        assert kept.find(db, newer.id) == changed
        with pytest.raises(UsageError, match="is revoked"):
            kept.change(db, kept.find(db, key.id), weight=2.0)
        with pytest.raises(UsageError, match=rf"no key '{key.id}x'. Did you mean '{key.id}'"):
            kept.find(db, f"{key.id}x")


def test_failed_change_beside_a_server_leaves_nothing(tmp_path: Path) -> None:
    add(tmp_path)

    def fail() -> None:
        with open_database(tmp_path, writes=True) as db:
            kept.add(db, "other", "ben")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    with open_database(tmp_path) as db:
        assert [key.name for key, _ in kept.all_keys(db)] == ["app"]


@pytest.mark.parametrize("is_old", [True, False])
def test_programs_that_open_a_database_first_at_once_all_succeed(
    tmp_path: Path, *, is_old: bool
) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        if is_old:
            with closing(sqlite3.connect(folder / "records.db", isolation_level=None)) as db:
                db.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(partial(add, folder), "abcd"))
        with open_database(folder) as db:
            assert len(kept.all_keys(db)) == 4
            assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)


def test_damaged_locked_and_missing_databases_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.storage.database._LOCK_TIMEOUT_S", 0.05)
    with (
        pytest.raises(RecordsError, match="There is no database"),
        open_database(tmp_path / "none"),
    ):
        pass
    folder = tmp_path / "records"
    add(folder)
    with closing(sqlite3.connect(folder / "records.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RecordsError, match="locked by another program"):
            add(folder, "other")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "records.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(RecordsError, match="is damaged"):
        add(damaged)


# The last is the record of another tenant, as a flipped bit may make it.
@pytest.mark.parametrize("damage", [b'{"tenant"', b'{"\xc8": 1}', b"\xc8", None])
def test_damaged_key_is_named_and_refused_and_the_others_stay(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"
    key, text = add(folder)
    _, other = add(folder, "other", "ben")
    with keyed_server(folder, tmp_path) as server:
        assert status(server, text) == 200
        with open_database(folder, writes=True) as db:
            [body] = db.execute("SELECT body FROM keys WHERE id = ?", (key.id,)).fetchone()
            body = body.replace(b"anna", b"bnna") if damage is None else damage
            change = "UPDATE keys SET body = ?, change = 9 WHERE id = ?"
            db.execute(change, (body, key.id))
        wait_for(lambda: status(server, text) == 401)
        assert status(server, other) == 200
        assert f"The record of key {key.id} is damaged" in caplog.text
        with pytest.raises(DamagedRowError, match=key.id), open_database(folder) as db:
            kept.find(db, key.id)
        _, third = add(folder, "third", "ben")
        wait_for(lambda: status(server, third) == 200)
    with keyed_server(folder, tmp_path) as server:
        assert [status(server, key) for key in (text, other)] == [401, 200]


def test_lost_database_opens_no_server(tmp_path: Path) -> None:
    folder = tmp_path / "records"

    def lose() -> None:
        for file in folder.glob("records.db*"):
            file.unlink()
        Records(folder).close()

    assert ApiKeys.read(None, None, _new(folder)) is not None, "the first start needs no key"
    keys_command.main(["add", "shop", "--records", str(folder)], standalone_mode=False)
    lose()
    with pytest.raises(RecordsError, match="has had API keys, and its database has none"):
        ApiKeys.read(None, None, folder)
    assert ApiKeys.read(None, "other", folder) is not None, "it asks for this one"
    add(folder)  # without the command, as where an older version made it
    (folder / "has-keys").unlink()
    assert ApiKeys.read(None, None, folder) is not None
    lose()
    with pytest.raises(RecordsError, match=r"remove .*has-keys to serve everybody"):
        ApiKeys.read(None, None, folder)
    (folder / "has-keys").unlink()
    result = ApiKeys.read(None, None, folder)
    assert result is not None
    assert not result.are_required


def test_key_that_cannot_be_printed_is_not_stored(tmp_path: Path) -> None:
    folder = _new(tmp_path / "records")
    (folder / "has-keys").symlink_to(tmp_path / "lost" / "mark")  # which cannot be made
    with pytest.raises(RecordsError, match="has-keys cannot be used: No such file"):
        keys_command.main(["add", "shop", "--records", str(folder)], standalone_mode=False)
    with open_database(folder) as db:
        assert kept.all_keys(db) == []


def test_server_that_requires_keys_is_closed_without_any(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--require-keys needs"):
        ApiKeys.read(None, None, asks=True)
    folder = _new(tmp_path / "records")
    result = ApiKeys.read(None, None, folder, asks=True)
    assert result is not None
    assert (result.are_required, result.refuse_everybody) == (True, True)
    assert not result.has_valid("")
    with open_database(folder, writes=True) as db:
        new_key, _ = kept.add(db, "shop", "shop")
    result.replace_stored([new_key])
    assert not result.refuse_everybody
    assert result.has_valid("shop")
    open_before = ApiKeys({})
    open_before.replace_stored([new_key])
    open_before.replace_stored([])  # the records were emptied while it runs
    assert open_before.are_required


def _new(folder: Path) -> Path:
    Records(folder).close()
    return folder


def test_key_may_have_only_its_classes(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    _, common = add(folder, "common", classes=("default", "flex"))
    _, bulk = add(folder, "bulk", classes=("flex",))
    _, free = add(folder, "free")

    def answer_class(server: LiveServer, key: str, **fields: object) -> tuple[int, str]:
        server.http.headers["x-api-key"] = key
        result = server.chat(max_tokens=1, **fields)
        if result.status_code == 200:
            return 200, str(result.json().get("service_tier"))
        error = result.json()["error"]
        assert (error["code"], error["param"]) == ("class_not_allowed", next(iter(fields)))
        return result.status_code, error["message"]

    with keyed_server(folder, tmp_path) as server:
        for key in (common, bulk):
            assert answer_class(server, key, service_tier="flex") == (200, "flex")
            code, why = answer_class(server, key, service_tier="priority")
            assert code == 403
            assert "service_tier is 'priority', and this key may have:" in why
            assert answer_class(server, key, priority=-1)[0] == 403
            assert answer_class(server, key, priority=1)[0] == 200
        assert answer_class(server, common, service_tier="auto") == (200, "default")
        assert answer_class(server, bulk, service_tier="auto") == (200, "flex")
        assert answer_class(server, common, service_tier="default") == (200, "default")
        for named in ("default", "scale"):  # another word for the default
            assert answer_class(server, bulk, service_tier=named)[0] == 403
        assert answer_class(server, bulk)[0] == 200
        assert server.client.loop.snapshot().services["flex"].answers >= 4
        server.http.headers["x-api-key"] = bulk
        texts = {"input": "hello", "service_tier": "priority"}
        assert server.http.post("/v1/embeddings", json=texts).status_code == 403
        assert answer_class(server, free, service_tier="priority") == (200, "priority")
        assert answer_class(server, free, priority=-7)[0] == 200
