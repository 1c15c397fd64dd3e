"""A flipped bit in an id deletes nothing: the id is restored, or all files in doubt stay."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.server.batch import files, uploads
from twostroke.server.batch import stored_batches as batches
from twostroke.server.batch.stored_batches import Batch
from twostroke.server.storage import Records
from twostroke.server.storage.row_digests import COLUMNS, row_digest
from twostroke.server.storage.startup_checks import NOUNS, has_damaged_rows, stored_ids

if TYPE_CHECKING:
    from pathlib import Path

ID = "file-000000000000000000000007"
OTHER_ID = "file-000000000000000000000009"
FLIPPED_ID = "file-000000000000000000000006"
BATCH = Batch(
    id="batch-7",
    tenant="anna",
    protocol="openai",
    endpoint="/v1/completions",
    input_file=ID,
    window="24h",
    expires_at=1e10,
    total=5,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a database with two files and a batch, and a file that a crash has left."""
    with closing(Records(tmp_path)) as records:
        for id_ in (ID, OTHER_ID):
            body = files.new_file(id_, 2, "in.jsonl", "batch")
            records.post(partial(insert_file, body=body)).result()
        records.post(lambda db: batches.insert(db, BATCH)).result()
        for id_ in (ID, OTHER_ID, "left-by-a-crash"):
            records.files.path(id_).write_bytes(b"{}")
    return tmp_path


def insert_file(db: sqlite3.Connection, body: files.FileBody) -> None:
    files.insert(db, body, "anna", "")


def file_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "files").iterdir()}


def served_ids(records: Records) -> tuple[set[str], set[str]]:
    """Return the ids of the files that a list shows, and of the files that can be read."""
    found_ids = set[str]()
    for id_ in (ID, OTHER_ID, FLIPPED_ID):
        try:
            find = partial(files.find, id_=id_, tenant="anna")
            found_ids.add(asyncio.run(records.read(find)).id)
        except files.NoSuchFileError:
            continue
    listing = asyncio.run(records.read(lambda db: files.page(db, "anna", {})))
    return {file.id for file in listing.data}, found_ids


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "records.db")) as db, db:
        for statement in statements:
            db.execute(statement)


def flip_copy(folder: Path, copy: int) -> None:
    """Flip a bit in one copy of an id: copies 0 and 1 are in the files, the others in the batch."""
    data = bytearray((folder / "records.db").read_bytes())
    offsets = [at for at in range(len(data)) if data.startswith(ID.encode(), at)]
    assert len(offsets) == 5, "the file's row, its index; the batch's column, its body, its index"
    data[offsets[copy] + len(ID) - 1] ^= 1
    (folder / "records.db").write_bytes(data)


@pytest.mark.parametrize("copy", range(5))
def test_a_file_is_served_whichever_copy_of_its_id_is_flipped(
    folder: Path, caplog: pytest.LogCaptureFixture, copy: int
) -> None:
    flip_copy(folder, copy)
    for _ in range(2):
        with closing(Records(folder)) as records:
            assert served_ids(records) == ({ID, OTHER_ID}, {ID, OTHER_ID})
            assert file_names(folder) >= {ID, OTHER_ID}
    assert "damaged" in caplog.text


@pytest.mark.parametrize("copy", range(2))
def test_a_flipped_copy_of_an_id_is_restored(
    folder: Path, caplog: pytest.LogCaptureFixture, copy: int
) -> None:
    flip_copy(folder, copy)
    for _ in range(2):
        Records(folder).close()
    log_messages = [record.getMessage() for record in caplog.records]
    [sentence] = [text for text in log_messages if FLIPPED_ID in text]
    assert f"The id of file {ID} was damaged" in sentence
    assert "left-by-a-crash" in log_messages[-1], "named and kept at the damaged start"
    assert file_names(folder) == {ID, OTHER_ID}, "the next start finds nothing damaged"


def test_rows_and_indexes_of_all_tables_agree_after_a_flipped_id(tmp_path: Path) -> None:
    def fill(db: sqlite3.Connection) -> None:
        for table in NOUNS:
            columns = {column: f"{column} of {table}" for column in COLUMNS[table]}
            digest = row_digest(columns.values())
            if table in {"batches", "answers"}:
                columns["is_open" if table == "batches" else "is_found"] = "1"
            if table == "keys":
                columns |= {"is_revoked": "0", "change": "1"}
            columns["row_digest"] = digest
            marks = ", ".join("?" * len(columns))
            insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
            db.execute(insert, tuple(columns.values()))

    with closing(Records(tmp_path)) as records:
        records.post(fill).result()
    path = tmp_path / "records.db"
    intact_bytes = path.read_bytes()
    for table in NOUNS:
        id_ = f"id of {table}".encode()
        offsets = [at for at in range(len(intact_bytes)) if intact_bytes.startswith(id_, at)]
        assert len(offsets) == 2, "in the row and in the index"
        for offset in offsets:
            data = bytearray(intact_bytes)
            data[offset] ^= 1
            path.write_bytes(data)
            with closing(Records(tmp_path)) as records, records.open_reader() as db:
                assert stored_ids(db, table) == {id_.decode()}
                assert not has_damaged_rows(db, table)


