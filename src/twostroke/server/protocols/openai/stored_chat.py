"""Stored chat completions: those of requests with `store`, to list, read, label and delete."""

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
from twostroke.server.protocols.common.fields import Pairs
from twostroke.server.protocols.common.listing import page_of, query_of
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
_KIND: Final = "chat"  # in the store
_METADATA: Final = "metadata["


class CompletionNotFoundError(TwostrokeError):
    """The tenant has no stored completion with this id."""

    http_status = 404
    code = "completion_not_found"


class StoredCompletion(ChatCompletion, kw_only=True):
    """A stored completion, with the metadata of its request."""

    metadata: dict[str, str]


class StoredCompletions(msgspec.Struct, kw_only=True, frozen=True):
    """A page of stored completions."""

    object: Literal["list"] = "list"
    data: list[StoredCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """A completion was deleted."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


class MetadataRequest(field.RequestObject):
    """New metadata of a stored completion."""

    metadata: Annotated[Pairs | None, field.doc("Replaces the metadata; null removes it.")] = None


BODIES: Final[dict[str, type[msgspec.Struct]]] = {PATH: MetadataRequest}


def read(asked: ChatRequest, tenant: Tenant) -> Job:
    """Translate a request, whose answer may be stored; raises as `chat.read` does."""
    job = chat.read(asked, tenant)
    return replace(job, store=_keeper(asked, tenant)) if asked.store else job


def read_as_llama_server(request: ChatRequest, tenant: Tenant) -> Job:
    """Translate a request by llama-server's path, which continues a last answer.

    Raises as `read` does.
    """
    continues = chat.continues_in_llama_server(request)
    return read(replace(request, continue_final_message=continues), tenant)


def _keeper(asked: ChatRequest, tenant: Tenant) -> Callable[[ChatCompletion], None]:
    """Return a function that stores the answer to a request, if it fits."""

    def keep(completion: ChatCompletion) -> None:
        id_, labels = completion.id, asked.metadata or {}
        messages = [
            {"id": f"{id_}-{place}", "content": None, **_shown(message)}
            for place, message in enumerate(asked.messages)
        ]
        answer = _labelled(encode_json(completion), labels)
        tenant.put(StoredResponse(id_, encode_json(messages), answer, (), kind=_KIND))

    return keep


class StoringEncoder:
    """Writes a completion and stores it, whole, when it has ended."""

    def __init__(self, reply: ResponseInfo, keep: Callable[[ChatCompletion], None]) -> None:
        """Write `reply`; `keep` gets the completion."""
        self._inner = ChatEncoder(reply)
        self._keep = keep
        self._seen: list[events.Event] = []  # those of which the whole is made

    def write(self, event: events.Event) -> bytes:
        """Return the chunks of an event."""
        data = self._inner.write(event)
        if not isinstance(event, events.ContentAdded) or event.scored:
            self._seen.append(event)
        if isinstance(event, events.AnswerFinished):
            self.whole_response(sorted(self._seen, key=_choice_of))
        return data

    def whole_response(self, stream: Iterable[events.Event]) -> ChatCompletion:
        """Return the response that is not streamed."""
        completion = self._inner.whole_response(stream)
        self._keep(completion)
        return completion


def encoder(reply: ResponseInfo) -> Encoder:
    """Return the encoder of a chat completion, which stores it if the request says so."""
    keep = reply.job.store
    return ChatEncoder(reply) if keep is None else StoringEncoder(reply, keep)


def routes(
    tenant_of: Callable[[Request], Tenant],
    limits: RequestLimits,
    note: Callable[[Iterable[Ignored], ServedRequest], None],
    readers: Readers,
) -> list[Route]:
    """Return the routes of stored completions, many of which `readers` read.

    `tenant_of` returns the sender of a request, `note` takes its ignored fields.
    """
    decoder = BodyDecoder(MetadataRequest, limits.max_json_depth)

    def find(request: Request) -> StoredResponse:
        id_ = request.path_params["completion_id"]
        kept = tenant_of(request).find(id_, _KIND)
        if kept is None:
            message = f"Completion with id '{id_[:MAX_NAME_LENGTH]}' not found."
            raise CompletionNotFoundError(message)
        return kept

    async def several(request: Request) -> Response:
        labels = [name for name in request.query_params if name.startswith(_METADATA)]
        asked = query_of(request, ("after", "limit", "order", "model", *labels))
        kept = tenant_of(request).all(_KIND)
        return await readers.run_for(request, lambda: to_json(_page(kept, asked)))

    async def one(request: Request) -> Response:
        kept = find(request)
        if request.method == "DELETE":
            await tenant_of(request).forget(kept.id)
            return to_json(DeletedCompletion(id=kept.id))
        return Response(kept.answer, media_type="application/json")

    async def label(request: Request) -> Response:
        kept = find(request)
        fields, ignored = await receive_fields(request, decoder, limits, readers)
        note(ignored, served_of(request.scope))
        completion = msgspec.json.decode(kept.answer, type=dict[str, Any])
        completion["metadata"] = fields.metadata or {}
        answer = encode_json(completion)
        tenant_of(request).replace(kept, answer)
        return Response(answer, media_type="application/json")

    async def messages(request: Request) -> Response:
        kept, asked = find(request), query_of(request, ("after", "limit", "order"))

        def work() -> Response:
            items = msgspec.json.decode(kept.request_items, type=list[dict[str, Any]])
            return to_json(page_of(items, asked, order="asc"))

        return await readers.run_for(request, work)

    return [
        Route(LIST_PATH, several, methods=["GET"], name=f"GET {LIST_PATH}"),
        Route(PATH, one, methods=["GET", "DELETE"], name=PATH),
        Route(PATH, label, methods=["POST"], name=f"POST {PATH}"),
        Route(f"{PATH}/messages", messages, methods=["GET"], name=f"{PATH}/messages"),
    ]


def _page(kept: list[StoredResponse], asked: dict[str, str]) -> Any:
    """Return a page of completions with the model and the metadata that are asked for."""
    labels = {
        name.removeprefix(_METADATA).removesuffix("]"): value
        for name, value in asked.items()
        if name.startswith(_METADATA)
    }

    def suits(completion: dict[str, Any]) -> bool:
        if asked.get("model", completion["model"]) != completion["model"]:
            return False
        return bool(labels.items() <= completion["metadata"].items())

    completions: Iterator[dict[str, Any]] = (msgspec.json.decode(one.answer) for one in kept)
    return page_of([one for one in completions if suits(one)], asked, order="asc")


def _shown(message: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a message that have a value."""
    fields = msgspec.to_builtins(message)
    return {name: value for name, value in fields.items() if value is not None}


def _labelled(completion: bytes, labels: dict[str, str]) -> bytes:
    """Return a completion's JSON with its metadata."""
    return b"%b,%b" % (completion.removesuffix(b"}"), encode_json({"metadata": labels})[1:])


def _choice_of(event: events.Event) -> int:
    """Return the choice that an event belongs to; the end of all comes last."""
    match event:
        case events.BlockOpened() | events.ContentAdded() | events.BlockClosed():
            return event.block.choice
        case events.ChoiceStarted() | events.ChoiceEnded() | events.PromptScored():
            return event.choice
    return 2**31
