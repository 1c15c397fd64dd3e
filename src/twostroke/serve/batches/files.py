"""OpenAI's files: uploaded inputs of batches, and the results of these."""

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
from starlette.routing import Route

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.http.errors import BodySizeError, UnsupportedFieldError
from twostroke.http.multipart import read_form
from twostroke.http.served import served_of
from twostroke.records import RecordsError
from twostroke.serve.body.explain import MAX_NAME_LENGTH
from twostroke.serve.dialect import to_json
from twostroke.serve.openai.responses.routes import query_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from sqlite3 import Connection

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.http.limits import Limits
    from twostroke.records import Records, Temporary

PATH: Final = "/v1/files"
ONE: Final = f"{PATH}/{{file_id}}"
INPUT: Final = "batch"
OUTPUT: Final = "batch_output"
HIDDEN: Final = "message_batch"  # belongs to a batch of Anthropic's protocol
MAX_LISTED: Final = 10_000
_STEPS: Final = 1 << 13  # in which a room is shared out, so that few results need a look at files
_COLUMNS: Final = "id, bytes, created_at, filename, purpose"


class NoSuchFileError(TwostrokeError):
    """The tenant has no file with this id."""

    http_status = 404
    code = "file_not_found"


class DamagedFileError(NoSuchFileError):
    """The content of a file has another size than its record says, or is not a file any more."""

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


def insert(db: Connection, file: FileBody, tenant: str) -> None:
    """Keep the record of a file; one with the same id stays."""
    db.execute(
        "INSERT OR IGNORE INTO files (tenant, id, bytes, created_at, filename, purpose) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (tenant, file.id, file.bytes, file.created_at, file.filename, file.purpose),
    )


def find(db: Connection, id_: str, tenant: str) -> FileBody:
    """Return a tenant's file; raises NoSuchFileError."""
    query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND purpose != ?"  # noqa: S608 constants
    found = db.execute(query, (id_, tenant, HIDDEN)).fetchone()
    if found is None:
        raise NoSuchFileError(f"No such file: '{id_[:MAX_NAME_LENGTH]}'.")
    return _body(*found)


def routes(records: Callable[[], Records], rooms: Rooms, limits: Limits) -> list[Route]:
    """Return the routes of files; `records` raises if the server keeps none."""

    async def upload(request: Request) -> Response:
        kept, tenant = records(), served_of(request.scope).tenant
        async with rooms.take(kept, request, limits.max_file_bytes) as most:
            with kept.files.begin() as file:
                fields = await read_form(request, file.write, most, limits.file_timeout_s)
                body = _uploaded(fields, file.num_bytes)
                add = partial(insert_new, file=body, tenant=tenant, limits=limits)
                await keep(kept, file, body.id, lambda: kept.write(add))
        return to_json(body)

    async def several(request: Request) -> Response:
        kept, tenant = records(), served_of(request.scope).tenant
        asked = query_of(request, ("after", "limit", "order", "purpose"))
        return to_json(await kept.read(partial(_page, tenant=tenant, asked=asked)))

    async def one(request: Request) -> Response:
        kept, tenant = records(), served_of(request.scope).tenant
        query_of(request, ())
        id_ = request.path_params["file_id"]
        if request.method != "DELETE":
            return to_json(await kept.read(partial(find, id_=id_, tenant=tenant)))
        await kept.write(partial(_delete, id_=id_, tenant=tenant))
        await asyncio.to_thread(kept.files.remove, id_)
        return to_json(DeletedFile(id=id_))

    async def content(request: Request) -> Response:
        kept, tenant = records(), served_of(request.scope).tenant
        file = await kept.read(partial(find, id_=request.path_params["file_id"], tenant=tenant))
        return await content_of(kept, file.id, "application/jsonl", file.filename)

    return [
        Route(PATH, upload, methods=["POST"], name=f"POST {PATH}"),
        Route(PATH, several, methods=["GET"], name=f"GET {PATH}"),
        Route(ONE, one, methods=["GET", "DELETE"], name=ONE),
        Route(f"{ONE}/content", content, methods=["GET"], name=f"{ONE}/content"),
    ]


async def content_of(records: Records, id_: str, media_type: str, filename: str) -> Response:
    """Return the content of a file.

    Raises:
        NoSuchFileError: only its record is there.
        DamagedFileError: it has another size than its record says, or is not a file any more.
    """
    path = records.files.path(id_)
    num_bytes = await records.read(partial(_size_of, id_=id_))
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


