"""Anthropic's message batches: the HTTP handlers of /v1/messages/batches, and the results."""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.routing import Route

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.server.batch import files, stored_batches
from twostroke.server.batch.files import page_size
from twostroke.server.batch.lines import WrongLineError, parse
from twostroke.server.batch.openai import find
from twostroke.server.batch.results import ResultFormat
from twostroke.server.batch.stored_batches import Batch
from twostroke.server.body.decode import json_syntax_error
from twostroke.server.body.explain import explain
from twostroke.server.http.errors import BodySyntaxError
from twostroke.server.http.limits import Spool, receive_json
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.listing import read_query

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.server.batch.queueing import BatchPace
    from twostroke.server.batch.runner import BatchRunner
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.storage import Records, Temporary

ENDPOINT: Final = "/v1/messages"
PATH: Final = f"{ENDPOINT}/batches"
BATCH_PATH: Final = f"{PATH}/{{batch_id}}"
PROTOCOL: Final = "anthropic"
MAX_LISTED: Final = 1000
DEFAULT_LISTED: Final = 20
_WINDOW: Final = "24h"
_WINDOW_S: Final = 86_400


class BatchedMessage(msgspec.Struct, frozen=True):
    """An entry of `requests` in a new message batch: one request to `/v1/messages`."""

    custom_id: Annotated[str, Meta(description="Names the request among its batch's.")]
    params: Annotated[
        msgspec.Raw,
        Meta(
            description=f"A body for `{ENDPOINT}`, without `stream`.",
            extra_json_schema={"type": "object"},
        ),
    ]


class MessageBatchRequest(msgspec.Struct, frozen=True):
    """The body of a request that creates a message batch: the requests to run."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1)]


class MessageCounts(msgspec.Struct, frozen=True):
    """How many requests of a message batch have each outcome; their sum is the number of all."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True, frozen=True):
    """A message batch in Anthropic's form; times are in RFC 3339's form.

    `seconds_left`, the estimated time to the end, is Twostroke's extension.
    """

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: None = None
    results_url: str | None
    seconds_left: float | None


class MessageBatchList(msgspec.Struct, frozen=True):
    """The response of GET /v1/messages/batches: one part of the tenant's batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, kw_only=True, frozen=True):
    """The response of DELETE /v1/messages/batches/{id}."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


BODIES: Final[dict[str, type[msgspec.Struct]]] = {PATH: MessageBatchRequest}


class _Requests(msgspec.Struct):
    """The body of a new message batch, with its requests left as JSON.

    Decoding all requests at once would block the other threads for long.
    """

    requests: Annotated[list[msgspec.Raw], Meta(min_length=1)]


T = TypeVar("T")
_requests_decoder: Final = msgspec.json.Decoder(_Requests)
_request_decoder: Final = msgspec.json.Decoder(BatchedMessage)


