"""Masks passwords and other secrets in URLs, for errors and logs."""

from __future__ import annotations

import re
from typing import Final

_MASK: Final = "***"
_USER_IN_TEXT: Final = re.compile(r"(?<=://)[^\s/?#@]*(?:@[^\s/?#@]*)*@")
_AUTHORITY: Final = re.compile(r"[^/?#]*")
_SECRET_PARAM: Final = re.compile(
    r"([?&][^=&#\s]*(?:pass|secret|token|key|auth)[^=&#\s]*=)[^&#\s'\"]+", re.IGNORECASE
)


def masked_url(text: str) -> str:
    """Return a URL for errors and logs, with *** for its user, password and secret parameters.

    The text need not be a valid URL, so the password may contain characters that URLs must escape.
    """
    scheme, slashes, rest = text.rpartition("://")
    authority = _AUTHORITY.match(rest)
    host = authority[0] if authority else ""
    port = host.rpartition(":")[2]
    has_user = "@" in host or (":" in host and not port.isdecimal())
    if "@" in rest and has_user:
        rest = f"{_MASK}@{rest.rpartition('@')[2]}"
    return _SECRET_PARAM.sub(rf"\1{_MASK}", f"{scheme}{slashes}{rest}")


def without_passwords(text: str) -> str:
    """Return an error or log message with *** for the users and passwords of URLs in it."""
    if "://" not in text or "@" not in text:
        return text
    return _USER_IN_TEXT.sub(f"{_MASK}@", text)
