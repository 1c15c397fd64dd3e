"""The OpenAPI descriptions of routes of stored responses, conversations and completions."""

from __future__ import annotations

from typing import Any, Final

from twostroke.core.errors import RequestError
from twostroke.server.openapi.operation import BODY, TEXT, RouteDescription, parameter
from twostroke.server.protocols.common.listing import (
    DEFAULT_LIST_LIMIT,
    INCLUDABLE,
    MAX_LIST_LIMIT,
    ItemList,
)
from twostroke.server.protocols.openai import stored_chat
from twostroke.server.protocols.responses import conversation_routes as conversations
from twostroke.server.protocols.responses import stream_events
from twostroke.server.protocols.responses.body import ResponseBody
from twostroke.server.protocols.responses.conversations import (
    ConversationBody,
    ConversationNotFoundError,
)
from twostroke.server.protocols.responses.routes import (
    MAX_NUMBER_LENGTH,
    Deleted,
    ResponseNotFoundError,
)
from twostroke.server.storage import RecordsError

_NAME: Final = {"type": "string", "minLength": 1}
_RESPONSE_ID: Final = parameter("path", "response_id", "The `id` of a stored response.", **_NAME)
_INCLUDE: Final = parameter(
    "query",
    "include[]",
    "Accepted; an answer is stored with what its request included.",
    type="array",
    items={"enum": list(INCLUDABLE)},
)
_EVENTS: Final = (
    parameter("query", "stream", "Whether to send the events.", enum=["true", "false"]),
    parameter(
        "query",
        "starting_after",
        "With `stream`: begin after the event with this number.",
        type="integer",
        minimum=0,
        maximum=10**MAX_NUMBER_LENGTH - 1,
    ),
    parameter("query", "include_obfuscation", "No effect.", enum=["true", "false"]),
)
_LIST_PARAMETERS: Final = (
    parameter("query", "after", "The id of the item before the first item to return.", **TEXT),
    parameter(
        "query",
        "limit",
        "The maximum number of items to return.",
        type="integer",
        minimum=1,
        maximum=MAX_LIST_LIMIT,
        default=DEFAULT_LIST_LIMIT,
    ),
    parameter(
        "query",
        "order",
        "Whether the oldest or the newest item comes first.",
        enum=["asc", "desc"],
        default="desc",
    ),
)
_OLDEST_FIRST_LIST: Final = (
    *_LIST_PARAMETERS[:2],
    _LIST_PARAMETERS[2] | {"schema": {"enum": ["asc", "desc"], "default": "asc"}},
)
_COMPLETION_ID: Final = parameter("path", "completion_id", "Its `id`.", **_NAME)
_COMPLETION_FIELDS: Final[dict[str, Any]] = {
    "errors": (stored_chat.CompletionNotFoundError, RecordsError),
    "parameters": (_COMPLETION_ID,),
}
_CONVERSATION_ID: Final = parameter("path", "conversation_id", "Its `id`.", **_NAME)
_CONVERSATION_FIELDS: Final[dict[str, Any]] = {
    "errors": (RequestError, ConversationNotFoundError),
    "parameters": (_CONVERSATION_ID,),
}
_ITEM_FIELDS: Final[dict[str, Any]] = {
    "errors": (RequestError, ConversationNotFoundError, conversations.ItemNotFoundError),
    "parameters": (
        _CONVERSATION_ID,
        parameter("path", "item_id", "The `id` of an item.", **_NAME),
        _INCLUDE,
    ),
}
_GREETING: Final = {"role": "user", "content": "Why is the sky blue?"}

