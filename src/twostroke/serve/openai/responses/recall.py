"""What was said before, from what is kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.serve.dialect import encode_json
from twostroke.serve.http.decode import MAX_NAME_LENGTH
from twostroke.serve.store import MAX_CONVERSATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.serve.store import Kept, Tenant

RawItem = dict[str, Any]  # as JSON has it

MAX_REFERENCES: Final = 1024


def items_of(kept: Kept) -> list[RawItem]:
    """Return what was asked and answered at one point of a conversation."""
    asked: list[RawItem] = msgspec.json.decode(kept.asked)
    answer: dict[str, Any] = msgspec.json.decode(kept.answer)
    return [*asked, *answer["output"]]


def recall(ids: Mapping[int, str], tenant: Tenant) -> dict[int, RawItem]:
    """Return the items that a request refers to, by the places of the references in its input.

    Each answer that has some of them is read once.

    Raises:
        RequestError: there are too many references, or one leads nowhere, or they lead to too much.
    """
    if len(ids) > MAX_REFERENCES:
        message = f"input takes at most {MAX_REFERENCES} items of type item_reference."
        raise RequestError(message, param="input")
    wanted: dict[Kept, set[str]] = {}
    for place, id_ in ids.items():
        kept = tenant.find_item(id_)
        if kept is None:
            message = f"Item with id '{id_[:MAX_NAME_LENGTH]}' not found: items are kept with the "
            message += "response that they belong to, unless store is false. Send the item itself."
            raise RequestError(message, param=f"input[{place}].id")
        wanted.setdefault(kept, set()).add(id_)
    found: dict[str, RawItem] = {}
    for kept, names in wanted.items():
        found |= {item["id"]: item for item in items_of(kept) if item["id"] in names}
    _check_size(ids, found)
    return {place: found[id_] for place, id_ in ids.items()}


def _check_size(ids: Mapping[int, str], found: dict[str, RawItem]) -> None:
    sizes = {id_: len(encode_json(item)) for id_, item in found.items()}
    if sum(sizes[id_] for id_ in ids.values()) > MAX_CONVERSATION_BYTES:
        message = f"The items that input refers to exceed {MAX_CONVERSATION_BYTES} bytes together."
        raise RequestError(message, param="input")
