"""Finds stored items: of a stored response, or by the references in a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.generation.response_store import MAX_CONVERSATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.server.generation.response_store import StoredResponse, Tenant

RawItem = dict[str, Any]  # an item as decoded from JSON

MAX_REFERENCES: Final = 1024


def items_of(stored: StoredResponse) -> list[RawItem]:
    """Return the items of a stored response: the input of its request, then its output."""
    request_items: list[RawItem] = msgspec.json.decode(stored.request_items)
    answer: dict[str, Any] = msgspec.json.decode(stored.answer)
    return [*request_items, *answer["output"]]


def find_referenced_items(ids: Mapping[int, str], tenant: Tenant) -> dict[int, RawItem]:
    """Find the stored items to which the references in a request's `input` refer.

    `ids` has the id of each reference, by its index in `input`. The result has the items by the
    same indices, without items that are not stored. Each stored response is read only once.

    Raises:
        RequestError: there are too many references, or the items together are too large.
    """
    if len(ids) > MAX_REFERENCES:
        reason = f"takes at most {MAX_REFERENCES} items of type item_reference."
        raise RequestError(reason, field="input")
    ids_by_response: dict[StoredResponse, set[str]] = {}
    for id_ in ids.values():
        response = tenant.find_item(id_)
        if response is not None:
            ids_by_response.setdefault(response, set()).add(id_)
    items_by_id: dict[str, RawItem] = {}
    for response, item_ids in ids_by_response.items():
        for item in items_of(response):
            if item["id"] in item_ids:
                items_by_id[item["id"]] = item
    sizes = {id_: len(encode_json(item)) for id_, item in items_by_id.items()}
    if sum(sizes.get(id_, 0) for id_ in ids.values()) > MAX_CONVERSATION_BYTES:
        reason = f"refers to items of more than {MAX_CONVERSATION_BYTES} bytes together."
        raise RequestError(reason, field="input")
    return {index: items_by_id[id_] for index, id_ in ids.items() if id_ in items_by_id}


def missing_item_error(index: int, id_: str) -> RequestError:
    """Return the error that `input[index]` refers to an item that is not stored."""
    reason = "Item with id '{id}' not found: items are stored with their response, "
    reason += "unless store is false. Send the item itself."
    field = f"input[{index}].item_reference"
    return RequestError(reason, field=field, id=id_[:MAX_NAME_LENGTH])
