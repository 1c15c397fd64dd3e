"""Certificate authorities, read once for all HTTP clients of a test process."""

from __future__ import annotations

import ssl
from functools import cache, wraps
from typing import Any

try:
    import certifi
except ImportError:  # an environment of its own, without HTTP clients
    certifi = None  # type: ignore[assignment]

_create = ssl.create_default_context


@cache
def _shared() -> ssl.SSLContext:
    return _create(cafile=certifi.where())


@wraps(_create)
def _create_or_share(*args: Any, **options: Any) -> ssl.SSLContext:
    if not args and options == {"cafile": certifi.where()}:
        return _shared()
    return _create(*args, **options)


def share() -> None:
    """Let all httpx clients share one TLS context, since reading the authorities takes 20 ms."""
    if certifi is not None:
        ssl.create_default_context = _create_or_share
