"""Texts that clients keep and send back without reading: reasoning, and summaries of conversations.

The texts are encoded, not encrypted: a client that shall not show them does not look into them.
"""

from __future__ import annotations

import base64
from typing import Final

SUMMARY: Final = "twostroke-summary:"
REASONING: Final = "twostroke-reasoning:"


def encode_text(text: str, kind: str) -> str:
    """Encode a text of a kind (`SUMMARY` or `REASONING`) for a field that clients send back."""
    return kind + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def decode_text(content: str | None, kind: str) -> str | None:
    """Return the text in a field that clients send back.

    None if the field is missing or damaged, or if another server made it.
    """
    if not isinstance(content, str) or not content.startswith(kind):
        return None
    try:
        return base64.urlsafe_b64decode(content.removeprefix(kind)).decode()
    except ValueError:
        return None
