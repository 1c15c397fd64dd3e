"""The database: one thread writes, another reads, and each write is on the disk when it returns."""

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

_BUSY_S: Final = 5.0  # how long to wait for another program that has locked the database
_LOOK_S: Final = 0.01
_MOST_TOGETHER: Final = 256  # writes in one transaction
_MOST_LOG_BYTES: Final = 16 << 20  # that stay when the log was written to the database
_MOST_WAITING: Final = 4096
_SHRINK_PAGES: Final = 1024  # at once
_DAMAGE: Final = (msgspec.MsgspecError, UnicodeDecodeError)  # of JSON in the database
_FAULTS: Final = (sqlite3.Error, *_DAMAGE)
_MAX_NAMED_ROWS: Final = 20  # damaged rows that the log names at a start
_logger = logging.getLogger("twostroke.records")


class Records:
    """A folder's database and files, which one process holds at a time.

    Work is a function of a connection; it must not keep the connection. Writes that wait at the
    same time share a transaction, and so one sync of the disk; each is undone alone if it raises.
    """

    def __init__(self, path: Path) -> None:
        """Open the folder `path`, which is made if it is not there.

        Raises:
            RecordsError: another process holds it, a newer version wrote it, it is damaged, or it
                cannot be read or written.
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
        except _FAULTS as error:
            os.close(self._lock)
            raise _explain(error, self.path) from None
        except BaseException:
            os.close(self._lock)
            raise
        self._writes: SimpleQueue[Write | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="twostroke-records", daemon=True)
        self._thread.start()
        self._readers = ThreadPoolExecutor(1, "twostroke-records-reader")

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` returns, once its changes are on the disk; raises what it raises.

        A caller that is cancelled meanwhile does not stop the work.

        Raises:
            RecordsError: the changes could not be written; none was made.
        """
        return await asyncio.wrap_future(self.post(work))

    def post(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """As `write`, without waiting; works are done in the order in which they are posted.

        They are refused where too many wait, as for a database that is locked.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # so that nobody can cancel it
        if self._writes.qsize() >= _MOST_WAITING:
            reason = f"cannot keep up: {_MOST_WAITING:,} changes wait to be written"
            done.set_exception(RecordsError(f"The database {self.path} {reason}."))
            return done
        self._writes.put((work, done))
        return done

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` reads.

        Raises:
            RecordsError: the database cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    async def read_long(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """As `read`, for work that takes seconds: other reads do not wait for it."""

        def read() -> T:
            with self.alone() as connection:
                return work(connection)

        return await asyncio.to_thread(read)

    @contextmanager
    def alone(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection of its own, for a thread that reads for seconds; raises as `read`."""
        try:
            with closing(_connect(self.path)) as connection:
                yield connection
        except _FAULTS as error:
            raise _explain(error, self.path) from None

    @staticmethod
    def shrink(db: sqlite3.Connection) -> bool:
        """Give some unused space of a database back; return whether there may be more.

        A database that was made before this was possible keeps it.
        """
        [before] = db.execute("PRAGMA freelist_count").fetchone()
        for _ in range(min(before, _SHRINK_PAGES)):  # Python steps once, which is a page
            db.execute("PRAGMA incremental_vacuum(1)")
        [after] = db.execute("PRAGMA freelist_count").fetchone()
        return bool(after < before and after)

    def close(self) -> None:
        """Finish the writes that wait, and release the folder."""
        self._writes.put(None)
        self._thread.join()
        self._readers.shutdown()
        for connection in (self._reader, self._writer):
            with suppress(sqlite3.Error):
                connection.close()
        os.close(self._lock)

    def _note_cut_off_log(self) -> None:
        """Log that the newest records are lost, and remember it for files without a record."""
        if is_log_cut_off(self._writer, self.path):
            reason = "The newest changes of %s may be lost: the end of its log is damaged."
            _logger.error(reason, self.path)
            self._lost_records.make()

    def _clean_up(self) -> None:
        """Log damaged records, restore ids, and delete files that a crash has left.

        While any record is damaged or lost, a file without a record may be that record's: it stays.
        """
        known_ids = stored_ids(self._writer, "files")
        faults = restore_ids(self._writer)
        has_lost_records = self._lost_records.is_there
        is_doubtful = has_lost_records or faults or has_damaged_rows(self._reader, "files")
        faults += itertools.islice(damaged_rows(self._reader), _MAX_NAMED_ROWS)
        for sentence in faults[:_MAX_NAMED_ROWS]:
            _logger.error("%s: %s.", self.path, sentence)
        known_ids |= stored_ids(self._reader, "files")
        self.files.remove_unfinished()
        unknown_ids = self.files.ids() - known_ids
        if is_doubtful and unknown_ids:
            names = ", ".join(sorted(unknown_ids)[:_MAX_NAMED_ROWS])
            reason = "%d files of %s stay, though no record names them, as records are damaged: %s."
            _logger.error(reason, len(unknown_ids), self.files.path(""), names)
            if has_lost_records:
                _logger.error("Delete %s to have them deleted.", self._lost_records.path)
            return
        for id_ in unknown_ids:
            self.files.remove(id_)

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self._reader)
        except _FAULTS as error:
            raise _explain(error, self.path) from None

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._writes.get()]
            while not self._writes.empty() and len(batch) < _MOST_TOGETHER:
                batch.append(self._writes.get())
            is_open = None not in batch
            self._write([one for one in batch if one is not None])

    def _write(self, writes: list[Write]) -> None:
        """Do all in one transaction; answer each once it is on the disk."""
        db, results, failed = self._writer, list[tuple[Future[Any], Any]](), list[Any]()
        try:
            db.execute("BEGIN IMMEDIATE")
            for work, done in writes:
                db.execute("SAVEPOINT one")
                try:
                    results.append((done, work(db)))
                except sqlite3.OperationalError:
                    raise
                except Exception as error:  # noqa: BLE001 its caller gets it; the others go on
                    db.execute("ROLLBACK TO one")
                    failed.append((done, error))
                db.execute("RELEASE one")
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            for _, done in writes:
                done.set_exception(_explain(error, self.path))
            return
        for done, fault in failed:
            is_ours = isinstance(fault, _FAULTS)
            done.set_exception(_explain(fault, self.path) if is_ours else fault)
        for done, result in results:
            done.set_result(result)


