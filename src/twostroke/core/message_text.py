"""Texts in errors, logs and reports: counts with nouns, sizes, and URLs without secrets."""

from __future__ import annotations

import re
from typing import Final

_MASK: Final = "***"
_USER_IN_TEXT: Final = re.compile(r"(?<=://)[^\s/?#@]*(?:@[^\s/?#@]*)*@")
_AUTHORITY: Final = re.compile(r"[^/?#]*")
_SECRET_PARAM: Final = re.compile(
    r"([?&][^=&#\s]*(?:pass|secret|token|key|auth)[^=&#\s]*=)[^&#\s'\"]+", re.IGNORECASE
)


def counted_noun(count: float, noun: str, plural: str | None = None, *, form: str = "") -> str:
    """Return a count with its noun: "1 byte", "2 bytes", "0 replicas".

    Messages use this function for every count that may be 1; a test finds messages that do not.

    Args:
        count: the number.
        noun: the noun in the singular; words may stand before it, as in "open file".
        plural: the noun in the plural; `noun` with s or es by default. Verbs may follow both
            nouns, as in "request waits" and "requests wait".
        form: the format of the number, such as ",".
    """
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:{form}} {noun if count == 1 else plural or noun + ending}"


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text for people, such as "98 MB" or "12.3 GB"."""
    if num_bytes >= 10**13:
        return f"{num_bytes / 1e12:,.1f} TB"
    if 0 < num_bytes < 10**6:
        is_large = num_bytes >= 1000
        return f"{num_bytes / 1e3:,.0f} KB" if is_large else counted_noun(num_bytes, "byte")
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**10 else f"{num_bytes / 1e6:,.0f} MB"


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
