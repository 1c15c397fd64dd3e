"""Stored conversations: each is a record with metadata, which refers to its newest turn."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.generation.response_store import (
    CONVERSATION,
    MAX_CONVERSATION_BYTES,
    MAX_CONVERSATION_ITEMS,
    StoredResponse,
)
from twostroke.server.protocols.responses.recall import items_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.server.generation.response_store import Tenant
    from twostroke.server.protocols.responses.recall import RawItem

_NO_OUTPUT: Final = encode_json({"output": []})
_NO_ITEMS: Final = b"[]"


class ConversationNotFoundError(TwostrokeError):
    """The tenant has no conversation with this id."""

    http_status = 404
    code = "conversation_not_found"


class ConversationBody(msgspec.Struct, kw_only=True):
    """The conversation object of `/v1/conversations`; `created_at` is Unix time."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


_decoder: Final = msgspec.json.Decoder(ConversationBody)


def new_conversation(metadata: dict[str, str] | None) -> ConversationBody:
    """Create a conversation with an id and metadata, without storing it yet."""
    id_ = f"conv_{secrets.token_hex(24)}"
    return ConversationBody(id=id_, created_at=int(time.time()), metadata=metadata or {})


def store_conversation(
    tenant: Tenant, body: ConversationBody, items: Sequence[RawItem] = ()
) -> None:
    """Store a new conversation of a tenant, which begins with `items`.

    Raises:
        RequestError: the conversation is too large, or the server stores no responses.
    """
    first_turn = _new_turn(items, None) if items else None
    if not tenant.put(_make_record(body.id, encode_json(body), first_turn)):
        raise _too_large_error(tenant)


def find_conversation(tenant: Tenant, id_: str) -> StoredResponse:
    """Return the stored record of a tenant's conversation.

    Raises:
        ConversationNotFoundError: the tenant has no conversation with this id.
    """
    record = tenant.find(id_, CONVERSATION)
    if record is None:
        raise ConversationNotFoundError(
            "Conversation with id '{id}' not found.", id=id_[:MAX_NAME_LENGTH]
        )
    return record


def body_of(record: StoredResponse) -> ConversationBody:
    """Return the conversation object of a stored record, which clients read."""
    return _decoder.decode(record.answer)


def items_in(record: StoredResponse) -> list[RawItem]:
    """Return all items of a stored conversation, the oldest first."""
    if record.previous is None:
        return []
    return [item for turn in record.previous.conversation() for item in items_of(turn)]


def add_items(tenant: Tenant, record: StoredResponse, items: Sequence[RawItem]) -> None:
    """Add a client's items at the end of a stored conversation.

    Raises:
        RequestError: the conversation becomes too large.
    """
    if not append_turn(tenant, record.id, _new_turn(items, record.previous)):
        raise _too_large_error(tenant)


def append_turn(tenant: Tenant, id_: str, turn: StoredResponse) -> bool:
    """Add a turn at the end of a stored conversation; return False if it becomes too large.

    A turn is a stored response, or items that a client added. If other requests have added turns
    meanwhile, the new turn follows them. If the conversation was deleted meanwhile, nothing is
    stored.
    """
    while (record := tenant.find(id_, CONVERSATION)) is not None:
        if turn.previous is not record.previous:
            turn = StoredResponse(
                id=_new_turn_id(),
                request_items=turn.request_items,
                answer=turn.answer,
                item_ids=turn.item_ids,
                previous=record.previous,
            )
        new_record = _make_record(id_, record.answer, turn)
        if not tenant.fits(new_record):
            return False
        if tenant.supersede(record, new_record):
            break
    return True


def replace_items(tenant: Tenant, record: StoredResponse, items: Sequence[RawItem]) -> bool:
    """Replace all items of a stored conversation.

    Returns False, without a change, if the conversation has changed since `record` was read.
    """
    last_turn = _new_turn(items, None) if items else None
    return tenant.supersede(record, _make_record(record.id, record.answer, last_turn))


def replace_metadata(tenant: Tenant, id_: str, metadata: dict[str, str]) -> ConversationBody:
    """Replace the metadata of a stored conversation, and return the conversation object.

    Raises:
        ConversationNotFoundError: the tenant has no conversation with this id.
        RequestError: the conversation becomes too large.
    """
    while True:
        record = find_conversation(tenant, id_)
        body = body_of(record)
        body.metadata = metadata
        new_record = _make_record(id_, encode_json(body), record.previous)
        if not tenant.fits(new_record):
            raise _too_large_error(tenant)
        if tenant.supersede(record, new_record):
            return body


def check_room(tenant: Tenant, turn: StoredResponse) -> None:
    """Check that a conversation can be stored after a turn is added to it.

    `turn` has the earlier turns in `previous`.

    Raises:
        RequestError: the conversation becomes too large.
    """
    if not tenant.fits(_make_record("", b"", turn)):
        raise _too_large_error(tenant)


def _make_record(id_: str, answer: bytes, last_turn: StoredResponse | None) -> StoredResponse:
    """Build the record under which a conversation is stored.

    `answer` is the JSON of the conversation object; `last_turn` is the newest turn, or None.
    """
    return StoredResponse(
        id=id_,
        request_items=_NO_ITEMS,
        answer=answer,
        item_ids=(),
        previous=last_turn,
        kind=CONVERSATION,
    )


def _new_turn(items: Sequence[RawItem], previous: StoredResponse | None) -> StoredResponse:
    """Build a turn from items that a client added to a conversation, after the turn `previous`."""
    ids = tuple(item["id"] for item in items)
    return StoredResponse(
        id=_new_turn_id(),
        request_items=encode_json(items),
        answer=_NO_OUTPUT,
        item_ids=ids,
        previous=previous,
    )


def _new_turn_id() -> str:
    return f"turn_{secrets.token_hex(16)}"


def _too_large_error(tenant: Tenant) -> RequestError:
    """Return the error for a conversation that is too large, or that the server does not store."""
    if not tenant.store.max_responses:
        reason = "Conversations cannot be stored: the server was started with --keep-responses 0."
        return RequestError(reason)
    max_bytes = min(tenant.store.max_bytes, MAX_CONVERSATION_BYTES)
    return RequestError(
        f"The conversation becomes too large: at most {counted_noun(max_bytes, 'byte')} and "
        f"{MAX_CONVERSATION_ITEMS} items are stored. Begin another conversation.",
        field="conversation",
    )
