"""/v1/files: uploads, lists, returns and deletes files, in OpenAI's form or in Anthropic's."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from starlette.routing import Route

from twostroke.server.batch import anthropic_files, files
from twostroke.server.batch.files import FILE_PATH, INPUT, OUTPUT, PATH, DeletedFile
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.multipart import read_form
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.listing import read_query

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.storage import Records


class FileRoutes:
    """The HTTP handlers of `/v1/files`: upload, list, return and delete stored files."""

    def __init__(
        self, records: Callable[[], Records], quota: files.StorageQuota, limits: RequestLimits
    ) -> None:
        """Create the handlers.

        Args:
            records: returns the server's database and file folder; raises an error if the
                server was started without `--records`.
            quota: limits each tenant's disk space.
            limits: the limits of uploads.
        """
        self._records = records
        self._quota = quota
        self._limits = limits

    def routes(self) -> list[Route]:
        """Return the routes of `/v1/files` and the paths below it."""
        content = f"{FILE_PATH}/content"
        return [
            Route(PATH, self.upload, methods=["POST"], name=f"POST {PATH}"),
            Route(PATH, self.list_files, methods=["GET"], name=f"GET {PATH}"),
            Route(FILE_PATH, self.file, methods=["GET", "DELETE"], name=FILE_PATH),
            Route(content, self.content, methods=["GET"], name=content),
        ]

    async def upload(self, request: Request) -> Response:
        """Answer POST /v1/files: store the uploaded file, and return its metadata."""
        records, tenant = self._records(), served_of(request.scope).tenant
        is_anthropic = _is_anthropic(request)
        default_purpose = anthropic_files.DEFAULT_PURPOSE if is_anthropic else ""
        async with self._quota.reserve_for_upload(
            records, request, self._limits.max_file_bytes
        ) as max_bytes:
            with records.files.begin() as file:
                timeout_s = self._limits.file_timeout_s
                fields = await read_form(request, file.write, max_bytes, timeout_s)
                if is_anthropic:
                    fields.pop("workspace_id", None)
                body = files.uploaded_file(fields, file.num_bytes, default_purpose)
                add = partial(
                    files.insert_new,
                    file=body,
                    tenant=tenant,
                    limits=self._limits,
                    digest=file.digest,
                )
                await files.store_with_record(records, file, body.id, lambda: records.write(add))
        return to_json(anthropic_files.to_metadata(body) if is_anthropic else body)

    async def list_files(self, request: Request) -> Response:
        """Answer GET /v1/files: return the metadata of one part of the tenant's files."""
        records, tenant = self._records(), served_of(request.scope).tenant
        if _is_anthropic(request):
            query = read_query(request, (*anthropic_files.QUERY, "workspace_id"))
            parameters = request.query_params
            ids = [*parameters.getlist("ids"), *parameters.getlist("ids[]")]
            page = partial(anthropic_files.metadata_page, tenant=tenant, query=query, ids=ids)
            return to_json(await records.read(page))
        query = read_query(request, ("after", "limit", "order", "purpose"))
        return to_json(await records.read(partial(files.page, tenant=tenant, query=query)))

    async def file(self, request: Request) -> Response:
        """Answer GET or DELETE of a file: return its metadata, or delete it."""
        records, tenant = self._records(), served_of(request.scope).tenant
        is_anthropic = _is_anthropic(request)
        read_query(request, anthropic_files.OTHER_QUERY if is_anthropic else ())
        id_ = request.path_params["file_id"]
        if request.method != "DELETE":
            file = await records.read(partial(files.find, id_=id_, tenant=tenant))
            return to_json(anthropic_files.to_metadata(file) if is_anthropic else file)
        await records.write(partial(files.delete, id_=id_, tenant=tenant))
        await asyncio.to_thread(records.files.remove, id_)
        deleted = anthropic_files.FileDeleted(id=id_) if is_anthropic else DeletedFile(id=id_)
        return to_json(deleted)

    async def content(self, request: Request) -> Response:
        """Answer GET of a file's content."""
        records, tenant = self._records(), served_of(request.scope).tenant
        id_ = request.path_params["file_id"]
        file = await records.read(partial(files.find, id_=id_, tenant=tenant))
        is_jsonl = file.purpose in {INPUT, OUTPUT}
        media_type = "application/jsonl" if is_jsonl else "application/octet-stream"
        return await files.content_of(records, file.id, media_type, file.filename)


def _is_anthropic(request: Request) -> bool:
    return served_of(request.scope).error_form is ANTHROPIC
