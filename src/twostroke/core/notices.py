"""Notices about model files: things that were left out, each told once in a process."""

from __future__ import annotations

import logging
from functools import cache

_logger = logging.getLogger("twostroke.model")


def notice_wrong_id(key: str, value: object) -> None:
    """Log that a file's id of a special token is left out, as no token has it."""
    shown = "-1" if value == (1 << 32) - 1 else str(value)[:40]
    notice(f"{key} is {shown}, which is not the id of a token: left out.")


@cache
def notice(text: str) -> None:
    """Log a sentence as a warning, unless it was logged before."""
    _logger.warning("%s", text)
