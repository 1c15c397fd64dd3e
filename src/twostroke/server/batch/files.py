"""Stored files: their rows in the database, their contents, and each tenant's disk quota."""

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
from twostroke.core.message_text import counted_noun
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
HIDDEN: Final = "message_batch"  # a file of a batch in Anthropic's protocol
PART: Final = "upload_part"  # a part of an upload, whose id is the file's name
PURPOSES: Final = (INPUT, "user_data", "assistants", "evals", "fine-tune", "vision")
MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 2_592_000
MAX_LISTED: Final = 10_000
_RESERVATION_STEPS: Final = 1 << 13  # a reservation grows by a step, so few results query the files
_COLUMNS: Final = "id, bytes, created_at, filename, purpose, expires_at"
_INTACT: Final = is_intact_in_sql("files")
# The condition for files that clients can see.
_VISIBLE: Final = f"purpose NOT IN ('{HIDDEN}', '{PART}') AND ifnull(expires_at > ?, 1)"
_EXPIRY_FIELDS: Final = ("expires_after[anchor]", "expires_after[seconds]")


class NoSuchFileError(TwostrokeError):
    """The tenant has no stored file with this id."""

    http_status = 404
    code = "file_not_found"


class DamagedFileError(NoSuchFileError):
    """The content of a stored file does not match its record in the database."""

    code = "file_damaged"


class FileBody(msgspec.Struct, kw_only=True, frozen=True):
    """The metadata of a stored file in OpenAI's form; `created_at` is Unix time."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, kw_only=True, frozen=True):
    """The response of GET /v1/files in OpenAI's form: one part of a tenant's stored files."""

    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True, frozen=True):
    """The response of DELETE /v1/files/{id} in OpenAI's form."""

    id: str
    object: Literal["file"] = "file"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


