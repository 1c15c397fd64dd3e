"""Responses with a body of JSON, and server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from twostroke.core.json_lines import encode_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec


def to_json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a body of JSON."""
    return Response(encode_json(body), status, headers, media_type="application/json")


def sse(data: bytes) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: %b\n\n" % data


def named_sse(data: msgspec.Struct) -> bytes:
    """Return one server-sent event; its name is the struct's tag."""
    name = data.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))