class MessageBatches:
    """The HTTP handlers of `/v1/messages/batches` and the paths below it."""

    def __init__(
        self,
        records: Callable[[], tuple[Records, BatchRunner]],
        quota: files.StorageQuota,
        limits: RequestLimits,
    ) -> None:
        """Create the handlers.

        Args:
            records: returns the server's database and file folder, and its batch runner; raises
                an error if the server was started without `--records`.
            quota: limits each tenant's disk space.
            limits: the limits of batches and requests.
        """
        self._records = records
        self._quota = quota
        self._limits = limits

    def routes(self) -> list[Route]:
        """Return the routes of `/v1/messages/batches` and the paths below it."""
        return [
            Route(PATH, self.create, methods=["POST"], name=f"POST {PATH}"),
            Route(PATH, self.list_batches, methods=["GET"], name=PATH),
            Route(BATCH_PATH, self.batch, methods=["GET", "DELETE"], name=BATCH_PATH),
            Route(
                f"{BATCH_PATH}/cancel", self.cancel, methods=["POST"], name=f"{BATCH_PATH}/cancel"
            ),
            Route(
                f"{BATCH_PATH}/results", self.results, methods=["GET"], name=f"{BATCH_PATH}/results"
            ),
        ]

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/messages/batches: store a batch of the body's requests, and start it."""
        db, runner = self._records()
        limits = self._limits
        served_request = served_of(request.scope)
        async with self._quota.reserve_for_upload(db, request, limits.max_batch_bytes) as max_bytes:
            with db.files.begin() as body, db.files.begin() as lines:
                spool = Spool(body.write)
                await receive_json(request, spool.take, max_bytes, limits.file_timeout_s)
                await spool.end()
                if not body.num_bytes:
                    raise BodySyntaxError("The body is empty: send a JSON object of fields.")
                total = await runner.readers.run(
                    served_request.tenant, _write_lines, body.read(), lines, limits
                )
                id_ = f"msgbatch_{secrets.token_hex(12)}"
                file_id = files.new_id()
                file = files.new_file(file_id, lines.num_bytes, f"{id_}.jsonl", files.HIDDEN)
                batch = _new(id_, served_request, file_id, total)
                await files.store_with_record(
                    db, lines, file_id, lambda: runner.add(batch, file, lines.digest)
                )
        return to_json(body_of(batch, None, request))

    async def list_batches(self, request: Request) -> Response:
        """Answer GET /v1/messages/batches: return one part of the tenant's message batches."""
        db, runner = self._records()
        query = read_query(request, ("after_id", "before_id", "limit", "beta"))
        limit = page_size(query, DEFAULT_LISTED, MAX_LISTED)
        tenant = served_of(request.scope).tenant
        field = "before_id" if query.get("before_id") else "after_id"
        page = partial(
            stored_batches.page,
            tenant=tenant,
            protocol=PROTOCOL,
            cursor=query.get(field) or None,
            count=limit + 1,
            is_older=field == "after_id",
        )
        batches = await db.read(page)
        if batches is None:
            raise RequestError("must be the id of a batch.", field=field)
        page_batches = batches[:limit] if field == "after_id" else batches[-limit:]
        data = [body_of(batch, runner.pace(batch), request) for batch in page_batches]
        page_body = MessageBatchList(
            data,
            has_more=len(batches) > limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )
        return to_json(page_body)

    async def batch(self, request: Request) -> Response:
        """Answer GET or DELETE of a message batch: return its state, or delete an ended batch."""
        db, runner = self._records()
        batch = await find(db, request, PROTOCOL)
        if request.method != "DELETE":
            return to_json(body_of(batch, runner.pace(batch), request))
        if batch.is_open:
            raise RequestError("has not ended: cancel it first.", field="batch_id")
        await db.write(partial(stored_batches.delete, batch=batch))
        for id_ in filter(None, (batch.input_file, batch.output_file)):
            await asyncio.to_thread(db.files.remove, id_)
        return to_json(DeletedMessageBatch(id=batch.id))

    async def cancel(self, request: Request) -> Response:
        """Answer POST of a message batch's `/cancel`: cancel the batch and its running requests."""
        db, runner = self._records()
        batch = await runner.cancel(await find(db, request, PROTOCOL))
        if batch.status not in {"cancelling", "cancelled"}:
            raise RequestError("cannot be cancelled any more.", field="batch_id")
        return to_json(body_of(batch, runner.pace(batch), request))

    async def results(self, request: Request) -> Response:
        """Answer GET of a message batch's `/results`: return a JSON line for each request."""
        db, _ = self._records()
        batch = await find(db, request, PROTOCOL)
        if batch.output_file is None and batch.errors:
            raise RequestError(batch.errors[0].message)
        if batch.output_file is None or batch.is_open:
            reason = "has not ended: there are results once its processing_status is ended."
            raise RequestError(reason, field="batch_id")
        name = f"{batch.id}.jsonl"
        return await files.content_of(db, batch.output_file, "application/x-jsonl", name)


def body_of(batch: Batch, pace: BatchPace | None, request: Request) -> MessageBatch:
    """Describe a batch in Anthropic's form, as the API returns it.

    `pace` is the batch's progress while its requests run, else None.
    """
    since = {name: datetime.fromtimestamp(time_s, UTC) for name, time_s in batch.since.items()}
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if batch.status == "cancelling":
        status = "canceling"
    url = None
    if not batch.is_open:
        status = "ended"
        is_behind_tls = request.headers.get("x-forwarded-proto") == "https"
        scheme = "https" if is_behind_tls else request.url.scheme
        url = str(request.url.replace(scheme=scheme, path=f"{PATH}/{batch.id}/results", query=""))
    return MessageBatch(
        id=batch.id,
        processing_status=status,
        request_counts=_counts(batch, pace),
        created_at=since["validating"],
        expires_at=datetime.fromtimestamp(batch.expires_at, UTC),
        ended_at=None if batch.is_open else since[batch.status],
        cancel_initiated_at=since.get("cancelling"),
        results_url=url,
        seconds_left=pace.seconds_left if pace is not None else None,
    )


