"""The descriptions of the routes of stored answers."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import RequestError
from twostroke.serve.describe.operation import TEXT, Operation, parameter
from twostroke.serve.openai.responses.body import ResponseBody
from twostroke.serve.openai.responses.request import INCLUDABLE
from twostroke.serve.openai.responses.routes import (
    LISTED,
    MAX_LISTED,
    Deleted,
    ItemList,
    ResponseNotFoundError,
)

_NAME: Final = {"type": "string", "minLength": 1}
_RESPONSE_ID: Final = parameter("path", "response_id", "The `id` of a stored answer.", **_NAME)
_INCLUDE: Final = parameter(
    "query",
    "include[]",
    "Accepted; an answer is stored with what its request included.",
    type="array",
    items={"enum": list(INCLUDABLE)},
)
_PAGE: Final = (
    parameter("query", "after", "The id of the item before the page.", **TEXT),
    parameter(
        "query",
        "limit",
        "The number of items of a page.",
        type="integer",
        minimum=1,
        maximum=MAX_LISTED,
        default=LISTED,
    ),
    parameter(
        "query",
        "order",
        "Whether the oldest or the newest item comes first.",
        enum=["asc", "desc"],
        default="desc",
    ),
)

OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/v1/responses/{response_id}"): Operation(
        "Return a stored answer",
        "OpenAI",
        answer=ResponseBody,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID, _INCLUDE),
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        "Delete a stored answer",
        "OpenAI",
        answer=Deleted,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID,),
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "List the input of a stored answer, page by page",
        "OpenAI",
        "Includes the items of the earlier answers that it continues.",
        answer=ItemList,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID, _INCLUDE, *_PAGE),
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "Always refused: only answers in the background can be cancelled",
        "OpenAI",
        "To stop an answer, close its connection.",
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID,),
    ),
}