def insert(db: Connection, file: FileBody, tenant: str, digest: str = "") -> None:
    """Add a stored file's row, with the digest of its content, to the database.

    Nothing changes if a row with the file's id exists, so that the call can be repeated after a
    crash.
    """
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
    """Return the metadata of a tenant's stored file.

    Raises:
        NoSuchFileError: the tenant has no file with this id.
        DamagedFileError: the file's record is damaged.
    """
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
    """Check a stored file's content, and return it as an HTTP response.

    Raises:
        NoSuchFileError: the content is missing.
        DamagedFileError: the content does not match the size and digest in the database.
        RecordsError: the content cannot be read.
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
        reason = (
            f"The content of '{id_}' is damaged: {facts.st_size} of "
            f"{counted_noun(num_bytes, 'byte')}."
        )
        raise DamagedFileError(reason)
    try:
        is_whole = await asyncio.to_thread(has_digest, path, digest)
    except OSError as error:
        raise RecordsError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not is_whole:
        reason = f"The content of '{id_}' is damaged: its bytes are not those that were stored."
        raise DamagedFileError(reason)
    return FileResponse(path, stat_result=facts, media_type=media_type, filename=filename)


async def store_with_record(
    records: Records, file: Temporary, id_: str, record: Callable[[], Awaitable[object]]
) -> None:
    """Store a file's content and its database row: both or none, also if the client disconnects.

    After a disk error it is unknown whether the row was written. The content then stays until a
    later write succeeds, so that the database can be asked for the row.

    Args:
        records: the server's database and file folder.
        file: the temporary file with the content.
        id_: the id of the file.
        record: writes the row to the database.
    """

    async def store_both() -> None:
        doubtful = records.files.doubtful
        earlier_doubtful = tuple(doubtful)
        try:
            await asyncio.to_thread(file.keep, id_)
            await record()
        except RecordsError:
            doubtful.add(id_)
            raise
        except BaseException:  # also a cancellation: without a record the content must go
            await asyncio.to_thread(records.files.remove, id_)
            raise
        with suppress(RecordsError):
            for doubtful_id in earlier_doubtful:
                has_record = await records.read(partial(_has_record, id_=doubtful_id))
                doubtful.discard(doubtful_id)
                if not has_record:
                    await asyncio.to_thread(records.files.remove, doubtful_id)

    work = asyncio.create_task(store_both())
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


class StorageQuota:
    """The disk quota of each tenant, with reservations for uploads and for results of batches.

    Because of the reservations, simultaneous requests cannot exceed the quota together. Call the
    methods only in the event loop's thread.
    """

    def __init__(self, limits: RequestLimits) -> None:
        """Create the quotas, of `limits.max_files_bytes` for each tenant, without reservations."""
        self._limits = limits
        self._reserved_bytes: Counter[str] = Counter()  # by tenant

    @asynccontextmanager
    async def reserve_for_upload(
        self, records: Records, request: Request, max_bytes: int
    ) -> AsyncIterator[int]:
        """Reserve quota for the body of an upload until the `with` block ends.

        At most `max_bytes` are reserved, or the request's `Content-Length` if that is less. Yields
        the number of bytes that the upload may have.

        Raises:
            BodySizeError: the tenant's quota is used up.
        """
        tenant = served_of(request.scope).tenant
        length = request.headers.get("content-length", "")[:20]
        max_bytes = min(max_bytes, int(length)) if length.isdecimal() else max_bytes
        max_bytes = await self._reserve(records, tenant, 1, max_bytes)
        try:
            yield max_bytes
        finally:
            self._reserved_bytes[tenant] -= max_bytes

    async def _reserve(self, records: Records, tenant: str, min_bytes: int, max_bytes: int) -> int:
        """Reserve the free part of a tenant's quota, but at most `max_bytes`.

        Returns the number of reserved bytes.

        Raises:
            BodySizeError: the tenant's quota has fewer than `min_bytes` left.
        """
        num_stored = await records.read(partial(_num_bytes, tenant=tenant))
        num_free = self._limits.max_files_bytes - num_stored - self._reserved_bytes[tenant]
        if num_free < min_bytes:
            raise _quota_error(self._limits)
        num_bytes = min(max_bytes, num_free)
        self._reserved_bytes[tenant] += num_bytes
        return num_bytes

    def reserve(self, tenant: str, num_bytes: int) -> QuotaReservation:
        """Reserve `num_bytes` of a tenant's quota for the results that a batch already has."""
        self._reserved_bytes[tenant] += num_bytes
        return QuotaReservation(tenant, num_bytes)

    async def use(self, records: Records, reservation: QuotaReservation, num_bytes: int) -> None:
        """Use `num_bytes` of a batch's reservation for a new result.

        The reservation grows if it is used up.

        Raises:
            BodySizeError: the tenant's quota is used up.
        """
        while num_bytes > reservation.num_left:
            min_bytes = num_bytes - reservation.num_left
            max_bytes = max(min_bytes, self._limits.max_files_bytes // _RESERVATION_STEPS)
            num_reserved = await self._reserve(records, reservation.tenant, min_bytes, max_bytes)
            reservation.num_bytes += num_reserved
            reservation.num_left += num_reserved
        reservation.num_left -= num_bytes

    def release(self, reservation: QuotaReservation) -> None:
        """Release a batch's reservation: its results are now in files, which count instead."""
        self._reserved_bytes[reservation.tenant] -= reservation.num_bytes


class QuotaReservation:
    """The part of a tenant's disk quota that one running batch has reserved for its results."""

    def __init__(self, tenant: str, num_bytes: int) -> None:
        """Create a reservation of `num_bytes`, which results already use."""
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.num_left = 0


def check_quota(db: Connection, tenant: str, limits: RequestLimits) -> None:
    """Check that a tenant may store another file.

    Raises:
        BodySizeError: the tenant's files use the whole quota, or are too many.
    """
    _check_count(db, tenant, limits)
    if _num_bytes(db, tenant) >= limits.max_files_bytes:
        raise _quota_error(limits)


def insert_new(
    db: Connection, file: FileBody, tenant: str, limits: RequestLimits, digest: str = ""
) -> None:
    """Add the row of a tenant's new file to the database.

    Raises:
        BodySizeError: the file exceeds the tenant's quota, or the tenant has too many files.
    """
    _check_count(db, tenant, limits)
    if _num_bytes(db, tenant) + file.bytes > limits.max_files_bytes:
        raise _quota_error(limits)
    insert(db, file, tenant, digest)


def _check_count(db: Connection, tenant: str, limits: RequestLimits) -> None:
    [count] = db.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()
    if count >= limits.max_files:
        raise BodySizeError(f"You have {counted_noun(count, 'file')}, the limit. Delete some.")


def _quota_error(limits: RequestLimits) -> BodySizeError:
    message = (
        f"Your files, with those that arrive, have {counted_noun(limits.max_files_bytes, 'byte')}, "
        "the limit."
    )
    return BodySizeError(f"{message} Delete some.")


def size_and_digest(db: Connection, id_: str) -> tuple[int | None, str]:
    """Return a stored file's size and content digest from the database.

    The size is None if the file has no row; the digest is empty if it is not known.
    """
    row = db.execute("SELECT bytes, digest FROM files WHERE id = ?", (id_,)).fetchone()
    return (None, "") if row is None else (int(row[0]), row[1])


def _has_record(db: Connection, id_: str) -> bool:
    return db.execute("SELECT 1 FROM files WHERE id = ?", (id_,)).fetchone() is not None


def uploaded_file(fields: dict[str, str], num_bytes: int, default_purpose: str = "") -> FileBody:
    """Return the metadata of a new file from the form fields of its upload.

    Raises:
        RequestError: a form field is not valid.
    """
    refuse_fields(fields, ("file", "purpose", "expires_in_seconds", *_EXPIRY_FIELDS))
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
    """Check that an upload form only has fields that are in `names`.

    Raises:
        UnsupportedFieldError: the form has another field.
    """
    for name in fields:
        if name not in names:
            raise UnsupportedFieldError("is not supported yet: leave it out.", field=name)


def check_purpose(purpose: str) -> None:
    """Check that the `purpose` of an upload is among the purposes of the API.

    Raises:
        RequestError: the purpose is unknown.
    """
    if purpose not in PURPOSES:
        reason = (
            f"must be one of {', '.join(PURPOSES)}, got '{{value}}'.{nearest(purpose, PURPOSES)}"
        )
        raise RequestError(reason, field="purpose", value=purpose)


def _expiry_s(text: str, name: str) -> int:
    is_number = text.isdecimal() and len(text) <= len(str(MAX_EXPIRY_S))
    if not (is_number and MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S):
        field = "expires_after.seconds" if name in _EXPIRY_FIELDS else name
        raise RequestError(f"must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.", field=field)
    return int(text)


def new_file(
    id_: str,
    num_bytes: int,
    filename: str,
    purpose: str = OUTPUT,
    expires_after_s: int | None = None,
) -> FileBody:
    """Return the metadata of a file that the server creates now.

    `expires_after_s` is its lifetime in seconds; None for no limit.
    """
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
    """Create a random id for a new stored file."""
    return f"file-{secrets.token_hex(12)}"


def _body(
    id_: str,
    num_bytes: int,
    created_at: int,
    filename: str,
    purpose: str,
    expires_at: int | None,
) -> FileBody:
    """Build a stored file's metadata from the columns of its database row."""
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
    """Delete the rows of expired files, and return the files' ids.

    Inputs of open batches stay. A damaged row stays, too, as its expiry time may be wrong.
    """
    query = f"""
        SELECT id FROM files WHERE expires_at <= ? AND {_INTACT}
            AND NOT EXISTS (SELECT 1 FROM batches WHERE is_open AND input_file = files.id)
    """  # noqa: S608 constants
    rows = db.execute(query, (int(now_s),)).fetchall()
    db.executemany("DELETE FROM files WHERE id = ?", rows)
    return [id_ for (id_,) in rows]


def delete(db: Connection, id_: str, tenant: str) -> None:
    """Delete a stored file's row from the database.

    Raises:
        NoSuchFileError: the tenant has no file with this id.
        RequestError: the file is the input of a batch that has not ended.
    """
    find(db, id_, tenant)
    query = "SELECT id FROM batches WHERE is_open AND input_file = ?"
    if (using_batch := db.execute(query, (id_,)).fetchone()) is not None:
        reason = "is the input of {batch}, which has not ended: cancel that first."
        raise RequestError(reason, field="file_id", batch=using_batch[0])
    db.execute("DELETE FROM files WHERE id = ?", (id_,))


def page(db: Connection, tenant: str, query: dict[str, str]) -> FileList:
    """Return the part of a tenant's list of files that a query asks for, in OpenAI's form.

    Raises:
        RequestError: a query parameter is not valid.
    """
    limit = page_size(query, MAX_LISTED, MAX_LISTED)
    order = query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise RequestError("must be asc or desc.", field="order")
    condition = f"tenant = ? AND {_VISIBLE} AND {_INTACT}"
    values: list[object] = [tenant, time.time()]
    if "purpose" in query:
        condition += " AND purpose = ?"
        values.append(query["purpose"])
    if after := query.get("after"):
        if (seq := _seq(db, after, tenant)) is None:
            raise RequestError("must be the id of a file.", field="after")
        comparison = "<" if order == "desc" else ">"
        condition += f" AND seq {comparison} ?"
        values.append(seq)
    sql = f"SELECT {_COLUMNS} FROM files WHERE {condition} ORDER BY seq {order} LIMIT ?"  # noqa: S608 constants
    data = [_body(*row) for row in db.execute(sql, (*values, limit + 1))]
    page_files = data[:limit]
    return FileList(
        data=page_files,
        first_id=page_files[0].id if page_files else None,
        last_id=page_files[-1].id if page_files else None,
        has_more=len(data) > limit,
    )


def rows_of_page(
    db: Connection,
    tenant: str,
    *,
    cursor: str | None,
    count: int,
    is_older: bool,
    ids: list[str],
) -> list[FileBody] | None:
    """Return up to `count` of a tenant's stored files on one side of a cursor, newest first.

    Returns None if no file has the cursor's id.

    Args:
        db: the database.
        tenant: the owner of the files.
        cursor: the id of a file. None returns the newest files, or the oldest without
            `is_older`.
        count: the maximum number of files.
        is_older: whether to return files older than the cursor; newer files otherwise.
        ids: selects files by their ids; empty for all files.
    """
    condition = f"tenant = ? AND {_VISIBLE} AND {_INTACT}"
    values: list[object] = [tenant, time.time()]
    if cursor is not None:
        if (seq := _seq(db, cursor, tenant)) is None:
            return None
        condition += f" AND seq {'<' if is_older else '>'} ?"
        values.append(seq)
    if ids:
        placeholders = ", ".join("?" for _ in ids)
        condition += f" AND id IN ({placeholders})"
        values += ids
    order = "desc" if is_older else "asc"
    sql = f"SELECT {_COLUMNS} FROM files WHERE {condition} ORDER BY seq {order} LIMIT ?"  # noqa: S608 constants
    files = [_body(*row) for row in db.execute(sql, (*values, count))]
    return files if is_older else files[::-1]


def _seq(db: Connection, id_: str, tenant: str) -> int | None:
    """Return the sequence number of a stored file's row; None if the tenant has no such file.

    Numbers grow in the order in which files were stored.
    """
    query = "SELECT seq FROM files WHERE id = ? AND tenant = ?"
    row = db.execute(query, (id_, tenant)).fetchone()
    return None if row is None else int(row[0])


def page_size(query: dict[str, str], default: int, max_listed: int) -> int:
    """Return how many entries the query of a list endpoint asks for.

    Raises:
        RequestError: `limit` is not a number from 1 to `max_listed`.
    """
    limit = query.get("limit", str(default))
    if not (limit.isdecimal() and len(limit) <= 5 and 1 <= int(limit) <= max_listed):
        raise RequestError(f"must be from 1 to {max_listed}.", field="limit")
    return int(limit)
