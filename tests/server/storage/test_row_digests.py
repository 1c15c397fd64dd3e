"""Damaged database rows are noticed: each column that a client sees, in each table."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from twostroke.server.auth import costs, usage
from twostroke.server.auth import stored_keys as keys
from twostroke.server.auth.costs import CostOwner
from twostroke.server.auth.usage import Owner
from twostroke.server.batch import files
from twostroke.server.batch import stored_batches as batches
from twostroke.server.batch.stored_batches import Batch
from twostroke.server.generation.response_store import (
    Journal,
    ResponseStore,
    StoredResponse,
    Tenant,
)
from twostroke.server.storage import Records, open_database
from twostroke.server.storage.row_digests import COLUMNS, damaged_rows, is_intact_in_sql, row_digest
from twostroke.server.storage.schema import MIGRATIONS

if TYPE_CHECKING:
    from pathlib import Path

_BEFORE = next(number for number, script in enumerate(MIGRATIONS) if "row_digest" in script)


def fill(folder: Path) -> None:
    """Write a row into each table, as the server does; the text contains 'word'."""
    with closing(Records(folder)) as records:
        store = ResponseStore(9, 1 << 20, Journal(records))
        tenant = Tenant("word", store)
        tenant.put(StoredResponse("word", b'["word"]', b'"word"', ("word",)))
        tenant.put(StoredResponse("next", b'["word"]', b'"word"', ("x",), tenant.find("word")))

        def write(db: sqlite3.Connection) -> None:
            body = files.new_file("word", 7, "word", "word", expires_after_s=9**9)
            files.insert(db, body, "word", "word")
            batch = Batch(
                id="word",
                tenant="word",
                protocol="word",
                endpoint="word",
                input_file="word",
                window="24h",
                expires_at=1e10,
                total=5,
            )
            batches.insert(db, batch)
            batches.update(db, batch)
            batches.insert_result(db, "word", 1, b"word", is_ok=True)
            key, _ = keys.add(db, "word", "word")
            keys.change(db, key, weight=2.0)
            user = Owner("2026-01-01", "word", "word", "word", is_batch=False)
            for _ in range(2):
                usage.add(db, {user: [1, 2, 3, 4]})
                owner = CostOwner("2026-01-01", "word", "word", "USD")
                costs.add(db, {owner: [1, 2, 3, 4, 5, 6, 7]})
            values = ("word", "word", 5, b"word")
            insert = "INSERT INTO uploads (id, tenant, expires_at, body, row_digest) VALUES "
            db.execute(f"{insert} (?, ?, ?, ?, ?)", (*values, row_digest(values)))

        records.post(write).result()


def num_damaged(folder: Path, table: str) -> int:
    with open_database(folder) as db:
        query = f"SELECT count(*) FROM {table} WHERE NOT {is_intact_in_sql(table)}"
        return int(db.execute(query).fetchone()[0])


@pytest.mark.parametrize("table", COLUMNS)
def test_each_column_that_changes_is_noticed(tmp_path: Path, table: str) -> None:
    fill(tmp_path)
    assert num_damaged(tmp_path, table) == 0
    intact_bytes = (tmp_path / "records.db").read_bytes()
    for column in COLUMNS[table]:
        for damage in ("x'ff' || substr({0}, 2)", "'7' || {0}", "'word.'", "77"):
            value = damage.format(f"coalesce({column}, '')")
            with closing(sqlite3.connect(tmp_path / "records.db")) as db, db:
                [row] = db.execute(f"SELECT {column} FROM {table}").fetchmany(1)
                change = f"UPDATE {table} SET {column} = {value} WHERE {column} IS ?"
                num_rows = db.execute(change, row).rowcount
            assert num_damaged(tmp_path, table) == num_rows > 0, (column, damage)
            (tmp_path / "records.db-wal").unlink(missing_ok=True)
            (tmp_path / "records.db").write_bytes(intact_bytes)


def test_rows_of_earlier_versions_are_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "records.db")) as db:
        for script in MIGRATIONS[:_BEFORE]:
            db.executescript(script)
        db.execute(f"PRAGMA user_version = {_BEFORE}")
        insert = "INSERT INTO files (id, tenant, purpose, filename, bytes, created_at)"
        db.execute(f"{insert} VALUES ('a', 'anna', 'user_data', 'name', 3, 4)")
        db.execute("INSERT INTO usage VALUES ('2026-01-01', '', '', 'm', 0, 1, 2, 3, 4)")
        db.commit()
    with open_database(tmp_path, writes=True) as db:
        assert files.find(db, "a", "anna").filename == "name"
        usage.add(db, {Owner("2026-01-01", "", "", "m", is_batch=False): [1, 1, 1, 1]})
        [amount] = usage.amounts(db, "0", "9")
        assert amount[1:] == (2, 3, 4, 5)
        assert not list(damaged_rows(db))


def test_damaged_usage_is_left_out_and_stays_damaged(tmp_path: Path) -> None:
    owners = [Owner("2026-01-01", "", "", model, is_batch=False) for model in "ab"]
    with open_database(tmp_path, writes=True, creates=True) as db:
        usage.add(db, {owner: [1, 2, 3, 4] for owner in owners})
        db.execute("UPDATE usage SET output = 5 WHERE model = 'a'")
        usage.add(db, {owner: [1, 2, 3, 4] for owner in owners})
        assert [amount.owner.model for amount in usage.amounts(db, "0", "9")] == ["b"]
        assert usage.damaged_owners(db, "0", "9") == owners[:1]


def test_damaged_rows_are_named_when_records_are_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    with open_database(tmp_path, writes=True) as db:
        db.execute("UPDATE files SET tenant = 'other'")
    Records(tmp_path).close()
    assert "The record of file word is damaged" in caplog.text
    assert str(tmp_path / "records.db") in caplog.text