OPERATIONS: Final[dict[tuple[str, str], RouteDescription]] = {
    ("GET", "/v1/responses/{response_id}"): RouteDescription(
        "Return a stored response, or stream its events again",
        "OpenAI",
        "The events of a background response can be streamed from any number. If the events are "
        "not in memory any more, the last event has the complete response.",
        answer=ResponseBody,
        events=stream_events.EVENTS,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID, _INCLUDE, *_EVENTS),
    ),
    ("DELETE", "/v1/responses/{response_id}"): RouteDescription(
        "Delete a stored response",
        "OpenAI",
        answer=Deleted,
        errors=(RequestError, ResponseNotFoundError, RecordsError),
        parameters=(_RESPONSE_ID,),
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): RouteDescription(
        "List the input of a stored response",
        "OpenAI",
        "Includes the items of the earlier answers that it continues.",
        answer=ItemList,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID, _INCLUDE, *_LIST_PARAMETERS),
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): RouteDescription(
        "Stop a background answer",
        "OpenAI",
        "A response that has ended does not change. To stop a response that is not in the "
        "background, close its connection.",
        answer=ResponseBody,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID,),
    ),
    ("POST", conversations.LIST_PATH): RouteDescription(
        "Begin a conversation, which responses may continue",
        "OpenAI",
        answer=ConversationBody,
        errors=BODY,
        examples={"begin": {"items": [_GREETING], "metadata": {"project": "a"}}},
        leads_to=(
            ("GET", conversations.PATH),
            ("POST", conversations.PATH),
            ("GET", conversations.ITEMS_PATH),
            ("POST", conversations.ITEMS_PATH),
        ),
    ),
    ("GET", conversations.PATH): RouteDescription(
        "Return a conversation", "OpenAI", answer=ConversationBody, **_CONVERSATION_FIELDS
    ),
    ("POST", conversations.PATH): RouteDescription(
        "Replace the metadata of a conversation",
        "OpenAI",
        answer=ConversationBody,
        errors=(*BODY, ConversationNotFoundError),
        parameters=(_CONVERSATION_ID,),
        examples={"label": {"metadata": {"project": "a"}}},
    ),
    ("DELETE", conversations.PATH): RouteDescription(
        "Delete a conversation; its responses stay",
        "OpenAI",
        answer=conversations.DeletedConversation,
        errors=(RequestError, ConversationNotFoundError, RecordsError),
        parameters=(_CONVERSATION_ID,),
    ),
    ("GET", conversations.ITEMS_PATH): RouteDescription(
        "List the items of a conversation",
        "OpenAI",
        answer=ItemList,
        errors=(RequestError, ConversationNotFoundError),
        parameters=(_CONVERSATION_ID, _INCLUDE, *_LIST_PARAMETERS),
    ),
    ("POST", conversations.ITEMS_PATH): RouteDescription(
        "Add items at the end of a conversation",
        "OpenAI",
        answer=ItemList,
        errors=(*BODY, ConversationNotFoundError),
        parameters=(_CONVERSATION_ID, _INCLUDE),
        examples={"add": {"items": [_GREETING]}},
    ),
    ("GET", conversations.ITEM_PATH): RouteDescription(
        "Return an item of a conversation", "OpenAI", answer=dict[str, Any], **_ITEM_FIELDS
    ),
    ("DELETE", conversations.ITEM_PATH): RouteDescription(
        "Delete an item of a conversation", "OpenAI", answer=ConversationBody, **_ITEM_FIELDS
    ),
    ("GET", "/v1/chat/completions"): RouteDescription(
        "List stored completions",
        "OpenAI",
        "Lists completions of requests with `store`, the oldest first unless `order` is `desc`.",
        answer=stored_chat.StoredCompletions,
        errors=(RequestError,),
        parameters=(
            *_OLDEST_FIRST_LIST,
            parameter("query", "model", "The model of the completions.", **TEXT),
            {
                **parameter("query", "metadata", "Labels that the completions have."),
                "style": "deepObject",
                "schema": {"type": "object", "additionalProperties": TEXT},
            },
        ),
    ),
    ("GET", "/v1/chat/completions/{completion_id}"): RouteDescription(
        "Return a stored completion",
        "OpenAI",
        answer=stored_chat.StoredCompletion,
        **_COMPLETION_FIELDS,
    ),
    ("POST", "/v1/chat/completions/{completion_id}"): RouteDescription(
        "Replace the metadata of a stored completion",
        "OpenAI",
        answer=stored_chat.StoredCompletion,
        errors=(*BODY, stored_chat.CompletionNotFoundError),
        parameters=(_COMPLETION_ID,),
        examples={"label": {"metadata": {"project": "a"}}},
    ),
    ("DELETE", "/v1/chat/completions/{completion_id}"): RouteDescription(
        "Delete a stored completion",
        "OpenAI",
        answer=stored_chat.DeletedCompletion,
        **_COMPLETION_FIELDS,
    ),
    ("GET", "/v1/chat/completions/{completion_id}/messages"): RouteDescription(
        "List the messages that a stored completion answers",
        "OpenAI",
        answer=ItemList,
        errors=(RequestError, stored_chat.CompletionNotFoundError),
        parameters=(_COMPLETION_ID, *_OLDEST_FIRST_LIST),
    ),
}
