"""/v1/conversations: creates, reads, changes and deletes conversations and their items."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import msgspec
from starlette.routing import Route

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.server.body import field
from twostroke.server.body.decode import BodyDecoder
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.generation.job import MAX_MESSAGES, check_messages
from twostroke.server.http.limits import body_of
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.fields import MetadataPairs
from twostroke.server.protocols.common.listing import ItemList, list_page, read_query
from twostroke.server.protocols.responses import conversations as stored
from twostroke.server.protocols.responses.conversations import ConversationBody, find_conversation
from twostroke.server.protocols.responses.items import Item, read_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.server.generation.response_store import StoredResponse, Tenant
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.protocols.responses.recall import RawItem

LIST_PATH: Final = "/v1/conversations"
PATH: Final = f"{LIST_PATH}/{{conversation_id}}"
ITEMS_PATH: Final = f"{PATH}/items"
ITEM_PATH: Final = f"{ITEMS_PATH}/{{item_id}}"


class ItemNotFoundError(TwostrokeError):
    """The conversation has no item with this id."""

    http_status = 404
    code = "item_not_found"


class DeletedConversation(msgspec.Struct, kw_only=True, frozen=True):
    """The response to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


_ITEMS_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"anyOf": [*map(field.reference, get_args(Item))]},
    "maxItems": MAX_MESSAGES,
}
_ITEMS_OR_NULL: Final[dict[str, Any]] = {"oneOf": [_ITEMS_SCHEMA, {"type": "null"}]}
# In `allOf`, since the schema of the field's own type would replace `items`.
_REQUIRED_ITEMS: Final[dict[str, Any]] = {"allOf": [_ITEMS_SCHEMA]}


class ConversationRequest(field.RequestObject):
    """The body of a request that creates a conversation."""

    items: Annotated[
        list[dict[str, Any]] | None, field.doc("The first items, as in `input`.", **_ITEMS_OR_NULL)
    ] = None
    metadata: Annotated[
        MetadataPairs | None, field.doc("Labels, returned with the conversation.")
    ] = None


class ConversationUpdate(field.RequestObject):
    """The body of a request that replaces a stored conversation's metadata."""

    metadata: Annotated[MetadataPairs | None, field.doc("Replaces the metadata; null removes it.")]


class ItemsRequest(field.RequestObject):
    """The body of a request that adds items at the end of a stored conversation."""

    items: Annotated[
        list[dict[str, Any]],
        msgspec.Meta(
            min_length=1, description="Items, as in `input`.", extra_json_schema=_REQUIRED_ITEMS
        ),
    ]


BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    LIST_PATH: ConversationRequest,
    PATH: ConversationUpdate,
    ITEMS_PATH: ItemsRequest,
}


