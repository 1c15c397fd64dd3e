"""Hashes the content of a request, so that the same prompt is recognized on every API path."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.fleet.routing.prompt import JSON_ERRORS
from twostroke.server.http.body_limits import MAX_CONTAINERS, nesting_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Fields with texts for the model, in the order in which templates write them.
_TEXT_FIELDS: Final = (
    *("previous_response_id", "conversation", "system", "instructions", "messages"),
    *("input_extra", "input_prefix", "prompt", "input", "content", "texts", "query", "documents"),
    *("suffix", "input_suffix"),
)
# Fields inside messages that are not text and differ between protocols.
_LABELS: Final = frozenset(
    ("role", "type", "id", "call_id", "tool_call_id", "tool_use_id", "status", "detail")
)
# Fields that hold a schema or a grammar for the answer.
_FORM_FIELDS: Final = (
    *("response_format", "text", "output_config", "output_format", "format", "json_schema"),
    *("grammar", "structured_outputs", "guided_json", "guided_regex", "guided_grammar"),
    "guided_choice",
)
# Fields of the objects that protocols wrap around a schema, from the outside to the inside.
_WRAPPERS: Final = ("format", "json_schema", "schema")


def content_hash(body: bytes, model: str) -> bytes:
    """Return a hash that all requests to `model` with the same texts, tools and schema share.

    By this hash the router recognizes a request that killed an engine. The path, the protocol,
    field names, roles and sampling options do not change the hash. A body that is not a JSON
    object, or has more lists and objects than servers read, is hashed as bytes.
    """
    if nesting_of(body, MAX_CONTAINERS).num_containers > MAX_CONTAINERS:
        return blake2b(body, digest_size=16).digest()
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            return blake2b(body, digest_size=16).digest()
        texts = [text for name in _TEXT_FIELDS for text in _texts(fields.get(name))]
        forms = [_unwrapped(fields[name]) for name in _FORM_FIELDS if fields.get(name)]
        content = [model, texts, [form for form in forms if form], _tools(fields.get("tools"))]
        encoded = msgspec.json.encode(content, order="sorted")
    except JSON_ERRORS:
        encoded = body
    return blake2b(encoded, digest_size=16).digest()


def _texts(value: Any) -> Iterator[str | int | float]:
    """Yield the texts and token ids inside a field of a request, in their order.

    Takes time in proportion to the value, however deep its lists and objects are nested.
    """
    stack = [value]  # the next value last
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += [inner for name, inner in reversed(part.items()) if name not in _LABELS]
        elif isinstance(part, list):
            stack += reversed(part)
        elif isinstance(part, (str, int, float)) and not isinstance(part, bool) and part != "":
            yield part


def _unwrapped(form: Any) -> Any:
    """Return a request's schema or grammar without the objects that protocols wrap around it.

    Returns None if the field only asks for plain text, without a schema or grammar.
    """
    if not isinstance(form, dict):
        return form
    for name in _WRAPPERS:
        if isinstance(form.get(name), dict):
            return _unwrapped(form[name])
    is_plain_text = form.get("type") == "text" or form.keys() <= {"verbosity", "effort"}
    return None if is_plain_text else form


def _tools(tools: Any) -> list[Any]:
    """Return the names and parameters of a request's tools."""
    if not isinstance(tools, list):
        return []
    described: list[Any] = []
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, dict) else tool
        if not isinstance(inner, dict):
            described.append([inner])
        else:
            described.append(
                [inner.get("name"), inner.get("parameters", inner.get("input_schema"))]
            )
    return described