@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE files SET id = '{FLIPPED_ID}' WHERE id = '{ID}'",
        f"UPDATE files SET id = x'ff' WHERE id = '{ID}'",
        f"UPDATE files SET tenant = 'ben' WHERE id = '{OTHER_ID}'",
    ],
)
def test_no_file_is_deleted_while_a_record_is_damaged(
    folder: Path, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    names = file_names(folder)
    change(folder, statement)
    for _ in range(2):
        caplog.clear()
        Records(folder).close()
        assert file_names(folder) == names
        assert "left-by-a-crash" in caplog.text
    if ID in statement:
        assert ID in caplog.text


@pytest.mark.parametrize("damaged_part", ["header", "first frame", "last frame"])
def test_a_file_stays_whose_record_was_in_a_damaged_log(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged_part: str
) -> None:
    copy = tmp_path / "copy"
    with closing(Records(folder)) as records:
        for number in range(3):  # each is a transaction, and so the log has many frames
            body = files.new_file(f"new-{number}", 2, "in.jsonl", "batch")
            records.post(partial(insert_file, body=body)).result()
            records.files.path(body.id).write_bytes(b"{}")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("copy"))  # as if killed now
    intact = tmp_path / "intact"
    shutil.copytree(copy, intact)
    log = bytearray((copy / "records.db-wal").read_bytes())
    log[{"header": 17, "first frame": 100, "last frame": len(log) - 100}[damaged_part]] ^= 1
    (copy / "records.db-wal").write_bytes(log)
    names = file_names(copy)
    for _ in range(2):
        caplog.clear()
        Records(copy).close()
        assert file_names(copy) == names
        assert "new-2" in caplog.text
        assert str(copy / "lost-records") in caplog.text
    (copy / "lost-records").unlink()
    Records(copy).close()
    assert "new-2" not in file_names(copy)
    caplog.clear()
    Records(intact).close()
    assert file_names(intact) == names
    assert caplog.text == ""


def test_a_file_that_a_crash_has_left_is_deleted(folder: Path) -> None:
    Records(folder).close()
    assert file_names(folder) == {ID, OTHER_ID}


def test_a_damaged_time_deletes_neither_file_nor_upload(folder: Path) -> None:
    def fill(db: sqlite3.Connection) -> None:
        values = ("upload-7", "anna", 9**9, b"{}")
        insert = "INSERT INTO uploads (id, tenant, expires_at, body, row_digest) VALUES"
        db.execute(f"{insert} (?, ?, ?, ?, ?)", (*values, row_digest(values)))
        files.insert(db, files.new_file("part-7", 2, "upload-7", files.PART), "anna", "")

    with closing(Records(folder)) as records:
        records.post(fill).result()
    change(folder, "UPDATE files SET expires_at = 1", "UPDATE uploads SET expires_at = 1")

    def expire(db: sqlite3.Connection) -> list[str]:
        return [*files.delete_expired(db, 9**9), *uploads.delete_expired(db, 9**9)]

    with closing(Records(folder)) as records:
        assert records.post(expire).result() == []
        query = "SELECT (SELECT count(*) FROM files), (SELECT count(*) FROM uploads)"
        assert asyncio.run(records.read(lambda db: db.execute(query).fetchone())) == (3, 1)


@pytest.mark.parametrize(
    ("statement", "is_kept"),
    [
        ("UPDATE batches SET is_open = 0", True),
        ("UPDATE batches SET id = 'batch-6'", True),
        ("UPDATE batches SET is_open = 0, body = x'00'", True),
        ("DELETE FROM batches", False),
    ],
)
def test_results_stay_unless_their_batch_has_ended(
    folder: Path, statement: str, *, is_kept: bool
) -> None:
    change(folder, statement)

    def drop(db: sqlite3.Connection) -> Any:
        batches.insert_result(db, BATCH.id, 1, b"{}", is_ok=True)
        batches.drop_results(db)
        return db.execute("SELECT count(*) FROM results").fetchone()

    with closing(Records(folder)) as records:
        assert records.post(drop).result() == (int(is_kept),)
