"""OpenAI's uploads: a client sends a large file in parts, which the server joins."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.routing import Route

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.server.batch import files
from twostroke.server.batch.files import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    PART,
    PURPOSES,
    DamagedFileError,
    FileBody,
    StorageQuota,
)
from twostroke.server.body import field
from twostroke.server.body.decode import BodyDecoder, receive_fields
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.errors import BodySizeError
from twostroke.server.http.multipart import read_form
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.storage import DamagedRowError, RecordsError
from twostroke.server.storage.folder import new_hash
from twostroke.server.storage.row_digests import is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from sqlite3 import Connection

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.storage import Records, Temporary

PATH: Final = "/v1/uploads"
UPLOAD_PATH: Final = f"{PATH}/{{upload_id}}"
PARTS_PATH: Final = f"{UPLOAD_PATH}/parts"
COMPLETE_PATH: Final = f"{UPLOAD_PATH}/complete"
CANCEL_PATH: Final = f"{UPLOAD_PATH}/cancel"
MAX_UPLOAD_S: Final = 3600  # from the first request to the last part
MAX_PART_BYTES: Final = 64 * 1024 * 1024
MAX_PARTS: Final = 10_000
_COPY_BYTES: Final = 1 << 20

Status = Literal["pending", "completed", "cancelled", "expired"]


class NoSuchUploadError(TwostrokeError):
    """The tenant has no upload with this id."""

    http_status = 404
    code = "upload_not_found"


class ExpiresAfter(field.RequestObject):
    """The field `expires_after`: a stored file's lifetime in seconds after its creation."""

    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
    anchor: Literal["created_at"] = "created_at"


class UploadRequest(field.RequestObject):
    """The body of a request that begins an upload: a file whose parts the client sends later."""

    filename: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    purpose: Annotated[str, field.doc("What the file is for.", enum=list(PURPOSES))]
    bytes: Annotated[int, Meta(ge=0, description="The number of bytes of all parts together.")]
    mime_type: Annotated[str | None, field.doc("Its media type.")] = None
    expires_after: Annotated[
        ExpiresAfter | None, field.doc("When to delete the file, counted from its completion.")
    ] = None


class CompleteRequest(field.RequestObject):
    """The body of a request that completes an upload: the ids of its parts, in their order."""

    part_ids: Annotated[list[str], Meta(max_length=MAX_PARTS)]
    md5: Annotated[
        str | None, field.doc("The MD5 of the file in hexadecimal digits, to be checked.")
    ] = None


class UploadBody(msgspec.Struct, kw_only=True, frozen=True):
    """An upload in OpenAI's form; times are Unix times."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    mime_type: str | None = None
    status: Status = "pending"
    file: FileBody | None = None


class UploadPartBody(msgspec.Struct, kw_only=True, frozen=True):
    """A part of an upload in OpenAI's form."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class StoredUpload(msgspec.Struct, kw_only=True, frozen=True):
    """An upload as the database stores it.

    `expires_after_s` is the lifetime of the complete file in seconds; None for no limit.
    """

    body: UploadBody
    expires_after_s: int | None = None


_INTACT: Final = is_intact_in_sql("uploads")
_upload_decoder: Final = msgspec.json.Decoder(StoredUpload)
BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    PATH: UploadRequest,
    COMPLETE_PATH: CompleteRequest,
}


