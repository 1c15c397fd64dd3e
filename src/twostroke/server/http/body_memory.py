"""Bytes of request bodies in memory: bounded for each tenant, and in all."""

from __future__ import annotations

from collections import Counter
from typing import Final

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
