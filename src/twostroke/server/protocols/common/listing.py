"""Queries of lists, and their pages: fields that several paths take, and `include`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.errors import UnknownFieldError, UnsupportedFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.requests import Request

MAX_LISTED: Final = 100
LISTED: Final = 20
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class ItemList(msgspec.Struct, kw_only=True, frozen=True):
    """A page of the items that a response answered."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def query_of(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    """Return the fields of a request's query.

    Raises:
        RequestError: there is an unknown one, or `include` has an unknown word.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in {"include", "include[]"}:
            for error in unknown_parts((value,)):
                raise error
        elif name == "beta":
            continue  # SDKs send it to newer paths
        elif name in known:
            found[name] = value
        else:
            word = name[:MAX_NAME_LENGTH]
            hint = nearest(word, (*known, "include"))
            raise UnknownFieldError("is not a known field.{hint}", field=word, hint=hint)
    return found


def unknown_parts(include: Iterable[str]) -> Iterator[UnsupportedFieldError]:
    """Yield an error for each unknown name of a part, with its place."""
    for place, name in enumerate(include):
        if name not in INCLUDABLE:
            word = name[:MAX_NAME_LENGTH]
            reason = f"does not support '{{value}}'.{nearest(word, INCLUDABLE)}"
            yield UnsupportedFieldError(reason, field=f"include[{place}]", value=word)


def page_of(items: list[dict[str, Any]], asked: dict[str, str], order: str = "desc") -> ItemList:
    """Return a page of items, which come from the oldest on; `order` is that without the field.

    Raises:
        RequestError: a field of the query is wrong.
    """
    order = asked.get("order", order)
    if order not in {"asc", "desc"}:
        raise RequestError("must be asc or desc.", field="order")
    limit = asked.get("limit", str(LISTED))
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
        raise RequestError(f"must be from 1 to {MAX_LISTED}.", field="limit")
    if order == "desc":
        items.reverse()
    if after := asked.get("after"):
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            reason = "must be the id of an item of this list, got '{value}'."
            raise RequestError(reason, field="after", value=after[:MAX_NAME_LENGTH])
        items = items[places[0] + 1 :]
    data = items[: int(limit)]
    return ItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=len(items) > len(data),
    )