@contextmanager
def beside(
    path: Path, *, writes: bool = False, makes: bool = False
) -> Iterator[sqlite3.Connection]:
    """Yield the database of a folder that a server may hold, in one short transaction.

    With `writes` nothing else writes during the block, and its changes are on the disk after it; if
    it raises, there are none. With `makes` folder and database are made if they are not there.

    Raises:
        RecordsError: there is no database, another program has locked it for long, a newer version
            wrote it, it is damaged, or it cannot be read or written.
    """
    file = path / "records.db"
    try:
        if makes:
            Folder(path)
        elif not file.is_file():
            message = f"There is no database {file}: is {path} a server's --records folder?"
            raise RecordsError(message)
        with closing(_connect(file)) as db:
            _migrate(db, file)
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            yield db
            db.execute("COMMIT")
    except _FAULTS as error:
        raise _explain(error, file) from None
    except PermissionError as error:
        raise explain(error, file) from None


def _connect(path: Path) -> sqlite3.Connection:
    is_new = False
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        is_new = True
    except OSError:  # it is there, perhaps from an older version, or cannot be made, as SQLite says
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            with suppress(OSError):
                one = path.with_name(name)
                one.chmod(one.stat().st_mode & 0o700)
    connection = sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False)
    use_row_digests(connection)
    if is_new:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes the lock of writers
    _keep_log(connection)
    connection.execute(f"PRAGMA journal_size_limit = {_MOST_LOG_BYTES}")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _keep_log(connection: sqlite3.Connection) -> None:
    """Have a log of writes kept; while others do so first, SQLite fails at once and not in time."""
    end_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
            time.sleep(_LOOK_S)
        else:
            return


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    """As `migrate`, but not a new database beside files, which it would not know.

    The next server would delete them, though a backup of the database may know them.
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
    is_json = isinstance(error, _DAMAGE)
    code = getattr(error, "sqlite_errorcode", 0)
    kind = sqlite3.SQLITE_CORRUPT if is_json else code & 0xFF
    if code == sqlite3.SQLITE_IOERR_SHMSIZE:  # no room for the index of the log
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
    """Return whether the file system of a folder is mounted so."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _lock(path: Path) -> int:
    """Lock the folder until the process ends or the descriptor is closed."""
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