class Uploads:
    """The HTTP handlers of `/v1/uploads` and the paths below it.

    The parts of an upload count as files of its tenant.
    """

    def __init__(
        self,
        records: Callable[[], Records],
        quota: StorageQuota,
        limits: RequestLimits,
        note: Callable[[Iterable[Ignored], ServedRequest], None],
        readers: Readers,
    ) -> None:
        """Create the handlers.

        Args:
            records: returns the server's database and file folder; raises an error if the
                server was started without `--records`.
            quota: limits each tenant's disk space.
            limits: the limits of files and request bodies.
            note: records the ignored fields of a request.
            readers: threads that decode long bodies.
        """
        self._records = records
        self._quota = quota
        self._limits = limits
        self._note = note
        self._readers = readers
        self._joining_ids: set[str] = set()  # uploads whose parts are being written into a file
        self._decoders: dict[str, BodyDecoder[Any]] = {
            path: BodyDecoder(kind, limits.max_json_depth) for path, kind in BODIES.items()
        }

    def routes(self) -> list[Route]:
        """Return the routes of `/v1/uploads` and the paths below it."""
        return [
            Route(PATH, self.create, methods=["POST"], name=PATH),
            Route(UPLOAD_PATH, self.upload, methods=["GET"], name=UPLOAD_PATH),
            Route(PARTS_PATH, self.add_part, methods=["POST"], name=PARTS_PATH),
            Route(COMPLETE_PATH, self.complete, methods=["POST"], name=COMPLETE_PATH),
            Route(CANCEL_PATH, self.cancel, methods=["POST"], name=CANCEL_PATH),
        ]

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/uploads: begin an upload; its parts follow in other requests."""
        records, tenant = self._records(), served_of(request.scope).tenant
        fields = await self._decode(PATH, request)
        if fields.bytes > self._limits.max_file_bytes:
            reason = f"must be at most {self._limits.max_file_bytes}, got {fields.bytes}."
            raise RequestError(reason, field="bytes")
        files.check_purpose(fields.purpose)
        now_s = int(time.time())
        upload = UploadBody(
            id=f"upload_{secrets.token_hex(12)}",
            bytes=fields.bytes,
            created_at=now_s,
            expires_at=now_s + MAX_UPLOAD_S,
            filename=fields.filename,
            purpose=fields.purpose,
            mime_type=fields.mime_type,
        )
        expiry = fields.expires_after
        stored = StoredUpload(body=upload, expires_after_s=expiry.seconds if expiry else None)
        values = (upload.id, tenant, upload.expires_at, encode_json(stored))

        def insert(db: Connection) -> None:
            files.check_quota(db, tenant, self._limits)
            check_upload_count(db, tenant, self._limits)
            db.execute(
                "INSERT INTO uploads (id, tenant, expires_at, body, row_digest) "
                "VALUES (?, ?, ?, ?, ?)",
                (*values, row_digest(values)),
            )

        await records.write(insert)
        return to_json(upload)

    async def upload(self, request: Request) -> Response:
        """Answer GET of an upload: return its state."""
        records, tenant = self._records(), served_of(request.scope).tenant
        id_ = request.path_params["upload_id"]
        return to_json((await records.read(partial(find, id_=id_, tenant=tenant))).body)

    async def add_part(self, request: Request) -> Response:
        """Answer POST of an upload's `/parts`: store one part."""
        records, tenant = self._records(), served_of(request.scope).tenant
        id_ = request.path_params["upload_id"]
        await records.read(partial(find_pending, id_=id_, tenant=tenant))
        async with self._quota.reserve_for_upload(records, request, MAX_PART_BYTES) as max_bytes:
            with records.files.begin() as file:
                timeout_s = self._limits.file_timeout_s
                fields = await read_form(
                    request, file.write, max_bytes, timeout_s, file_field="data"
                )
                files.refuse_fields(fields, ("data",))
                part_id = f"part_{secrets.token_hex(12)}"
                part = files.new_file(part_id, file.num_bytes, filename=id_, purpose=PART)

                def insert(db: Connection) -> None:
                    find_pending(db, id_, tenant)
                    files.insert_new(db, part, tenant, self._limits, file.digest)

                await files.store_with_record(records, file, part_id, lambda: records.write(insert))
        body = UploadPartBody(id=part_id, created_at=part.created_at, upload_id=id_)
        return to_json(body)

    async def complete(self, request: Request) -> Response:
        """Answer POST of an upload's `/complete`: join the parts into a stored file."""
        records, tenant = self._records(), served_of(request.scope).tenant
        id_ = request.path_params["upload_id"]
        fields = await self._decode(COMPLETE_PATH, request)
        stored = await records.read(partial(find_pending, id_=id_, tenant=tenant))
        parts = await records.read(partial(parts_of, id_=id_, tenant=tenant))
        check_parts(fields.part_ids, parts, stored.body)
        if id_ in self._joining_ids:  # a copy for each request could fill the disk
            reason = "is being completed by another request: wait for its answer."
            raise RequestError(reason, field="upload_id")
        self._joining_ids.add(id_)
        try:
            completed = await self._join(records, tenant, fields, stored)
        finally:
            self._joining_ids.discard(id_)
        return to_json(completed)

    async def _join(
        self, records: Records, tenant: str, fields: CompleteRequest, stored: StoredUpload
    ) -> UploadBody:
        """Join the parts that a request names into a stored file; return the completed upload.

        Raises:
            RequestError: the size or the MD5 of the parts is not the one stated by the client.
        """
        id_ = stored.body.id
        file_id, now_s = files.new_id(), int(time.time())
        expiry_s = stored.expires_after_s
        with records.files.begin() as file:
            digest = await asyncio.to_thread(join_parts, records, fields.part_ids, file)
            if file.num_bytes != stored.body.bytes:
                reason = "were damaged on the server's disk: begin another upload."
                raise RequestError(reason, field="part_ids")
            if fields.md5 is not None and fields.md5.lower() != digest:
                reason = f"differs from the MD5 of the parts, {digest}: send the parts again."
                raise RequestError(reason, field="md5")
            body = FileBody(
                id=file_id,
                bytes=file.num_bytes,
                created_at=now_s,
                filename=stored.body.filename,
                purpose=stored.body.purpose,
                expires_at=now_s + expiry_s if expiry_s is not None else None,
            )
            completed = replace(stored.body, status="completed", file=body)

            part_ids: list[str] = []  # includes parts that arrived meanwhile

            def insert(db: Connection) -> None:
                find_pending(db, id_, tenant)
                part_ids[:] = remove_parts(db, id_, tenant)
                files.insert_new(db, body, tenant, self._limits, file.digest)
                update(db, replace(stored, body=completed))

            await files.store_with_record(records, file, file_id, lambda: records.write(insert))
        await asyncio.to_thread(remove_files, records, part_ids)
        return completed

    async def cancel(self, request: Request) -> Response:
        """Answer POST of an upload's `/cancel`: cancel it, and delete its parts."""
        records, tenant = self._records(), served_of(request.scope).tenant
        id_ = request.path_params["upload_id"]

        def work(db: Connection) -> tuple[UploadBody, list[str]]:
            stored = find(db, id_, tenant)
            if stored.body.status == "cancelled":
                return stored.body, []
            stored = find_pending(db, id_, tenant)
            cancelled = replace(stored, body=replace(stored.body, status="cancelled"))
            update(db, cancelled)
            return cancelled.body, remove_parts(db, id_, tenant)

        body, part_ids = await records.write(work)
        await asyncio.to_thread(remove_files, records, part_ids)
        return to_json(body)

    async def _decode(self, path: str, request: Request) -> Any:
        decoding = receive_fields(request, self._decoders[path], self._limits, self._readers)
        fields, ignored = await decoding
        self._note(ignored, served_of(request.scope))
        return fields


