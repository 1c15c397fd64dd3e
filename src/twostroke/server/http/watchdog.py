"""What systemd is told: the server answers, still makes progress, or stops.

The protocol is that of sd_notify(3): datagrams to a socket that an environment variable names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Final

from twostroke.core import env

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMES: Final = 3  # in the time that systemd waits
_logger = logging.getLogger("twostroke.serve")


class Watchdog:
    """Tells systemd how a server is; does nothing where systemd did not start it."""

    def __init__(self, is_well: Callable[[], bool]) -> None:
        """Feed the watchdog as long as `is_well` says that requests are answered, or will be."""
        self._is_well = is_well
        self._address = env.notify_socket()
        self._interval_s = env.watchdog_s() if self._address else None
        self._feeding: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Say in the running event loop that the server answers, and feed from now on."""
        self._tell("READY=1")
        if self._interval_s is not None:
            self._feeding = asyncio.get_running_loop().create_task(self._feed(self._interval_s))

    def stop(self) -> None:
        """Say that the server stops; systemd waits for running requests as long as it is told."""
        self._tell("STOPPING=1")

    def end(self) -> None:
        """Feed no more."""
        if self._feeding is not None:
            self._feeding.cancel()

    async def _feed(self, interval_s: float) -> None:
        while True:
            if self._is_well():
                self._tell("WATCHDOG=1")
            await asyncio.sleep(interval_s / _TIMES)

    def _tell(self, text: str) -> None:
        if self._address is None:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
                link.sendto(text.encode(), path)
        except OSError as error:
            _logger.warning("systemd cannot be told %s: %s.", text, error.strerror or error)
