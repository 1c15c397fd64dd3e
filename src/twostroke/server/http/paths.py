"""Paths: their forms and other names in requests of clients, and whether a browser asks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope

_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)

# These need no key: load balancers and supervisors ask them.
OPEN_PATHS: Final = ("/health", "/health/live", "/health/ready", "/health/progress")
# Most are llama-server's: paths without /v1, and older names.
ALIASES: Final = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/embedding": "/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}


def wants_page(request: Request) -> bool:
    """Whether the request comes from a browser rather than a program."""
    return "text/html" in request.headers.get("accept", "").lower()


def to_origin_form(scope: Scope) -> None:
    """Replace a request line such as `GET http://host/path` by the path and a `Host` header.

    Every server must accept this form, which clients of proxies send (RFC 9112, section 3.2.2).
    The request line's host replaces the `Host` header.
    """
    match = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if match is None:
        return
    authority, raw_path = match[1].rpartition(b"@")[2], match[2] or b"/"
    scope["raw_path"] = raw_path
    scope["path"] = unquote(raw_path.decode("latin-1"))
    others = [header for header in scope["headers"] if header[0] != b"host"]
    scope["headers"] = [(b"host", authority), *others]
