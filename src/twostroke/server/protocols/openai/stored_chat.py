"""Chat completions with `store`: stores them, and lets clients list, read and delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.routing import Route

from twostroke.core.errors import TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.server.body import field
from twostroke.server.body.decode import BodyDecoder, receive_fields
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.generation import events
from twostroke.server.generation.response_store import StoredResponse
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.fields import MetadataPairs
from twostroke.server.protocols.common.listing import list_page, read_query
from twostroke.server.protocols.common.prompts import continues_in_llama_server
from twostroke.server.protocols.openai import chat
from twostroke.server.protocols.openai.chat_reply import ChatCompletion, ChatEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.requests import Request

    from twostroke.server.generation.job import Job
    from twostroke.server.generation.protocol import Encoder, ResponseInfo
    from twostroke.server.generation.response_store import Tenant
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.protocols.openai.chat import ChatRequest

LIST_PATH: Final = "/v1/chat/completions"
PATH: Final = f"{LIST_PATH}/{{completion_id}}"
_KIND: Final = "chat"  # of a `StoredResponse`
_METADATA_PREFIX: Final = "metadata["  # of fields in a query


class CompletionNotFoundError(TwostrokeError):
    """The tenant has no stored chat completion with this id."""

    http_status = 404
    code = "completion_not_found"


class StoredCompletion(ChatCompletion, kw_only=True):
    """A chat completion as clients read it after it was stored, with its request's metadata."""

    metadata: dict[str, str]


