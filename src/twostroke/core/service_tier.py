"""Classes of service: the priorities that a server gives to requests."""

from __future__ import annotations

from typing import Final

DEFAULT_SERVICE: Final = "default"
BATCH_SERVICE: Final = "batch"  # lines of batches; clients cannot ask for it

# `Request.priority` of each class: lower goes first.
SERVICES: Final[dict[str, int]] = {
    DEFAULT_SERVICE: 0,
    "flex": 1,
    "priority": -1,
    BATCH_SERVICE: 2,
}
