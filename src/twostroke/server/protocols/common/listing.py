"""Query parameters and result pages of the API's list endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.errors import UnknownFieldError, UnsupportedFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.requests import Request

MAX_LIST_LIMIT: Final = 100
DEFAULT_LIST_LIMIT: Final = 20
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
INCLUDABLE: Final = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    ENCRYPTED_REASONING,
    "web_search_call.action.sources",
    "web_search_call.results",
)


class ItemList(msgspec.Struct, kw_only=True, frozen=True):
    """The response of OpenAI's list endpoints: one part of a list."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def read_query(request: Request, known_names: tuple[str, ...]) -> dict[str, str]:
    """Check the query parameters of a request to a list endpoint, and return them by name.

    `beta` is ignored. The values of `include` are checked, but not returned.

    Raises:
        RequestError: a parameter is not in `known_names`, or `include` has an unknown value.
    """
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in {"include", "include[]"}:
            for error in unknown_includes((value,)):
                raise error
        elif name == "beta":
            continue  # SDKs send it with requests to newer paths
        elif name in known_names:
            query[name] = value
        else:
            shortened_name = name[:MAX_NAME_LENGTH]
            hint = nearest(shortened_name, (*known_names, "include"))
            raise UnknownFieldError("is not a known field.{hint}", field=shortened_name, hint=hint)
    return query


def unknown_includes(include: Iterable[str]) -> Iterator[UnsupportedFieldError]:
    """Yield an error for each value of a request's `include` that the API does not define."""
    for index, name in enumerate(include):
        if name not in INCLUDABLE:
            shortened_name = name[:MAX_NAME_LENGTH]
            reason = f"does not support '{{value}}'.{nearest(shortened_name, INCLUDABLE)}"
            yield UnsupportedFieldError(reason, field=f"include[{index}]", value=shortened_name)


def list_page(items: list[dict[str, Any]], query: dict[str, str], order: str = "desc") -> ItemList:
    """Select the part of a list that a query asks for, and return it as a list endpoint's response.

    Args:
        items: the complete list, the oldest item first; its order may be changed.
        query: the query parameters. `order`, `limit` and `after` (an item's id) are used.
        order: "asc" or "desc", if the query has no `order`.

    Raises:
        RequestError: a query parameter has a wrong value.
    """
    order = query.get("order", order)
    if order not in {"asc", "desc"}:
        raise RequestError("must be asc or desc.", field="order")
    limit = query.get("limit", str(DEFAULT_LIST_LIMIT))
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIST_LIMIT):
        raise RequestError(f"must be from 1 to {MAX_LIST_LIMIT}.", field="limit")
    if order == "desc":
        items.reverse()
    if after := query.get("after"):
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        if not indices:
            reason = "must be the id of an item of this list, got '{value}'."
            raise RequestError(reason, field="after", value=after[:MAX_NAME_LENGTH])
        items = items[indices[0] + 1 :]
    data = items[: int(limit)]
    return ItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=len(items) > len(data),
    )