def _counts(batch: Batch, pace: BatchPace | None) -> MessageCounts:
    if batch.is_open:
        num_done = pace.num_done if pace is not None else 0
        num_failed = pace.num_failed if pace is not None else 0
        return MessageCounts(
            processing=batch.total - num_done,
            succeeded=num_done - num_failed,
            errored=num_failed,
        )
    return MessageCounts(
        succeeded=batch.completed,
        errored=batch.failed - (batch.unrun if batch.status != "failed" else 0),
        canceled=batch.unrun if batch.status == "cancelled" else 0,
        expired=batch.unrun if batch.status == "expired" else 0,
    )


def _write_lines(body: mmap, file: Temporary, limits: RequestLimits) -> int:
    """Write the requests of a new message batch to an input file, a line each; return how many.

    Raises:
        RequestError: the body is not a list of requests, or a request is not valid.
        RecordsError: the disk fails.
    """
    requests = _decode(_requests_decoder, body).requests
    if len(requests) > limits.max_batch_lines:
        raise RequestError(
            f"has more than {counted_noun(limits.max_batch_lines, 'item')}.", field="requests"
        )
    index_by_custom_id: dict[str, int] = {}  # by custom_id
    for index, raw in enumerate(requests):
        path = f"requests[{index}]"
        message = _decode(_request_decoder, raw, path)
        params = msgspec.json.format(message.params, indent=-1)
        if not params.startswith(b"{"):
            raise RequestError("must be an object.", field=f"{path}.params")
        if (first_index := index_by_custom_id.setdefault(message.custom_id, index)) != index:
            reason = f"is the custom_id of requests[{first_index}], too."
            raise RequestError(reason, field=f"{path}.custom_id")
        line = encode_json(
            {
                "custom_id": message.custom_id,
                "method": "POST",
                "url": ENDPOINT,
                "body": msgspec.Raw(params),
            }
        )
        try:
            parse(index + 1, line, limits)
        except WrongLineError as wrong:
            raise RequestError(f"In {path}: {wrong.args[0].message}", field=path) from None
        file.write(line + b"\n")
    return len(requests)


def _decode(decoder: msgspec.json.Decoder[T], text: mmap | msgspec.Raw, path: str = "") -> T:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise explain(str(error), decoder.type, text, path) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise json_syntax_error(error, text) from None


def _new(id_: str, served_request: ServedRequest, input_file: str, total: int) -> Batch:
    now_s = time.time()
    return Batch(
        id=id_,
        tenant=served_request.tenant,
        key=served_request.key.id if served_request.key is not None else "",
        protocol=PROTOCOL,
        endpoint=ENDPOINT,
        input_file=input_file,
        window=_WINDOW,
        expires_at=now_s + _WINDOW_S,
        status="in_progress",
        since={"validating": now_s, "in_progress": now_s},
        total=total,
    )


def _result(custom_id: str, answer: InternalResponse) -> bytes:
    body = msgspec.Raw(answer.body)
    if answer.status < 400:
        return _line(custom_id, {"type": "succeeded", "message": body})
    return _line(custom_id, {"type": "errored", "error": body})


def _unrun(custom_id: str, batch: Batch) -> bytes:
    if batch.ends_as == "cancelled":
        return _line(custom_id, {"type": "canceled"})
    if batch.ends_as == "expired":
        return _line(custom_id, {"type": "expired"})
    error_type = "request_too_large" if batch.errors == (stored_batches.NO_ROOM,) else "api_error"
    message = f"Not run: {batch.errors[0].message}" if batch.errors else "Not run."
    if batch.ends_as == "completed":
        message = "The request's result was damaged on the server's disk: send it again."
    error = {"type": "error", "error": {"type": error_type, "message": message}}
    return _line(custom_id, {"type": "errored", "error": error})


def _line(custom_id: str, result: dict[str, object]) -> bytes:
    return encode_json({"custom_id": custom_id, "result": result})


FORM: Final = ResultFormat(result=_result, unrun=_unrun, has_error_file=False, purpose=files.HIDDEN)