def find(db: Connection, id_: str, tenant: str) -> StoredUpload:
    """Return a tenant's upload from the database.

    Raises:
        NoSuchUploadError: the tenant has no upload with this id.
        DamagedRowError: the upload's database row is damaged.
    """
    query = f"SELECT body, {_INTACT} FROM uploads WHERE id = ? AND tenant = ?"  # noqa: S608 constants
    row = db.execute(query, (id_, tenant)).fetchone()
    if row is None:
        raise NoSuchUploadError("No such upload: '{id}'.", id=id_[:MAX_NAME_LENGTH])
    body, is_intact = row
    try:
        if not is_intact:
            raise msgspec.DecodeError("its digest is another")
        stored = _upload_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        reason = f"The record of upload '{id_}' is damaged: begin another upload."
        raise DamagedRowError(reason) from None
    if stored.body.status == "pending" and stored.body.expires_at <= time.time():
        return replace(stored, body=replace(stored.body, status="expired"))
    return stored


def find_pending(db: Connection, id_: str, tenant: str) -> StoredUpload:
    """Return a tenant's upload if it still takes parts.

    Raises:
        NoSuchUploadError: the tenant has no upload with this id.
        RequestError: the upload is complete, cancelled or expired.
    """
    stored = find(db, id_, tenant)
    if stored.body.status != "pending":
        reason = "cannot change any more: its status is {status}."
        raise RequestError(reason, field="upload_id", status=stored.body.status)
    return stored


def check_upload_count(db: Connection, tenant: str, limits: RequestLimits) -> None:
    """Check that a tenant may begin another upload.

    Raises:
        BodySizeError: the tenant has as many uploads as it may have files.
    """
    [count] = db.execute("SELECT count(*) FROM uploads WHERE tenant = ?", (tenant,)).fetchone()
    if count >= limits.max_files:
        raise BodySizeError(
            f"You began {counted_noun(count, 'upload')} in the last two hours, the limit."
        )


