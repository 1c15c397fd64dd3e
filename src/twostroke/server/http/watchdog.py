"""Tells systemd that the server is ready, makes progress, or stops.

The protocol is described in sd_notify(3): datagrams to a socket that an environment variable names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Final

from twostroke.core import env

if TYPE_CHECKING:
    from collections.abc import Callable

_NOTIFICATIONS_PER_TIMEOUT: Final = 3  # of systemd's watchdog
_logger = logging.getLogger("twostroke.serve")


class Watchdog:
    """Tells systemd the server's state; does nothing if systemd did not start the server."""

    def __init__(self, is_well: Callable[[], bool]) -> None:
        """Prepare the notifications, which go on while `is_well` returns True."""
        self._is_well = is_well
        self._address = env.notify_socket()
        self._interval_s = env.watchdog_s() if self._address else None
        self._feed_task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Tell systemd that the server is ready, and notify its watchdog regularly from now on."""
        self._notify("READY=1")
        if self._interval_s is not None:
            self._feed_task = asyncio.get_running_loop().create_task(self._feed(self._interval_s))

    def stop(self) -> None:
        """Tell systemd that the server is stopping; its watchdog is still notified."""
        self._notify("STOPPING=1")

    def end(self) -> None:
        """Stop notifying systemd's watchdog."""
        if self._feed_task is not None:
            self._feed_task.cancel()

    async def _feed(self, interval_s: float) -> None:
        while True:
            if self._is_well():
                self._notify("WATCHDOG=1")
            await asyncio.sleep(interval_s / _NOTIFICATIONS_PER_TIMEOUT)

    def _notify(self, text: str) -> None:
        if self._address is None:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(text.encode(), path)
        except OSError as error:
            _logger.warning("systemd cannot be told %s: %s.", text, error.strerror or error)
