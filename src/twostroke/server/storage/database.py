"""The server's SQLite database: one thread writes, one reads, and each write is synced."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from twostroke.core.message_text import counted_noun
from twostroke.server.storage.folder import Folder, FolderMarker, RecordsError, explain
from twostroke.server.storage.row_digests import damaged_rows, use_row_digests
from twostroke.server.storage.schema import migrate
from twostroke.server.storage.startup_checks import (
    has_damaged_rows,
    is_log_cut_off,
    restore_ids,
    stored_ids,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Write = tuple[Callable[[sqlite3.Connection], Any], Future[Any]]

T = TypeVar("T")

_LOCK_TIMEOUT_S: Final = 5.0  # waits this long for another program that has locked the database
_LOCK_POLL_S: Final = 0.01
_MAX_WRITES_PER_TRANSACTION: Final = 256
_MAX_IDLE_LOG_BYTES: Final = 16 << 20  # the write-ahead log is cut to this after a checkpoint
_MAX_WAITING_WRITES: Final = 4096
_SHRINK_PAGES: Final = 1024  # SQLite pages that one call of `shrink` frees
_JSON_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError)  # from damaged JSON columns
_DATABASE_ERRORS: Final = (sqlite3.Error, *_JSON_ERRORS)
_MAX_LOGGED_ROWS: Final = 20  # damaged rows that the log names at a start
_logger = logging.getLogger("twostroke.records")


class Records:
    """The SQLite database and the file folder of a server, in the folder of `--records`.

    Only one process may open them at a time. Callers pass `work`, a function of a database
    connection, which must not keep the connection. Writes that wait at the same time share a
    transaction, and so one sync of the disk. If a write raises, only that write is rolled back.
    """

    def __init__(self, path: Path) -> None:
        """Open the database in the folder `path`, and create both if necessary.

        Raises:
            RecordsError: another process has opened the folder, a newer version wrote it, the
                database is damaged, or the disk fails.
        """
        self.path = path / "records.db"
        self.files = Folder(path)
        self._lost_records = FolderMarker(path, "lost-records")
        self._lock = _lock(path)
        try:
            self._writer = _connect(self.path)
            self._note_cut_off_log()
            _migrate(self._writer, self.path)
            self._reader = _connect(self.path)
            self._reader.execute("PRAGMA query_only = ON")
            self._clean_up()
        except _DATABASE_ERRORS as error:
            os.close(self._lock)
            raise _explain(error, self.path) from None
        except BaseException:  # also after Ctrl-C: another process must get the lock
            os.close(self._lock)
            raise
        self._writes: SimpleQueue[Write | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="twostroke-records", daemon=True)
        self._thread.start()
        self._readers = ThreadPoolExecutor(1, "twostroke-records-reader")

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the thread that writes; return its result when the changes are on disk.

        Cancelling the caller does not stop the work. Exceptions of `work` are raised here.

        Raises:
            RecordsError: the changes could not be written, and no change was made.
        """
        return await asyncio.wrap_future(self.post(work))

    def post(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue `work` for the thread that writes, and return its future.

        Calls are run in order. The future fails with a RecordsError if too many writes wait, for
        example because another program has locked the database.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # so that the future cannot be cancelled
        if self._writes.qsize() >= _MAX_WAITING_WRITES:
            reason = f"cannot keep up: {_MAX_WAITING_WRITES:,} changes wait to be written"
            done.set_exception(RecordsError(f"The database {self.path} {reason}."))
            return done
        self._writes.put((work, done))
        return done

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the thread that reads, and return its result.

        Raises:
            RecordsError: the database cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    async def read_long(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which may read for seconds, in its own thread and connection.

        Other reads are not delayed meanwhile.

        Raises:
            RecordsError: the database cannot be read.
        """

        def read() -> T:
            with self.open_reader() as connection:
                return work(connection)

        return await asyncio.to_thread(read)

    @contextmanager
    def open_reader(self) -> Iterator[sqlite3.Connection]:
        """Open a database connection for a thread that reads for seconds.

        Raises:
            RecordsError: the database cannot be read.
        """
        try:
            with closing(_connect(self.path)) as connection:
                yield connection
        except _DATABASE_ERRORS as error:
            raise _explain(error, self.path) from None

    @staticmethod
    def shrink(db: sqlite3.Connection) -> bool:
        """Return unused space of the database file to the file system.

        Each call frees a limited number of unused database pages; the result tells whether unused
        pages are left. Does nothing for a database that an earlier version created without
        `auto_vacuum`.
        """
        [before] = db.execute("PRAGMA freelist_count").fetchone()
        for _ in range(min(before, _SHRINK_PAGES)):  # one call of `execute` frees one page
            db.execute("PRAGMA incremental_vacuum(1)")
        [after] = db.execute("PRAGMA freelist_count").fetchone()
        return bool(after < before and after)

    def close(self) -> None:
        """Finish the queued writes, close the database, and unlock the folder."""
        self._writes.put(None)
        self._thread.join()
        self._readers.shutdown()
        for connection in (self._reader, self._writer):
            with suppress(sqlite3.Error):
                connection.close()
        os.close(self._lock)

    def _note_cut_off_log(self) -> None:
        """Log an error if the end of the database's write-ahead log is damaged.

        A marker file notes that rows may be lost, so that no stored file is deleted.
        """
        if is_log_cut_off(self._writer, self.path):
            reason = "The newest changes of %s may be lost: the end of its log is damaged."
            _logger.error(reason, self.path)
            self._lost_records.make()

    def _clean_up(self) -> None:
        """Repair the database at startup, and delete stored files that no row names.

        Damaged rows are logged, and damaged ids are restored. While a row is damaged or lost, no
        file is deleted, since the row may have named the file.
        """
        known_ids = stored_ids(self._writer, "files")
        faults = restore_ids(self._writer)
        has_lost_records = self._lost_records.is_there
        is_doubtful = has_lost_records or faults or has_damaged_rows(self._reader, "files")
        faults += itertools.islice(damaged_rows(self._reader), _MAX_LOGGED_ROWS)
        for sentence in faults[:_MAX_LOGGED_ROWS]:
            _logger.error("%s: %s.", self.path, sentence)
        known_ids |= stored_ids(self._reader, "files")
        self.files.remove_unfinished()
        unknown_ids = self.files.ids() - known_ids
        if is_doubtful and unknown_ids:
            names = ", ".join(sorted(unknown_ids)[:_MAX_LOGGED_ROWS])
            files = counted_noun(len(unknown_ids), "file is", "files are")
            reason = "In %s, %s kept without a record, since records are damaged: %s."
            _logger.error(reason, self.files.path(""), files, names)
            if has_lost_records:
                _logger.error("Delete %s to have these files deleted.", self._lost_records.path)
            return
        for id_ in unknown_ids:
            self.files.remove(id_)

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._reader)
        except _DATABASE_ERRORS as error:
            raise _explain(error, self.path) from None

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._writes.get()]
            while not self._writes.empty() and len(batch) < _MAX_WRITES_PER_TRANSACTION:
                batch.append(self._writes.get())
            is_open = None not in batch
            self._write([write for write in batch if write is not None])

    def _write(self, writes: list[Write]) -> None:
        """Run queued writes in one transaction; complete their futures when it is on disk."""
        db = self._writer
        results: list[tuple[Future[Any], Any]] = []
        failures: list[tuple[Future[Any], Exception]] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            for work, done in writes:
                db.execute("SAVEPOINT one")
                try:
                    results.append((done, work(db)))
                except sqlite3.OperationalError:
                    raise
                except Exception as error:  # noqa: BLE001 raised to its caller; the other writes continue
                    db.execute("ROLLBACK TO one")
                    failures.append((done, error))
                db.execute("RELEASE one")
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            for _, done in writes:
                done.set_exception(_explain(error, self.path))
            return
        for done, failure in failures:
            is_database_error = isinstance(failure, _DATABASE_ERRORS)
            done.set_exception(_explain(failure, self.path) if is_database_error else failure)
        for done, result in results:
            done.set_result(result)


@contextmanager
def open_database(
    path: Path, *, writes: bool = False, creates: bool = False
) -> Iterator[sqlite3.Connection]:
    """Open the database of a `--records` folder for one short transaction, as commands do.

    A server may use the database meanwhile.

    Args:
        path: the folder.
        writes: lock the database for writing. The changes are on the disk after the `with` block,
            and rolled back if the block raises.
        creates: create the folder and the database if they do not exist.

    Raises:
        RecordsError: there is no database, another program has locked it for long, a newer
            version wrote it, it is damaged, or the disk fails.
    """
    file = path / "records.db"
    try:
        if creates:
            Folder(path)
        elif not file.is_file():
            message = f"There is no database {file}: is {path} a server's --records folder?"
            raise RecordsError(message)
        with closing(_connect(file)) as db:
            _migrate(db, file)
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            yield db
            db.execute("COMMIT")
    except _DATABASE_ERRORS as error:
        raise _explain(error, file) from None
    except PermissionError as error:
        raise explain(error, file) from None


def _connect(path: Path) -> sqlite3.Connection:
    """Open a connection to the database file `path`, and create the file if necessary.

    Only the file's owner may read it.
    """
    is_new = False
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        is_new = True
    except OSError:  # it exists, perhaps from an older version; SQLite reports other errors
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            with suppress(OSError):
                file = path.with_name(name)
                file.chmod(file.stat().st_mode & 0o700)
    connection = sqlite3.connect(
        path, _LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    use_row_digests(connection)
    if is_new:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes the lock of writers
    _use_write_ahead_log(connection)
    connection.execute(f"PRAGMA journal_size_limit = {_MAX_IDLE_LOG_BYTES}")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Turn on the database's write-ahead log, which lets readers and a writer work at once.

    SQLite fails if another program turns the log on at the same moment, so this function retries.
    """
    end_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
            time.sleep(_LOCK_POLL_S)
        else:
            return


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring the tables of a database to the newest version.

    Raises:
        RecordsError: the database is empty while the folder has files. An empty database names
            none of the files, so the next start would delete them, although a backup of the
            database may name them.
    """
    [version] = db.execute("PRAGMA user_version").fetchone()
    files = path.parent / "files"
    if not version and files.is_dir() and any(files.iterdir()):
        raise RecordsError(
            f"The database {path} is empty or was missing, but {files} is not "
            "empty: restore a backup, or move the folder away."
        )
    migrate(db, path)


def _explain(error: Exception, path: Path) -> RecordsError:
    """Return the error for a failed database access, with the remedy if there is one."""
    is_json = isinstance(error, _JSON_ERRORS)
    code = getattr(error, "sqlite_errorcode", 0)
    kind = sqlite3.SQLITE_CORRUPT if is_json else code & 0xFF
    if code == sqlite3.SQLITE_IOERR_SHMSIZE:  # no space for the index of the write-ahead log
        kind = sqlite3.SQLITE_FULL
    why = {
        sqlite3.SQLITE_CORRUPT: "is damaged: restore a backup, or move its folder away",
        sqlite3.SQLITE_NOTADB: "is damaged: restore a backup, or move its folder away",
        sqlite3.SQLITE_BUSY: "is locked by another program",
        sqlite3.SQLITE_LOCKED: "is locked by another program",
        sqlite3.SQLITE_FULL: "cannot be written: the disk is full",
        sqlite3.SQLITE_READONLY: "may not be written by this user",
        sqlite3.SQLITE_CANTOPEN: "cannot be opened",
    }.get(kind, f"cannot be used ({error})")
    if kind in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN} and _is_read_only(path.parent):
        why = "is on a file system that is read-only"
    return RecordsError(f"The database {path} {why}.")


def _is_read_only(folder: Path) -> bool:
    """Whether a folder is on a file system that is mounted read-only."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _lock(path: Path) -> int:
    """Lock the folder of a database, so that no other process opens it; return the descriptor.

    The lock ends when the descriptor is closed or the process ends.

    Raises:
        RecordsError: another process has the lock.
    """
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain(error, path / "lock") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise RecordsError(
            f"Another server or router uses {path}: stop it, or choose another folder."
        ) from None
    return descriptor
