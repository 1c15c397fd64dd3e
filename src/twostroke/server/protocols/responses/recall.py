"""Reads the items of stored responses."""

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

RawItem = dict[str, Any]  # from JSON

MAX_REFERENCES: Final = 1024


def items_of(kept: StoredResponse) -> list[RawItem]:
    """Return the items of one response and of its request."""
    request_items: list[RawItem] = msgspec.json.decode(kept.request_items)
    answer: dict[str, Any] = msgspec.json.decode(kept.answer)
    return [*request_items, *answer["output"]]


def recall(ids: Mapping[int, str], tenant: Tenant) -> dict[int, RawItem]:
    """Return the items that a request refers to, by the places of the references in its input.

    Each stored response that has some of them is read once. Items that are not stored are missing.

    Raises:
        RequestError: there are too many references, or the items are too large together.
    """
    if len(ids) > MAX_REFERENCES:
        reason = f"takes at most {MAX_REFERENCES} items of type item_reference."
        raise RequestError(reason, field="input")
    wanted: dict[StoredResponse, set[str]] = {}
    for id_ in ids.values():
        response = tenant.find_item(id_)
        if response is not None:
            wanted.setdefault(response, set()).add(id_)
    found: dict[str, RawItem] = {}
    for kept, names in wanted.items():
        found |= {item["id"]: item for item in items_of(kept) if item["id"] in names}
    sizes = {id_: len(encode_json(item)) for id_, item in found.items()}
    if sum(sizes.get(id_, 0) for id_ in ids.values()) > MAX_CONVERSATION_BYTES:
        reason = f"refers to items of more than {MAX_CONVERSATION_BYTES} bytes together."
        raise RequestError(reason, field="input")
    return {index: found[id_] for index, id_ in ids.items() if id_ in found}


def missing_item(index: int, id_: str) -> RequestError:
    """Return the error about a reference to an item that is not stored, at `input[index]`."""
    reason = "Item with id '{id}' not found: items are stored with their response, "
    reason += "unless store is false. Send the item itself."
    field = f"input[{index}].item_reference"
    return RequestError(reason, field=field, id=id_[:MAX_NAME_LENGTH])