def parts_of(db: Connection, id_: str, tenant: str) -> dict[str, int]:
    """Return the sizes in bytes of an upload's parts, by the parts' ids."""
    query = "SELECT id, bytes FROM files WHERE tenant = ? AND purpose = ? AND filename = ?"
    return dict(db.execute(query, (tenant, PART, id_)).fetchall())


def check_parts(part_ids: Sequence[str], parts: dict[str, int], upload: UploadBody) -> None:
    """Check that the parts in `part_ids` make up the whole uploaded file.

    `parts` has the size of each part of the upload, by its id.

    Raises:
        RequestError: a part is unknown or named twice, or their total size is wrong.
    """
    seen_ids: set[str] = set()
    for index, part_id in enumerate(part_ids):
        if part_id not in parts:
            raise RequestError("is not a part of this upload.", field=f"part_ids[{index}]")
        if part_id in seen_ids:
            raise RequestError("occurs twice.", field=f"part_ids[{index}]")
        seen_ids.add(part_id)
    total = sum(parts[part_id] for part_id in part_ids)
    if total != upload.bytes:
        reason = (
            f"have {counted_noun(total, 'byte')} together, but the upload was created with "
            f"{upload.bytes}."
        )
        raise RequestError(reason, field="part_ids")


def join_parts(records: Records, part_ids: Sequence[str], file: Temporary) -> str:
    """Write the parts of an upload into one file, and return the file's MD5.

    Raises:
        DamagedFileError: the content of a part is missing, is not a file any more, or is
            damaged.
        RecordsError: the disk fails.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with records.open_reader() as db:
        digests = {id_: files.size_and_digest(db, id_)[1] for id_ in part_ids}
    for part_id in part_ids:
        part_hash = new_hash()
        path = records.files.path(part_id)
        if not path.is_file():
            raise DamagedFileError(f"The content of '{part_id}' is missing: upload it again.")
        try:
            with path.open("rb") as part:
                while data := part.read(_COPY_BYTES):
                    digest.update(data)
                    part_hash.update(data)
                    file.write(data)
        except OSError as error:
            raise RecordsError(f"{path} cannot be read: {error.strerror}.") from None
        if digests[part_id] not in {"", part_hash.hexdigest()}:
            raise DamagedFileError(f"The content of '{part_id}' is damaged: upload it again.")
    return digest.hexdigest()


def remove_parts(db: Connection, id_: str, tenant: str) -> list[str]:
    """Delete the database rows of an upload's parts, and return the parts' ids."""
    part_ids = list(parts_of(db, id_, tenant))
    db.executemany("DELETE FROM files WHERE id = ?", [(part_id,) for part_id in part_ids])
    return part_ids


def remove_files(records: Records, ids: Iterable[str]) -> None:
    """Delete the contents of stored files whose database rows are already deleted."""
    for id_ in ids:
        records.files.remove(id_)


def update(db: Connection, stored: StoredUpload) -> None:
    """Replace an upload's state in the database."""
    body, id_ = encode_json(stored), stored.body.id
    [tenant] = db.execute("SELECT tenant FROM uploads WHERE id = ?", (id_,)).fetchone()
    query = "UPDATE uploads SET body = ?, row_digest = ? WHERE id = ?"
    db.execute(query, (body, row_digest((id_, tenant, stored.body.expires_at, body)), id_))


def delete_expired(db: Connection, now_s: float) -> list[str]:
    """Delete the parts of expired uploads from the database, and return the parts' ids.

    An upload's own row stays for `MAX_UPLOAD_S` seconds after it expires. A damaged row stays with
    its parts, as its expiry time may be wrong.
    """
    query = f"SELECT id, tenant FROM uploads WHERE expires_at <= ? AND {_INTACT}"  # noqa: S608 constants
    part_ids: list[str] = []
    for id_, tenant in db.execute(query, (int(now_s),)).fetchall():
        part_ids += remove_parts(db, id_, tenant)
    query = f"DELETE FROM uploads WHERE expires_at <= ? AND {_INTACT}"  # noqa: S608 constants
    db.execute(query, (int(now_s) - MAX_UPLOAD_S,))
    return part_ids
