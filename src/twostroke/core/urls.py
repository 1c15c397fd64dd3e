"""The URLs of other servers: HTTP servers to which requests are sent, and Redis servers."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.core.message_text import masked_url

if TYPE_CHECKING:
    from urllib.parse import SplitResult


def server_url(url: str, *, field: str) -> SplitResult:
    """Check and split the URL of a server to which a command sends requests.

    Raises:
        UsageError: `url` is not an http or https URL with a host, or has a user or password,
            which would be ignored; the error names the option `field`.
    """
    parts = split_http_url(url)
    if parts is None:
        reason = "must be like http://127.0.0.1:8000, got '{value}'."
        raise UsageError(reason, field=field, value=masked_url(url))
    if parts.username is not None or parts.password is not None:
        reason = "must be without a user and a password: a key is sent if TWOSTROKE_API_KEY has it."
        raise UsageError(reason, field=field)
    return parts


def split_http_url(url: str) -> SplitResult | None:
    """Split an http or https URL with a host; return None for any other text."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_valid else None


def redis_address(url: str) -> str:
    """Return the host and port of a Redis URL, or its path, for errors and logs."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def redis_password(url: str) -> str | None:
    """Return the password of a Redis URL, or else of the environment; None if there is none."""
    return urlsplit(url).password or env.store_password()
