"""Stored files in Anthropic's form, for requests with the header `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from mimetypes import guess_type
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from twostroke.core.errors import RequestError
from twostroke.server.batch.files import FileBody, page_size, rows_of_page

if TYPE_CHECKING:
    from sqlite3 import Connection

DEFAULT_LISTED: Final = 20
MAX_LISTED: Final = 1000
DEFAULT_PURPOSE: Final = "user_data"
QUERY: Final = ("after_id", "before_id", "beta", "ids", "ids[]", "limit", "page", "scope_id")
OTHER_QUERY: Final = ("beta", "scope_id", "workspace_id")


class FileMetadata(msgspec.Struct, kw_only=True, frozen=True):
    """The metadata of a stored file in Anthropic's form; times are in RFC 3339's form."""

    id: str
    type: Literal["file"] = "file"
    created_at: datetime
    expires_at: datetime | None = None
    filename: str
    mime_type: str
    size_bytes: int
    downloadable: bool = True


class FileMetadataList(msgspec.Struct, kw_only=True, frozen=True):
    """The response of GET /v1/files: one part of a tenant's stored files, newest first.

    `next_page` is the parameter `page` of the next request.
    """

    data: list[FileMetadata]
    has_more: bool
    first_id: str | None
    last_id: str | None
    next_page: str | None


class FileDeleted(msgspec.Struct, kw_only=True, frozen=True):
    """The response of DELETE /v1/files/{id} in Anthropic's form."""

    id: str
    type: Literal["file_deleted"] = "file_deleted"


def to_metadata(file: FileBody) -> FileMetadata:
    """Convert a stored file's metadata to Anthropic's form."""
    expires_at = file.expires_at
    return FileMetadata(
        id=file.id,
        created_at=datetime.fromtimestamp(file.created_at, UTC),
        expires_at=datetime.fromtimestamp(expires_at, UTC) if expires_at is not None else None,
        filename=file.filename,
        mime_type=guess_type(file.filename)[0] or "application/octet-stream",
        size_bytes=file.bytes,
    )


def metadata_page(
    db: Connection, tenant: str, query: dict[str, str], ids: list[str]
) -> FileMetadataList:
    """Return the part of a tenant's list of files that a query asks for, in Anthropic's form.

    If `ids` is not empty, only the files with these ids are listed.

    Raises:
        RequestError: a query parameter is not valid.
    """
    limit = page_size(query, DEFAULT_LISTED, MAX_LISTED)
    cursors = ("after_id", "page", "before_id")
    cursor_field = next((name for name in cursors if query.get(name)), None)
    is_older = cursor_field != "before_id"
    rows = rows_of_page(
        db,
        tenant,
        cursor=query[cursor_field] if cursor_field is not None else None,
        count=limit + 1,
        is_older=is_older,
        ids=ids,
    )
    if rows is None:
        raise RequestError("must be the id of a file.", field=cursor_field)
    page_rows = rows[:limit] if is_older else rows[-limit:]
    data = [to_metadata(file) for file in page_rows]
    has_more = len(rows) > limit
    return FileMetadataList(
        data=data,
        has_more=has_more,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        next_page=data[-1].id if has_more and is_older else None,
    )