class StoredCompletions(msgspec.Struct, kw_only=True, frozen=True):
    """The response that lists stored chat completions: one part of the list."""

    object: Literal["list"] = "list"
    data: list[StoredCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """The response to the deletion of a stored chat completion."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


class MetadataRequest(field.RequestObject):
    """The body of a request that replaces the metadata of a stored chat completion."""

    metadata: Annotated[
        MetadataPairs | None, field.doc("Replaces the metadata; null removes it.")
    ] = None


BODIES: Final[dict[str, type[msgspec.Struct]]] = {PATH: MetadataRequest}


def read(request: ChatRequest, tenant: Tenant) -> Job:
    """Translate a chat completion request into a job that also stores the answer if `store` is set.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    job = chat.read(request, tenant)
    return replace(job, store=_completion_storer(request, tenant)) if request.store else job


def read_as_llama_server(request: ChatRequest, tenant: Tenant) -> Job:
    """Translate a request to `/chat/completions`, llama-server's path, into a job.

    Unlike on `/v1/chat/completions`, the answer continues the last message if that is an
    assistant's.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    continues = continues_in_llama_server(request)
    return read(replace(request, continue_final_message=continues), tenant)


def _completion_storer(request: ChatRequest, tenant: Tenant) -> Callable[[ChatCompletion], None]:
    """Return a function that stores the complete chat completion of a request for its tenant."""

    def keep(completion: ChatCompletion) -> None:
        id_ = completion.id
        labels = request.metadata or {}
        messages = [
            {"id": f"{id_}-{index}", "content": None, **_present_fields(message)}
            for index, message in enumerate(request.messages)
        ]
        answer = _with_metadata(encode_json(completion), labels)
        tenant.put(
            StoredResponse(
                id=id_, request_items=encode_json(messages), answer=answer, item_ids=(), kind=_KIND
            )
        )

    return keep


class StoringEncoder:
    """Encodes a chat completion, streamed or not, and stores it when it is complete."""

    def __init__(self, info: ResponseInfo, keep: Callable[[ChatCompletion], None]) -> None:
        """Prepare to encode one response; `keep` is called with the complete completion."""
        self._inner = ChatEncoder(info)
        self._keep = keep
        self._events: list[events.Event] = []  # to build the complete chat completion

    def write(self, event: events.Event) -> bytes:
        """Return the chunks for one event of the answers, as server-sent events.

        The last event stores the complete chat completion.
        """
        data = self._inner.write(event)
        if not isinstance(event, events.ContentAdded) or event.scored:
            self._events.append(event)
        if isinstance(event, events.AnswerFinished):
            self.whole_response(sorted(self._events, key=_choice_of))
        return data

    def whole_response(self, stream: Iterable[events.Event]) -> ChatCompletion:
        """Return the response to a request without a stream, from all events, and store it."""
        completion = self._inner.whole_response(stream)
        self._keep(completion)
        return completion


def encoder(info: ResponseInfo) -> Encoder:
    """Create the encoder of a chat completion, which also stores it if the request sets `store`."""
    keep = info.job.store
    return ChatEncoder(info) if keep is None else StoringEncoder(info, keep)


def routes(
    tenant_of: Callable[[Request], Tenant],
    limits: RequestLimits,
    note: Callable[[Iterable[Ignored], ServedRequest], None],
    readers: Readers,
) -> list[Route]:
    """Return the routes that list, read, change and delete stored chat completions.

    Args:
        tenant_of: returns the tenant that sent a request, with its stored responses.
        limits: the limits of request bodies.
        note: reports the ignored fields of a request.
        readers: threads that decode long lists.
    """
    decoder = BodyDecoder(MetadataRequest, limits.max_json_depth)

    def find(request: Request) -> StoredResponse:
        id_ = request.path_params["completion_id"]
        stored = tenant_of(request).find(id_, _KIND)
        if stored is None:
            message = f"Completion with id '{id_[:MAX_NAME_LENGTH]}' not found."
            raise CompletionNotFoundError(message)
        return stored

    async def list_all(request: Request) -> Response:
        labels = [name for name in request.query_params if name.startswith(_METADATA_PREFIX)]
        query = read_query(request, ("after", "limit", "order", "model", *labels))
        stored = tenant_of(request).all(_KIND)
        return await readers.run_for(request, lambda: to_json(_list_completions(stored, query)))

    async def get_or_delete(request: Request) -> Response:
        stored = find(request)
        if request.method == "DELETE":
            await tenant_of(request).forget(stored.id)
            return to_json(DeletedCompletion(id=stored.id))
        return Response(stored.answer, media_type="application/json")

    async def replace_metadata(request: Request) -> Response:
        stored = find(request)
        fields, ignored = await receive_fields(request, decoder, limits, readers)
        note(ignored, served_of(request.scope))
        completion = msgspec.json.decode(stored.answer, type=dict[str, Any])
        completion["metadata"] = fields.metadata or {}
        answer = encode_json(completion)
        tenant_of(request).replace(stored, answer)
        return Response(answer, media_type="application/json")

    async def messages(request: Request) -> Response:
        stored = find(request)
        query = read_query(request, ("after", "limit", "order"))

        def work() -> Response:
            items = msgspec.json.decode(stored.request_items, type=list[dict[str, Any]])
            return to_json(list_page(items, query, order="asc"))

        return await readers.run_for(request, work)

    return [
        Route(LIST_PATH, list_all, methods=["GET"], name=f"GET {LIST_PATH}"),
        Route(PATH, get_or_delete, methods=["GET", "DELETE"], name=PATH),
        Route(PATH, replace_metadata, methods=["POST"], name=f"POST {PATH}"),
        Route(f"{PATH}/messages", messages, methods=["GET"], name=f"{PATH}/messages"),
    ]


def _list_completions(stored: list[StoredResponse], query: dict[str, str]) -> Any:
    """Select stored chat completions by query parameters, and return one part of the list.

    `model` and `metadata[KEY]` select completions; `after`, `limit` and `order` select the part.
    """
    labels = {
        name.removeprefix(_METADATA_PREFIX).removesuffix("]"): value
        for name, value in query.items()
        if name.startswith(_METADATA_PREFIX)
    }

    def is_selected(completion: dict[str, Any]) -> bool:
        if query.get("model", completion["model"]) != completion["model"]:
            return False
        return bool(labels.items() <= completion["metadata"].items())

    completions: Iterator[dict[str, Any]] = (
        msgspec.json.decode(response.answer) for response in stored
    )
    selected = [completion for completion in completions if is_selected(completion)]
    return list_page(selected, query, order="asc")


def _present_fields(message: msgspec.Struct) -> dict[str, Any]:
    """Return a chat message as a dictionary without the fields that are null."""
    fields = msgspec.to_builtins(message)
    return {name: value for name, value in fields.items() if value is not None}


def _with_metadata(completion: bytes, labels: dict[str, str]) -> bytes:
    """Add `metadata` to a chat completion's JSON, as its last field."""
    return b"%b,%b" % (completion.removesuffix(b"}"), encode_json({"metadata": labels})[1:])


def _choice_of(event: events.Event) -> int:
    """Return the index of the answer to which an event belongs, to sort events by answer.

    Events that belong to all answers get a large number, so that they sort last.
    """
    match event:
        case events.BlockOpened() | events.ContentAdded() | events.BlockClosed():
            return event.block.choice
        case events.ChoiceStarted() | events.ChoiceEnded() | events.PromptScored():
            return event.choice
    return 2**31
