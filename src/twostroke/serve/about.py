"""What the server says of itself: GET / and /health."""

from __future__ import annotations

import msgspec


class AboutBody(msgspec.Struct, frozen=True):
    """What answers here, and where more can be found."""

    name: str
    version: str
    model: str
    endpoints: list[str]
    description: str


class HealthBody(msgspec.Struct, frozen=True):
    """Whether a request would be answered now: `ok`, or why not."""

    status: str
    model: str
