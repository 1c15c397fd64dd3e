"""The server's database and its folder of files."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
from contextlib import closing
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.server.storage import Folder, Records, RecordsError, open_database
from twostroke.server.storage.schema import MIGRATIONS

if TYPE_CHECKING:
    from pathlib import Path

_INSERT = "INSERT INTO results (batch, line, kind, body) VALUES (?, ?, 'ok', ?)"


def insert(batch: str, line: int, body: bytes = b"{}") -> Any:
    return lambda db: db.execute(_INSERT, (batch, line, body)).rowcount


def count(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM results").fetchone()[0])


def test_write_is_read_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async def work(records: Records) -> int:
        assert await records.write(insert("a", 1)) == 1
        return await records.read(count)

    with closing(Records(tmp_path)) as records:
        assert asyncio.run(work(records)) == 1
        [mode] = asyncio.run(records.read(lambda db: db.execute("PRAGMA journal_mode").fetchone()))
        [sync] = asyncio.run(records.write(lambda db: db.execute("PRAGMA synchronous").fetchone()))
        assert (mode, sync) == ("wal", 2)
    with closing(Records(tmp_path)) as records:
        assert asyncio.run(records.read_long(count)) == 1


def test_failed_write_is_undone_alone(tmp_path: Path) -> None:
    def wrong(db: sqlite3.Connection) -> None:
        db.execute(_INSERT, ("b", 1, b""))
        raise ValueError("mine")

    async def work(records: Records) -> list[Any]:
        works = [insert("a", 1), wrong, insert("a", 1), insert("a", 2)]
        return await asyncio.gather(*map(records.write, works), return_exceptions=True)

    with closing(Records(tmp_path)) as records:
        first, mine, twice, last = asyncio.run(work(records))
        assert (first, last) == (1, 1)
        assert str(mine) == "mine"
        assert isinstance(twice, RecordsError)  # the same line again
        assert asyncio.run(records.read(count)) == 2


def test_caller_that_leaves_stops_neither_its_write_nor_later_ones(tmp_path: Path) -> None:
    has_begun, may_end = Event(), Event()

    def slow(db: sqlite3.Connection) -> None:
        has_begun.set()
        may_end.wait(60)
        db.execute(_INSERT, ("a", 1, b""))

    async def work(records: Records) -> int:
        waiting = asyncio.ensure_future(asyncio.wrap_future(records.post(slow)))
        await asyncio.to_thread(has_begun.wait, 10)
        later = asyncio.ensure_future(asyncio.wrap_future(records.post(insert("a", 2))))
        await asyncio.sleep(0)
        for future in (waiting, later):
            future.cancel()
        await asyncio.sleep(0)
        may_end.set()
        return await asyncio.wait_for(records.write(count), 10)

    with closing(Records(tmp_path)) as records:
        assert asyncio.run(work(records)) == 2


def test_records_in_a_folder_that_was_there_are_for_their_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with closing(Records(tmp_path)) as records:
        asyncio.run(records.write(insert("a", 1)))
        modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(modes, 0)
    assert {"records.db", "records.db-wal", "files"} <= modes.keys()


def test_reader_cannot_write(tmp_path: Path) -> None:
    with closing(Records(tmp_path)) as records, pytest.raises(RecordsError):
        asyncio.run(records.read(insert("a", 1)))


def test_two_servers_on_one_folder_are_refused(tmp_path: Path) -> None:
    with closing(Records(tmp_path)):
        with pytest.raises(RecordsError) as caught:
            Records(tmp_path)
        assert str(caught.value) == (
            f"Another server or router uses {tmp_path}: stop it, or choose another folder."
        )
    Records(tmp_path).close()


@pytest.mark.parametrize(
    "damage", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_damaged_database_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "records.db").write_bytes(damage)
    for _ in range(2):  # the folder is not left locked
        with pytest.raises(RecordsError, match="is damaged") as caught:
            Records(tmp_path)
        assert str(tmp_path / "records.db") in str(caught.value)


def test_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Records(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "records.db")) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(RecordsError, match="upgrade Twostroke"):
        Records(tmp_path)


def test_locked_database_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.server.storage.database._LOCK_TIMEOUT_S", 0.05)
    with closing(Records(tmp_path)) as records:
        with closing(sqlite3.connect(tmp_path / "records.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(RecordsError, match="locked by another program"):
                asyncio.run(records.write(insert("a", 1)))
            assert asyncio.run(records.read(count)) == 0
        assert asyncio.run(records.write(insert("a", 1))) == 1


def test_full_disk_is_named_and_reading_goes_on(tmp_path: Path) -> None:
    with closing(Records(tmp_path)) as records:
        asyncio.run(records.write(insert("a", 1)))
        asyncio.run(records.write(lambda db: db.execute("PRAGMA max_page_count = 1").fetchone()))
        with pytest.raises(RecordsError, match=r"records\.db cannot be written: the disk is full"):
            asyncio.run(records.write(insert("a", 2, b"x" * 100_000)))
        assert asyncio.run(records.read(count)) == 1


def test_disk_without_room_for_the_index_of_the_log_is_full(tmp_path: Path) -> None:
    Records(tmp_path).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        with (
            pytest.raises(RecordsError, match=r"records\.db .* the disk is full"),
            open_database(tmp_path),
        ):
            pytest.fail("there was room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path) -> None:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
        raise error

    Records(tmp_path).close()
    monkeypatch.setattr("twostroke.server.storage.database._connect", fail)
    with pytest.raises(RecordsError, match="cannot be opened"):
        Records(tmp_path)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(RecordsError, match="on a file system that is read-only"):
        Records(tmp_path)


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="file is not a folder"):
        Records(tmp_path / "file")
    with pytest.raises(RecordsError, match="Not a directory"):
        Records(tmp_path / "file" / "records")


def test_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.begin() as file:
        file.write(b"half")
        assert not folder.path("a").exists()
    assert not folder.path("a").exists()
    for text in (b"first", b"second"):
        with folder.begin() as file:
            file.write(text)
            file.keep("a")
        assert folder.path("a").read_bytes() == text
    assert list((tmp_path / "unfinished").iterdir()) == []


def test_files_that_a_crash_left_are_removed(tmp_path: Path) -> None:
    with closing(Records(tmp_path)) as records:
        (tmp_path / "unfinished" / "x").write_text("half")
        records.files.path("unknown").write_text("orphan")
    Records(tmp_path).close()
    assert [*(tmp_path / "unfinished").iterdir(), *(tmp_path / "files").iterdir()] == []


@pytest.mark.parametrize("is_there", [True, False])
def test_files_of_a_lost_database_are_kept(tmp_path: Path, *, is_there: bool) -> None:
    with closing(Records(tmp_path)) as records:
        records.files.path("known").write_text("result")
    for path in tmp_path.glob("records.db*"):
        path.unlink()
    if is_there:
        (tmp_path / "records.db").touch()
    with (
        pytest.raises(RecordsError, match="restore a backup"),
        open_database(tmp_path, creates=True),
    ):
        pass
    for _ in range(2):  # the folder is not left locked
        with pytest.raises(RecordsError, match="restore a backup"):
            Records(tmp_path)
    assert (tmp_path / "files" / "known").read_text() == "result"


def test_path_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with folder.begin() as file, pytest.raises(RecordsError, match="No space left") as caught:
        file.keep("a")
    assert str(tmp_path) in str(caught.value)


def test_changes_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.server.storage.database._MAX_WAITING_WRITES", 3)
    with closing(Records(tmp_path)) as records:
        has_begun, may_end = Event(), Event()

        def slow(_: sqlite3.Connection) -> None:
            has_begun.set()
            assert may_end.wait(60)

        first = records.post(slow)
        assert has_begun.wait(60)
        waiting = [records.post(lambda _: None) for _ in range(3)]
        with pytest.raises(RecordsError, match="cannot keep up: 3 changes wait to be written"):
            records.post(lambda _: None).result(0)
        may_end.set()
        assert [future.result(20) for future in (first, *waiting)] == [None] * 4


def test_database_of_an_older_version_is_closed_to_others(tmp_path: Path) -> None:
    Records(tmp_path).close()
    path = tmp_path / "records.db"
    path.chmod(0o644)
    with closing(Records(tmp_path)) as records:
        records.post(lambda db: db.execute("DELETE FROM files")).result(20)
        assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("records.db*")} == {0o600}


def test_empty_database_without_files_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "records.db").touch()
    with open_database(tmp_path) as db:
        assert db.execute("SELECT * FROM files").fetchall() == []


def test_space_of_deleted_rows_returns_to_the_file_system(tmp_path: Path) -> None:
    async def work(records: Records) -> None:
        rows = [("a", i, bytes(1 << 20)) for i in range(20)]
        await records.write(lambda db: db.executemany(_INSERT, rows))
        await records.write(lambda db: db.execute("DELETE FROM results"))
        assert await records.write(records.shrink)  # the writer is free in between
        while await records.write(records.shrink):
            pass
        await records.write(lambda db: db.execute("PRAGMA freelist_count").fetchone())
        await records.read_long(lambda db: db.execute("PRAGMA wal_checkpoint").fetchone())
        await records.write(insert("a", 1))

    with closing(Records(tmp_path)) as records:
        asyncio.run(work(records))
        assert (tmp_path / "records.db").stat().st_size < 1 << 20
        assert (tmp_path / "records.db-wal").stat().st_size <= 16 << 20


def test_old_database_keeps_its_space_and_shrinking_ends(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "records.db")) as old:
        old.execute("CREATE TABLE before (body)")
        old.execute("INSERT INTO before VALUES (?)", (bytes(1 << 20),))
        old.commit()
        old.execute("DROP TABLE before")
    with closing(Records(tmp_path)) as records:
        assert not asyncio.run(records.write(records.shrink))
