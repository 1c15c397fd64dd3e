"""Whether an engine can answer."""

from __future__ import annotations

from enum import Enum


class Health(Enum):
    """Whether the engine can answer."""

    READY = "ready"
    STALLED = "stalled"  # one step has been running for a minute
    RECOVERING = "recovering"  # lost ranks are replaced; requests go on afterwards
    STOPPED = "stopped"
