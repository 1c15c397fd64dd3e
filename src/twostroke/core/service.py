"""Classes of service: how urgent a request is to those who run the server."""

from __future__ import annotations

from typing import Final

DEFAULT_SERVICE: Final = "default"

# What each class is to the scheduler: lower goes first (`Request.priority`).
SERVICES: Final[dict[str, int]] = {DEFAULT_SERVICE: 0, "flex": 1, "priority": -1}