class Conversations:
    """The HTTP handlers of `/v1/conversations` and the paths below it."""

    def __init__(
        self,
        tenant_of: Callable[[Request], Tenant],
        limits: RequestLimits,
        note: Callable[[Iterable[Ignored], ServedRequest], None],
        readers: Readers,
        with_files: Callable[[bytes, Request], bytes],
    ) -> None:
        """Create the handlers, which serve all tenants.

        Args:
            tenant_of: returns the tenant that sent a request, with its stored responses.
            limits: the limits of request bodies.
            note: reports the ignored fields of a request.
            readers: threads that read and change conversations.
            with_files: replaces attached files in a body by their texts.
        """
        self._tenant_of = tenant_of
        self._limits = limits
        self._note = note
        self._readers = readers
        self._with_files = with_files
        self._decoders: dict[str, BodyDecoder[Any]] = {
            path: BodyDecoder(kind, limits.max_json_depth) for path, kind in BODIES.items()
        }

    def routes(self) -> list[Route]:
        """Return the routes of `/v1/conversations` and the paths below it."""
        return [
            Route(LIST_PATH, self.create, methods=["POST"], name=LIST_PATH),
            Route(PATH, self.conversation, methods=["GET", "DELETE"], name=PATH),
            Route(PATH, self.update, methods=["POST"], name=f"POST {PATH}"),
            Route(ITEMS_PATH, self.list_items, methods=["GET"], name=ITEMS_PATH),
            Route(ITEMS_PATH, self.create_items, methods=["POST"], name=f"POST {ITEMS_PATH}"),
            Route(ITEM_PATH, self.item, methods=["GET", "DELETE"], name=ITEM_PATH),
        ]

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/conversations: store a new conversation, and return it."""
        read_query(request, ())
        tenant = self._tenant_of(request)

        def work(body: bytes) -> ConversationBody:
            fields = self._decode(LIST_PATH, body, request)
            conversation = stored.new_conversation(fields.metadata)
            items = self._read_items(fields.items or [], tenant, ids=set(), request=request)
            stored.store_conversation(tenant, conversation, items)
            return conversation

        return to_json(await self._in_thread(request, work))

    async def conversation(self, request: Request) -> Response:
        """Answer GET or DELETE of a conversation: return or delete it."""
        tenant, record = self._find(request)
        read_query(request, ())
        if request.method == "DELETE":
            await tenant.forget(record.id)
            return to_json(DeletedConversation(id=record.id))
        return to_json(stored.body_of(record))

    async def update(self, request: Request) -> Response:
        """Answer POST of a conversation: replace the conversation's metadata, and return it."""
        tenant, record = self._find(request)
        read_query(request, ())

        def work(body: bytes) -> ConversationBody:
            metadata = self._decode(PATH, body, request).metadata
            return stored.replace_metadata(tenant, record.id, metadata or {})

        return to_json(await self._in_thread(request, work))

    async def list_items(self, request: Request) -> Response:
        """Answer GET of a conversation's items: return one part of the list.

        By default, the newest item is the first.
        """
        _, record = self._find(request)
        query = read_query(request, ("after", "limit", "order"))

        def work() -> ItemList:
            return list_page(stored.items_in(record), query)

        return to_json(await self._readers.run_for(request, work))

    async def create_items(self, request: Request) -> Response:
        """Answer POST of a conversation's items: add items, and return them."""
        tenant, record = self._find(request)
        read_query(request, ())

        def work(body: bytes) -> ItemList:
            raw_items = self._decode(ITEMS_PATH, body, request).items
            ids = {item["id"] for item in stored.items_in(record)}
            items = self._read_items(raw_items, tenant, ids=ids, request=request)
            stored.add_items(tenant, record, items)
            return ItemList(
                data=items,
                first_id=items[0]["id"] if items else None,
                last_id=items[-1]["id"] if items else None,
                has_more=False,
            )

        return to_json(await self._in_thread(request, work))

    async def item(self, request: Request) -> Response:
        """Answer GET and DELETE of a conversation's item.

        GET returns the item. DELETE deletes it, and returns the conversation.
        """
        tenant = self._tenant_of(request)
        read_query(request, ())
        id_ = request.path_params["item_id"]

        def work() -> dict[str, Any] | ConversationBody:
            while True:
                record = find_conversation(tenant, request.path_params["conversation_id"])
                items = stored.items_in(record)
                item = next((item for item in items if item["id"] == id_), None)
                if item is None:
                    message = "The conversation has no item with id '{id}'."
                    raise ItemNotFoundError(message, id=id_[:MAX_NAME_LENGTH])
                if request.method != "DELETE":
                    return item
                items.remove(item)
                if stored.replace_items(tenant, record, items):
                    return stored.body_of(record)

        return to_json(await self._readers.run_for(request, work))

    def _find(self, request: Request) -> tuple[Tenant, StoredResponse]:
        tenant = self._tenant_of(request)
        return tenant, find_conversation(tenant, request.path_params["conversation_id"])

    def _decode(self, path: str, body: bytes, request: Request) -> Any:
        fields, ignored = self._decoders[path].decode(body)
        self._note(ignored, served_of(request.scope))
        return fields

    def _read_items(
        self, raw_items: list[RawItem], tenant: Tenant, ids: set[str], request: Request
    ) -> list[RawItem]:
        """Check the items of a request body, and return them in the form in which they are stored.

        `ids` are the ids of the conversation's items; a new item with one of these ids gets a new
        id.
        """
        with _named_items():
            check_messages(len(raw_items), "input")
            items, ignored = read_input(raw_items, tenant, ids)
        self._note(ignored, served_of(request.scope))
        return items

    async def _in_thread(self, request: Request, work: Callable[[bytes], Any]) -> Any:
        """Receive a request's body, and return the result of `work` on it.

        `work` runs in a thread, so that many items do not delay streams.
        """
        async with body_of(request, self._limits) as body:

            def read() -> Any:
                return work(self._with_files(body, request))

            return await self._readers.run_for(request, read)


@contextmanager
def _named_items() -> Iterator[None]:
    """Let RequestErrors that the `with` block raises name the field `items` instead of `input`.

    The checks of items are written for `/v1/responses`, whose field is `input`.
    """
    try:
        yield
    except RequestError as error:
        if error.field is not None and error.field.startswith("input"):
            error.field = f"items{error.field.removeprefix('input')}"
        raise