class Rooms:
    """The room that tenants have for files, less what is promised to uploads and results.

    It belongs to the event loop.
    """

    def __init__(self, limits: Limits) -> None:
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

    def share(self, tenant: str, num_bytes: int) -> Share:
        """Return the share of a batch of a tenant, which has results of this size already."""
        self._promised[tenant] += num_bytes
        return Share(tenant, num_bytes)

    async def grow(self, records: Records, share: Share, num_bytes: int) -> None:
        """Make room in a share for the next result; raises BodySizeError if there is none."""
        while num_bytes > share.num_left:
            least = num_bytes - share.num_left
            most = max(least, self._limits.max_files_bytes // _STEPS)
            more = await self._promise(records, share.tenant, least, most)
            share.num_bytes += more
            share.num_left += more
        share.num_left -= num_bytes

    def end(self, share: Share) -> None:
        """Take a share back, whose results are in files now."""
        self._promised[share.tenant] -= share.num_bytes


class Share:
    """What a batch has of its tenant's room for its results."""

    def __init__(self, tenant: str, num_bytes: int) -> None:
        """Begin with results of this size."""
        self.tenant, self.num_bytes, self.num_left = tenant, num_bytes, 0


def check_room(db: Connection, tenant: str, limits: Limits) -> None:
    """Raise BodySizeError if a tenant's files take all their room, or are too many."""
    _check_count(db, tenant, limits)
    if _num_bytes(db, tenant) >= limits.max_files_bytes:
        raise _full(limits)


def insert_new(db: Connection, file: FileBody, tenant: str, limits: Limits) -> None:
    """Keep the record of a tenant's new file; raises BodySizeError if there is no room."""
    _check_count(db, tenant, limits)
    if _num_bytes(db, tenant) + file.bytes > limits.max_files_bytes:
        raise _full(limits)
    insert(db, file, tenant)


def _check_count(db: Connection, tenant: str, limits: Limits) -> None:
    [count] = db.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()
    if count >= limits.max_files:
        raise BodySizeError(f"You have {count} files, the limit. Delete some.")


def _full(limits: Limits) -> BodySizeError:
    message = f"Your files, with those that arrive, have {limits.max_files_bytes} bytes, the limit."
    return BodySizeError(f"{message} Delete some.")


def _size_of(db: Connection, id_: str) -> int | None:
    row = db.execute("SELECT bytes FROM files WHERE id = ?", (id_,)).fetchone()
    return None if row is None else int(row[0])


def _is_kept(db: Connection, id_: str) -> bool:
    return db.execute("SELECT 1 FROM files WHERE id = ?", (id_,)).fetchone() is not None


def _uploaded(fields: dict[str, str], num_bytes: int) -> FileBody:
    """Return the record of an uploaded file; raises RequestError for wrong fields."""
    for name in fields:
        if name not in {"file", "purpose"}:
            raise UnsupportedFieldError("is not supported yet: leave it out.", field=name)
    if fields.get("purpose") != INPUT:
        raise RequestError(f"must be '{INPUT}', the input of a batch.", field="purpose")
    name = fields["file"][:MAX_NAME_LENGTH] or "file.jsonl"
    return _body(new_id(), num_bytes, int(time.time()), name, INPUT)


def new_file(id_: str, num_bytes: int, filename: str, purpose: str = OUTPUT) -> FileBody:
    """Return the record of a file that the server writes."""
    return _body(id_, num_bytes, int(time.time()), filename, purpose)


def new_id() -> str:
    """Return the id of a new file."""
    return f"file-{secrets.token_hex(12)}"


def _body(id_: str, num_bytes: int, created_at: int, filename: str, purpose: str) -> FileBody:
    return FileBody(
        id=id_, bytes=num_bytes, created_at=created_at, filename=filename, purpose=purpose
    )


def _num_bytes(db: Connection, tenant: str) -> int:
    query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?"
    [num_bytes] = db.execute(query, (tenant,)).fetchone()
    return int(num_bytes)


def _delete(db: Connection, id_: str, tenant: str) -> None:
    """Delete a file's record; raises RequestError while a batch needs the file."""
    find(db, id_, tenant)
    query = "SELECT id FROM batches WHERE is_open AND input_file = ?"
    if (using := db.execute(query, (id_,)).fetchone()) is not None:
        reason = "is the input of {batch}, which has not ended: cancel that first."
        raise RequestError(reason, field="file_id", batch=using[0])
    db.execute("DELETE FROM files WHERE id = ?", (id_,))


def _page(db: Connection, tenant: str, asked: dict[str, str]) -> FileList:
    limit, order = page_size(asked, MAX_LISTED, MAX_LISTED), asked.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise RequestError("must be asc or desc.", field="order")
    where, values = "tenant = ? AND purpose != ?", [tenant, HIDDEN]
    if "purpose" in asked:
        where, values = f"{where} AND purpose = ?", [*values, asked["purpose"]]
    if after := asked.get("after"):
        found = db.execute("SELECT seq FROM files WHERE id = ? AND tenant = ?", (after, tenant))
        if (row := found.fetchone()) is None:
            raise RequestError("must be the id of a file.", field="after")
        where, values = f"{where} AND seq {'<' if order == 'desc' else '>'} ?", [*values, row[0]]
    query = f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY seq {order} LIMIT ?"  # noqa: S608 constants
    data = [_body(*row) for row in db.execute(query, (*values, limit + 1))]
    shown = data[:limit]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return FileList(data=shown, first_id=ends[0], last_id=ends[1], has_more=len(data) > limit)


def page_size(asked: dict[str, str], default: int, most: int) -> int:
    """Return the size of a page; raises RequestError."""
    limit = asked.get("limit", str(default))
    if not (limit.isdecimal() and len(limit) <= 5 and 1 <= int(limit) <= most):
        raise RequestError(f"must be from 1 to {most}.", field="limit")
    return int(limit)
