"""OpenAI's batches: the HTTP handlers of /v1/batches, and the form of results."""

from __future__ import annotations

import re
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from starlette.routing import Route

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.server.batch import files, stored_batches
from twostroke.server.batch.files import page_size
from twostroke.server.batch.results import ResultFormat
from twostroke.server.batch.stored_batches import Batch, Status
from twostroke.server.batch.uploads import ExpiresAfter
from twostroke.server.body import field
from twostroke.server.body.decode import BodyDecoder, receive_fields
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.fields import MetadataPairs
from twostroke.server.protocols.common.listing import read_query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.server.batch.queueing import BatchPace
    from twostroke.server.batch.runner import BatchRunner
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.storage import Records

PATH: Final = "/v1/batches"
BATCH_PATH: Final = f"{PATH}/{{batch_id}}"
ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
PROTOCOL: Final = "openai"
RESULT_ID_PREFIX: Final = "batch_req_"
MAX_LISTED: Final = 100
DEFAULT_LISTED: Final = 20
_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([smhd])")
_SECONDS_BY_UNIT: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW_S: Final = 30 * 86_400


class NoSuchBatchError(TwostrokeError):
    """The tenant has no batch with this id."""

    http_status = 404
    code = "batch_not_found"


class BatchRequest(field.RequestObject):
    """The body of a request that creates a batch: an uploaded file, with a request in each line."""

    input_file_id: Annotated[str, field.doc("The id of an uploaded file.")]
    endpoint: Annotated[str, field.doc("The `url` of all lines.", enum=list(ENDPOINTS))]
    completion_window: Annotated[
        str,
        field.doc(
            "The time after which the rest is not run, such as `24h`, up to 30 days.",
            pattern=r"^[1-9]\d{0,5}[smhd]$",
        ),
    ]
    metadata: Annotated[MetadataPairs | None, field.doc("Labels, returned with the batch.")] = None
    output_expires_after: Annotated[
        ExpiresAfter | None,
        field.doc("When to delete the files with results, counted from their creation."),
    ] = None


class RequestCounts(msgspec.Struct, frozen=True):
    """How many requests a batch has, and how many of them have succeeded and failed."""

    total: int
    completed: int
    failed: int


class LineErrorBody(msgspec.Struct, frozen=True):
    """An error in a batch's input file; `line` is None if the error concerns the whole file."""

    code: str
    message: str
    line: int | None
    param: str | None


class ErrorList(msgspec.Struct, kw_only=True, frozen=True):
    """The field `errors` of a batch: the first errors in its input file."""

    object: Literal["list"] = "list"
    data: list[LineErrorBody]


class BatchBody(msgspec.Struct, kw_only=True, frozen=True):
    """A batch in OpenAI's form; times are Unix times.

    `seconds_left`, the estimated time to the end, is Twostroke's extension.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: ErrorList | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    seconds_left: float | None


class BatchList(msgspec.Struct, kw_only=True, frozen=True):
    """The response of GET /v1/batches: one part of the tenant's batches, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


BODIES: Final[dict[str, type[msgspec.Struct]]] = {PATH: BatchRequest}


def routes(
    records: Callable[[], tuple[Records, BatchRunner]],
    limits: RequestLimits,
    note: Callable[[Iterable[Ignored], ServedRequest], None],
    readers: Readers,
) -> list[Route]:
    """Return the routes of `/v1/batches` and the paths below it.

    Args:
        records: returns the server's database and file folder, and its batch runner; raises an
            error if the server was started without `--records`.
        limits: the limits of request bodies.
        note: records the ignored fields of a request.
        readers: threads that decode long bodies.
    """
    decoder = BodyDecoder(BatchRequest, limits.max_json_depth)

    async def create(request: Request) -> Response:
        _, runner = records()
        fields, ignored = await receive_fields(request, decoder, limits, readers)
        note(ignored, served_of(request.scope))
        batch = _new(fields, served_of(request.scope))
        await runner.add(batch)
        return to_json(body_of(batch, None))

    async def list_batches(request: Request) -> Response:
        db, runner = records()
        query = read_query(request, ("after", "limit"))
        limit = page_size(query, DEFAULT_LISTED, MAX_LISTED)
        page = partial(
            stored_batches.page,
            tenant=served_of(request.scope).tenant,
            protocol=PROTOCOL,
            cursor=query.get("after") or None,
            count=limit + 1,
        )
        batches = await db.read(page)
        if batches is None:
            raise RequestError("must be the id of a batch.", field="after")
        data = [body_of(batch, runner.pace(batch)) for batch in batches[:limit]]
        return to_json(_page_body(data, has_more=len(batches) > limit))

    async def get_batch(request: Request) -> Response:
        db, runner = records()
        batch = await find(db, request, PROTOCOL)
        return to_json(body_of(batch, runner.pace(batch)))

    async def cancel(request: Request) -> Response:
        db, runner = records()
        batch = await runner.cancel(await find(db, request, PROTOCOL))
        if batch.status not in {"cancelling", "cancelled"}:
            raise RequestError(
                "cannot be cancelled any more: its status is {status}.",
                field="batch_id",
                status=batch.status,
            )
        return to_json(body_of(batch, runner.pace(batch)))

    return [
        Route(PATH, create, methods=["POST"], name=f"POST {PATH}"),
        Route(PATH, list_batches, methods=["GET"], name=f"GET {PATH}"),
        Route(BATCH_PATH, get_batch, methods=["GET"], name=BATCH_PATH),
        Route(f"{BATCH_PATH}/cancel", cancel, methods=["POST"], name=f"{BATCH_PATH}/cancel"),
    ]


