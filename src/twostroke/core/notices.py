"""Logs notices about parts of model files that were left out, each once in a process."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NAME_LENGTH: Final = 120
_MAX_NAMES: Final = 3
_logger = logging.getLogger("twostroke.weights")


def notice_wrong_id(key: str, value: object) -> None:
    """Log that a special token of a file is left out because no token has its id."""
    id_text = "-1" if value == (1 << 32) - 1 else str(value)[:40]
    notice(f"{key} is {id_text}, which is not the id of a token: left out.")


def first_names(names: Sequence[str]) -> str:
    """Return the first names in quotes, and the number of other names."""
    text = ", ".join(repr(name[:MAX_NAME_LENGTH]) for name in names[:_MAX_NAMES])
    num_more = len(names) - _MAX_NAMES
    return f"{text} and {num_more} more" if num_more > 0 else text


@cache
def notice(text: str) -> None:
    """Log a sentence as a warning, unless it was logged before."""
    _logger.warning("%s", text)
