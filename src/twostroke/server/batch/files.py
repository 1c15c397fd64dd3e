"""Stored files: their records, their contents, and the disk space that they take."""

from __future__ import annotations

import asyncio
import secrets
import stat
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from starlette.responses import FileResponse

from twostroke.core.errors import RequestError, TwostrokeError, nearest
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.errors import BodySizeError, UnsupportedFieldError
from twostroke.server.http.request_context import served_of
from twostroke.server.storage import RecordsError
from twostroke.server.storage.folder import has_digest
from twostroke.server.storage.row_digests import is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from sqlite3 import Connection

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.storage import Records, Temporary

PATH: Final = "/v1/files"
FILE_PATH: Final = f"{PATH}/{{file_id}}"
INPUT: Final = "batch"
OUTPUT: Final = "batch_output"
HIDDEN: Final = "message_batch"  # belongs to a batch of Anthropic's protocol
PART: Final = "upload_part"  # of an upload, whose id is the file's name
PURPOSES: Final = (INPUT, "user_data", "assistants", "evals", "fine-tune", "vision")
MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 2_592_000
MAX_LISTED: Final = 10_000
_STEPS: Final = 1 << 13  # in which a room is shared out, so that few results need a look at files
_COLUMNS: Final = "id, bytes, created_at, filename, purpose, expires_at"
# Conditions for files that clients see.
_INTACT: Final = is_intact_in_sql("files")
_VISIBLE: Final = f"purpose NOT IN ('{HIDDEN}', '{PART}') AND ifnull(expires_at > ?, 1)"
_EXPIRY: Final = ("expires_after[anchor]", "expires_after[seconds]")


class NoSuchFileError(TwostrokeError):
    """The tenant has no file with this id."""

    http_status = 404
    code = "file_not_found"


class DamagedFileError(NoSuchFileError):
    """The content of a file differs from what its record says, or is not a file any more."""

    code = "file_damaged"


class FileBody(msgspec.Struct, kw_only=True, frozen=True):
    """A file; `created_at` is Unix time."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, kw_only=True, frozen=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True, frozen=True):
    """A file was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


def insert(db: Connection, file: FileBody, tenant: str, digest: str = "") -> None:
    """Keep the record and the digest of a file, if no file has its id yet."""
    db.execute(
        f"INSERT OR IGNORE INTO files (tenant, {_COLUMNS}, digest, row_digest) "  # noqa: S608 constants
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            tenant,
            file.id,
            file.bytes,
            file.created_at,
            file.filename,
            file.purpose,
            file.expires_at,
            digest,
            row_digest(
                (
                    file.id,
                    tenant,
                    file.purpose,
                    file.filename,
                    file.bytes,
                    file.created_at,
                    file.expires_at,
                    digest,
                )
            ),
        ),
    )


def find(db: Connection, id_: str, tenant: str) -> FileBody:
    """Return a tenant's file; raises NoSuchFileError, and DamagedFileError for its record."""
    query = f"SELECT {_INTACT}, {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND {_VISIBLE}"  # noqa: S608 constants
    row = db.execute(query, (id_, tenant, time.time())).fetchone()
    if row is None:
        raise NoSuchFileError(f"No such file: '{id_[:MAX_NAME_LENGTH]}'.")
    is_intact, *values = row
    if not is_intact:
        reason = f"The record of '{id_}' is damaged: upload the file again."
        raise DamagedFileError(reason)
    return _body(*values)


async def content_of(records: Records, id_: str, media_type: str, filename: str) -> Response:
    """Return the content of a file.

    Raises:
        NoSuchFileError: only its record is there.
        DamagedFileError: it differs from what its record says, or is not a file any more.
        RecordsError: it cannot be read.
    """
    path = records.files.path(id_)
    num_bytes, digest = await records.read(partial(size_and_digest, id_=id_))
    try:
        facts = path.lstat()
    except OSError:
        reason = f"The content of '{id_}' is missing from the server's records."
        raise NoSuchFileError(reason) from None
    if not stat.S_ISREG(facts.st_mode):
        reason = f"The content of '{id_}' is damaged: it is not a file any more."
        raise DamagedFileError(reason)
    if num_bytes not in {None, facts.st_size}:
        reason = f"The content of '{id_}' is damaged: {facts.st_size} of {num_bytes} bytes."
        raise DamagedFileError(reason)
    try:
        is_whole = await asyncio.to_thread(has_digest, path, digest)
    except OSError as error:
        raise RecordsError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not is_whole:
        reason = f"The content of '{id_}' is damaged: its bytes are not those that were stored."
        raise DamagedFileError(reason)
    return FileResponse(path, stat_result=facts, media_type=media_type, filename=filename)