def _page_body(data: list[BatchBody], *, has_more: bool) -> BatchList:
    """Build the response of GET /v1/batches from the batches of one part of the list."""
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
    )


async def find(records: Records, request: Request, protocol: str) -> Batch:
    """Return the batch whose id is in a request's URL path.

    Raises:
        NoSuchBatchError: the tenant has no batch with this id.
    """
    id_, tenant = request.path_params["batch_id"], served_of(request.scope).tenant
    batch = await records.read(
        partial(stored_batches.find, id_=id_, tenant=tenant, protocol=protocol)
    )
    if batch is None:
        raise NoSuchBatchError(f"No batch with the id '{id_[:MAX_NAME_LENGTH]}'.")
    return batch


def body_of(batch: Batch, pace: BatchPace | None) -> BatchBody:
    """Describe a batch in OpenAI's form, as the API returns it.

    `pace` is the batch's progress while its requests run, else None.
    """
    since = {status: int(time_s) for status, time_s in batch.since.items()}
    counts = RequestCounts(batch.total, batch.completed, batch.failed)
    if pace is not None:
        counts = RequestCounts(batch.total, pace.num_done - pace.num_failed, pace.num_failed)
    errors = [
        LineErrorBody(error.code, error.message, line=error.line, param=error.param)
        for error in batch.errors
    ]
    return BatchBody(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=ErrorList(data=errors) if errors else None,
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.status,
        output_file_id=batch.output_file if not batch.is_open else None,
        error_file_id=batch.error_file if not batch.is_open else None,
        created_at=since["validating"],
        in_progress_at=since.get("in_progress"),
        expires_at=int(batch.expires_at),
        finalizing_at=since.get("finalizing"),
        completed_at=since.get("completed"),
        failed_at=since.get("failed"),
        expired_at=since.get("expired"),
        cancelling_at=since.get("cancelling"),
        cancelled_at=since.get("cancelled"),
        request_counts=counts,
        metadata=batch.metadata,
        seconds_left=pace.seconds_left if pace is not None else None,
    )


def _new(fields: BatchRequest, served_request: ServedRequest) -> Batch:
    """Create a batch from the body of a request, without storing it yet.

    Raises:
        RequestError: a field is not valid.
    """
    if fields.endpoint not in ENDPOINTS:
        raise RequestError(f"must be one of {', '.join(ENDPOINTS)}.", field="endpoint")
    window = _WINDOW.fullmatch(fields.completion_window)
    window_s = int(window[1]) * _SECONDS_BY_UNIT[window[2]] if window is not None else 0
    if not 0 < window_s <= _MAX_WINDOW_S:
        reason = "must be a time such as 24h, up to 30d."
        raise RequestError(reason, field="completion_window")
    now_s = time.time()
    expiry = fields.output_expires_after
    return Batch(
        id=f"batch_{secrets.token_hex(12)}",
        tenant=served_request.tenant,
        key=served_request.key.id if served_request.key is not None else "",
        protocol=PROTOCOL,
        endpoint=fields.endpoint,
        input_file=fields.input_file_id,
        window=fields.completion_window,
        expires_at=now_s + window_s,
        metadata=fields.metadata,
        output_expires_after_s=expiry.seconds if expiry is not None else None,
        since={"validating": now_s},
    )


def result(custom_id: str, answer: InternalResponse, id_: str | None = None) -> bytes:
    """Return the result line of a batch request, in OpenAI's form.

    `answer` is the response to the request. `id_` is the result's id; None for a random id.
    """
    body = msgspec.Raw(answer.body)
    response = {
        "status_code": answer.status,
        "request_id": answer.headers["x-request-id"],
        "body": body,
    }
    return _line(custom_id, response=response, id_=id_)


def _unrun(custom_id: str, batch: Batch) -> bytes:
    message = {
        "expired": "This request could not be executed before the completion window expired.",
        "cancelled": "This batch was cancelled before the request was executed.",
        "completed": "The request's result was damaged on the server's disk: send it again.",
    }.get(batch.ends_as or "", "This batch failed before the request was executed: see its errors.")
    return _line(custom_id, error={"code": f"batch_{batch.ends_as}", "message": message})


def _line(
    custom_id: str, response: object = None, error: object = None, id_: str | None = None
) -> bytes:
    id_ = id_ or f"{RESULT_ID_PREFIX}{secrets.token_hex(12)}"
    return encode_json({"id": id_, "custom_id": custom_id, "response": response, "error": error})


FORM: Final = ResultFormat(result=result, unrun=_unrun, has_error_file=True, purpose=files.OUTPUT)
