"""Limits on request bodies: bytes in memory, for each tenant and in all, and JSON nesting."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import numpy as np

from twostroke.core.errors import TwostrokeError

# Of each body, not counted: a connection may buffer as much anyhow. So short requests are never
# refused because of long ones.
FREE_BYTES: Final = 64 * 1024
_FULL: Final = (
    "{whose} request bodies that arrive or wait to be read take {most} bytes of memory, the limit. "
    "Try again, or send fewer long requests at the same time."
)


class BodiesError(TwostrokeError):
    """Bodies of all clients take too much memory."""

    http_status = 503
    code = "bodies_limit"


class TenantBodiesError(BodiesError):
    """Bodies of the tenant take too much memory."""

    http_status = 429


class BodyMemory:
    """Counts the bytes of bodies that arrive or wait to be read. It belongs to the event loop."""

    def __init__(self, most: int, most_of_one: int) -> None:
        """Allow `most` bytes, and `most_of_one` tenant."""
        self._most, self._most_of_one = most, most_of_one
        self._all = 0
        self._of: Counter[str] = Counter()  # by tenant

    def check(self, tenant: str, num_bytes: int) -> None:
        """Check whether there is room for bytes of a tenant.

        Raises:
            TenantBodiesError: the tenant's bodies take too much.
            BodiesError: all bodies together do.
        """
        if self._of[tenant] + num_bytes > self._most_of_one:
            raise TenantBodiesError(_FULL.format(whose="Your", most=self._most_of_one))
        if self._all + num_bytes > self._most:
            raise BodiesError(_FULL.format(whose="All", most=self._most))

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that are in memory; raises as `check`."""
        self.check(tenant, num_bytes)
        self.give(tenant, -num_bytes)

    def give(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that are not in memory any more."""
        self._all -= num_bytes
        self._of[tenant] -= num_bytes
        if not self._of[tenant]:
            del self._of[tenant]


# Decoding makes all lists and objects in one step, in which no other thread runs. These take some
# tenths of a second; a body of 8 MB can have 4,000,000.
MAX_CONTAINERS: Final = 250_000
_CURLY: Final = ord("{") ^ ord("[")  # the bit by which curly brackets differ from square ones
_SCANNED_BYTES: Final = 1 << 18  # at a time


class Nesting(NamedTuple):
    """How deep the lists and objects of a JSON text are nested, and how many there are at most."""

    depth: int
    num_containers: int


def nesting_of(body: bytes, max_depth: int) -> Nesting:
    """Return the nesting of a JSON text, an upper bound if it has at most `max_depth` brackets.

    Takes time in proportion to the body, whatever it contains, and lets other threads run.
    """
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets <= max_depth:
        return Nesting(num_brackets, num_brackets)
    if b"\\" in body:  # quotes in strings end no string
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    depth = deepest = num_containers = num_quotes = 0
    for start in range(0, len(body), _SCANNED_BYTES):
        size = min(_SCANNED_BYTES, len(body) - start)
        codes = np.frombuffer(body, np.uint8, size, start)
        quotes = np.cumsum(codes == ord('"'), dtype=np.int32) + num_quotes
        is_outside = quotes % 2 == 0
        squares = codes & ~np.uint8(_CURLY)
        opens = is_outside & (squares == ord("["))
        closes = is_outside & (squares == ord("]"))
        depths = np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32) + depth
        deepest = max(deepest, int(depths.max()))
        depth, num_quotes = int(depths[-1]), int(quotes[-1])
        num_containers += int(np.count_nonzero(opens))
    return Nesting(deepest, num_containers)