async def keep(
    records: Records, file: Temporary, id_: str, record: Callable[[], Awaitable[object]]
) -> None:
    """Give a file its name, and keep its record: both or none, also if the client leaves.

    Where a disk fails, nobody knows whether the record is there. Then the file stays until another
    record is kept, after which that is known.
    """

    async def both() -> None:
        doubtful = records.files.doubtful
        before = tuple(doubtful)
        try:
            await asyncio.to_thread(file.keep, id_)
            await record()
        except RecordsError:
            doubtful.add(id_)
            raise
        except BaseException:
            await asyncio.to_thread(records.files.remove, id_)
            raise
        with suppress(RecordsError):
            for one in before:
                is_kept = await records.read(partial(_is_kept, id_=one))
                doubtful.discard(one)
                if not is_kept:
                    await asyncio.to_thread(records.files.remove, one)

    work = asyncio.create_task(both())
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


class StorageQuota:
    """The room that tenants have for files, less what is promised to uploads and results.

    It belongs to the event loop.
    """

    def __init__(self, limits: RequestLimits) -> None:
        """Begin without promises."""
        self._limits = limits
        self._promised: Counter[str] = Counter()  # bytes by tenant

    @asynccontextmanager
    async def take(self, records: Records, request: Request, most: int) -> AsyncIterator[int]:
        """Yield how large the upload of a request may be, at most `most`, and keep that room.

        Raises:
            BodySizeError: there is none.
        """
        tenant = served_of(request.scope).tenant
        length = request.headers.get("content-length", "")[:20]
        most = min(most, int(length)) if length.isdecimal() else most
        most = await self._promise(records, tenant, 1, most)
        try:
            yield most
        finally:
            self._promised[tenant] -= most

    async def _promise(self, records: Records, tenant: str, least: int, most: int) -> int:
        """Promise a tenant from `least` to `most` bytes, and return how many.

        Raises:
            BodySizeError: there is no room.
        """
        kept = await records.read(partial(_num_bytes, tenant=tenant))
        left = self._limits.max_files_bytes - kept - self._promised[tenant]
        if left < least:
            raise _full(self._limits)
        num_bytes = min(most, left)
        self._promised[tenant] += num_bytes
        return num_bytes

    def share(self, tenant: str, num_bytes: int) -> QuotaReservation:
        """Return the share of a batch of a tenant, which has results of this size already."""
        self._promised[tenant] += num_bytes
        return QuotaReservation(tenant, num_bytes)

    async def grow(self, records: Records, share: QuotaReservation, num_bytes: int) -> None:
        """Make room in a share for the next result; raises BodySizeError if there is none."""
        while num_bytes > share.num_left:
            least = num_bytes - share.num_left
            most = max(least, self._limits.max_files_bytes // _STEPS)
            more = await self._promise(records, share.tenant, least, most)
            share.num_bytes += more
            share.num_left += more
        share.num_left -= num_bytes

    def end(self, share: QuotaReservation) -> None:
        """Take a share back, whose results are in files now."""
        self._promised[share.tenant] -= share.num_bytes


class QuotaReservation:
    """What a batch has of its tenant's room for its results."""

    def __init__(self, tenant: str, num_bytes: int) -> None:
        """Begin with results of this size."""
        self.tenant, self.num_bytes, self.num_left = tenant, num_bytes, 0


def check_room(db: Connection, tenant: str, limits: RequestLimits) -> None:
    """Raise BodySizeError if a tenant's files take all their room, or are too many."""
    _check_count(db, tenant, limits)
    if _num_bytes(db, tenant) >= limits.max_files_bytes:
        raise _full(limits)


def insert_new(
    db: Connection, file: FileBody, tenant: str, limits: RequestLimits, digest: str = ""
) -> None:
    """Keep the record of a tenant's new file; raises BodySizeError if there is no room."""
    _check_count(db, tenant, limits)
    if _num_bytes(db, tenant) + file.bytes > limits.max_files_bytes:
        raise _full(limits)
    insert(db, file, tenant, digest)


def _check_count(db: Connection, tenant: str, limits: RequestLimits) -> None:
    [count] = db.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()
    if count >= limits.max_files:
        raise BodySizeError(f"You have {count} files, the limit. Delete some.")


def _full(limits: RequestLimits) -> BodySizeError:
    message = f"Your files, with those that arrive, have {limits.max_files_bytes} bytes, the limit."
    return BodySizeError(f"{message} Delete some.")


def size_and_digest(db: Connection, id_: str) -> tuple[int | None, str]:
    """Return the size of a file, None if it has no record, and its digest, empty if not known."""
    row = db.execute("SELECT bytes, digest FROM files WHERE id = ?", (id_,)).fetchone()
    return (None, "") if row is None else (int(row[0]), row[1])


def _is_kept(db: Connection, id_: str) -> bool:
    return db.execute("SELECT 1 FROM files WHERE id = ?", (id_,)).fetchone() is not None


def uploaded(fields: dict[str, str], num_bytes: int, default_purpose: str = "") -> FileBody:
    """Return the record of an uploaded file; raises RequestError for wrong fields."""
    refuse_fields(fields, ("file", "purpose", "expires_in_seconds", *_EXPIRY))
    purpose = fields.get("purpose", default_purpose)
    check_purpose(purpose)
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise RequestError("must be 'created_at'.", field="expires_after.anchor")
    created_at = int(time.time())
    expires_at = None
    for name in ("expires_after[seconds]", "expires_in_seconds"):
        if name in fields:
            expires_at = created_at + _expiry_s(fields[name], name)
    filename = fields["file"][:MAX_NAME_LENGTH] or "file"
    return FileBody(
        id=new_id(),
        bytes=num_bytes,
        created_at=created_at,
        filename=filename,
        purpose=purpose,
        expires_at=expires_at,
    )


def refuse_fields(fields: dict[str, str], names: tuple[str, ...]) -> None:
    """Raise an UnsupportedFieldError if a form has an unknown field."""
    for name in fields:
        if name not in names:
            raise UnsupportedFieldError("is not supported yet: leave it out.", field=name)


def check_purpose(purpose: str) -> None:
    """Raise a RequestError if `purpose` is not a known purpose of files."""
    if purpose not in PURPOSES:
        reason = (
            f"must be one of {', '.join(PURPOSES)}, got '{{value}}'.{nearest(purpose, PURPOSES)}"
        )
        raise RequestError(reason, field="purpose", value=purpose)


def _expiry_s(text: str, name: str) -> int:
    is_number = text.isdecimal() and len(text) <= len(str(MAX_EXPIRY_S))
    if not (is_number and MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S):
        field = "expires_after.seconds" if name in _EXPIRY else name
        raise RequestError(f"must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.", field=field)
    return int(text)


def new_file(
    id_: str,
    num_bytes: int,
    filename: str,
    purpose: str = OUTPUT,
    expires_after_s: int | None = None,
) -> FileBody:
    """Return the record of a file that the server writes."""
    created_at = int(time.time())
    return FileBody(
        id=id_,
        bytes=num_bytes,
        created_at=created_at,
        filename=filename,
        purpose=purpose,
        expires_at=created_at + expires_after_s if expires_after_s is not None else None,
    )


def new_id() -> str:
    """Return the id of a new file."""
    return f"file-{secrets.token_hex(12)}"


def _body(
    id_: str,
    num_bytes: int,
    created_at: int,
    filename: str,
    purpose: str,
    expires_at: int | None,
) -> FileBody:
    """Return a file from its row."""
    return FileBody(
        id=id_,
        bytes=num_bytes,
        created_at=created_at,
        filename=filename,
        purpose=purpose,
        expires_at=expires_at,
    )


def _num_bytes(db: Connection, tenant: str) -> int:
    query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?"
    [num_bytes] = db.execute(query, (tenant,)).fetchone()
    return int(num_bytes)


def delete_expired(db: Connection, now_s: float) -> list[str]:
    """Delete the records of expired files and return their ids; inputs of open batches are kept.

    A damaged record stays, as its time may be another.
    """
    query = f"""
        SELECT id FROM files WHERE expires_at <= ? AND {_INTACT}
            AND NOT EXISTS (SELECT 1 FROM batches WHERE is_open AND input_file = files.id)
    """  # noqa: S608 constants
    rows = db.execute(query, (int(now_s),)).fetchall()
    db.executemany("DELETE FROM files WHERE id = ?", rows)
    return [id_ for (id_,) in rows]


def delete(db: Connection, id_: str, tenant: str) -> None:
    """Delete a file's record; raises RequestError while a batch needs the file."""
    find(db, id_, tenant)
    query = "SELECT id FROM batches WHERE is_open AND input_file = ?"
    if (using := db.execute(query, (id_,)).fetchone()) is not None:
        reason = "is the input of {batch}, which has not ended: cancel that first."
        raise RequestError(reason, field="file_id", batch=using[0])
    db.execute("DELETE FROM files WHERE id = ?", (id_,))


def page(db: Connection, tenant: str, query: dict[str, str]) -> FileList:
    """Return a page of a tenant's files; raises RequestError."""
    limit, order = page_size(query, MAX_LISTED, MAX_LISTED), query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise RequestError("must be asc or desc.", field="order")
    condition, values = f"tenant = ? AND {_VISIBLE} AND {_INTACT}", [tenant, time.time()]
    if "purpose" in query:
        condition, values = f"{condition} AND purpose = ?", [*values, query["purpose"]]
    if after := query.get("after"):
        if (seq := _seq(db, after, tenant)) is None:
            raise RequestError("must be the id of a file.", field="after")
        comparison = "<" if order == "desc" else ">"
        condition, values = f"{condition} AND seq {comparison} ?", [*values, seq]
    sql = f"SELECT {_COLUMNS} FROM files WHERE {condition} ORDER BY seq {order} LIMIT ?"  # noqa: S608 constants
    data = [_body(*row) for row in db.execute(sql, (*values, limit + 1))]
    shown = data[:limit]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return FileList(data=shown, first_id=ends[0], last_id=ends[1], has_more=len(data) > limit)


def rows_of_page(
    db: Connection,
    tenant: str,
    *,
    cursor: str | None,
    count: int,
    is_older: bool,
    ids: list[str],
) -> list[FileBody] | None:
    """Return up to `count` files before or after the file `cursor`, newest first.

    With `ids`, only these files are returned. None if the file `cursor` does not exist.
    """
    condition, values = f"tenant = ? AND {_VISIBLE} AND {_INTACT}", [tenant, time.time()]
    if cursor is not None:
        if (seq := _seq(db, cursor, tenant)) is None:
            return None
        condition, values = f"{condition} AND seq {'<' if is_older else '>'} ?", [*values, seq]
    if ids:
        marks = ", ".join("?" for _ in ids)
        condition, values = f"{condition} AND id IN ({marks})", [*values, *ids]
    order = "desc" if is_older else "asc"
    sql = f"SELECT {_COLUMNS} FROM files WHERE {condition} ORDER BY seq {order} LIMIT ?"  # noqa: S608 constants
    files = [_body(*row) for row in db.execute(sql, (*values, count))]
    return files if is_older else files[::-1]


def _seq(db: Connection, id_: str, tenant: str) -> int | None:
    """Return a file's sequence number, in order of arrival; None if there is no such file."""
    query = "SELECT seq FROM files WHERE id = ? AND tenant = ?"
    row = db.execute(query, (id_, tenant)).fetchone()
    return None if row is None else int(row[0])


def page_size(asked: dict[str, str], default: int, most: int) -> int:
    """Return the size of a page; raises RequestError."""
    limit = asked.get("limit", str(default))
    if not (limit.isdecimal() and len(limit) <= 5 and 1 <= int(limit) <= most):
        raise RequestError(f"must be from 1 to {most}.", field="limit")
    return int(limit)
