"""`EventLoopConnection`: a `Connection` that an event loop uses without ever waiting."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from twostroke.core.transport.frames import MessageFormat

T = TypeVar("T")


class EventLoopConnection(Connection[T]):
    """A message connection to another process, for an event loop, which must never wait.

    Before `attach`, a thread may use it like a `Connection`. After `attach`, call `post` in place
    of `send`, and `receive_arrived` to receive.
    """

    def __init__(self, sock: socket.socket, message_format: MessageFormat[T]) -> None:
        """Use a socket that is connected to another process; `close` closes the socket."""
        super().__init__(sock, message_format)
        self._unsent = bytearray()

    def attach(self, on_readable: Callable[[], None]) -> None:
        """Use the connection in the running event loop from now on.

        The loop calls `on_readable` whenever messages may have arrived.
        """
        self._socket.settimeout(0)
        asyncio.get_running_loop().add_reader(self._socket, on_readable)

    def detach(self) -> None:
        """Stop receiving in the running event loop, and drop messages that are not sent yet."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._unsent.clear()

    def post(self, message: object) -> None:
        """Send a message without waiting; the event loop sends the rest when the socket has room.

        Nothing is sent if the other process is gone; `receive_arrived` then raises the error.
        """
        frame = self._frame(message)
        if not self._unsent:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if frame:
            if not self._unsent:
                asyncio.get_running_loop().add_writer(self._socket, self._send_rest)
            self._unsent += frame

    def send_last(self, message: object, timeout_s: float) -> None:
        """Send a message after the event loop has ended, waiting at most `timeout_s`.

        If the message cannot be sent, the connection is cut.
        """
        if self._unsent:  # a part of a message was sent, so that no other can follow
            self.cut()
            return
        with suppress(OSError, ConnectionLostError):
            self._socket.settimeout(timeout_s)
            self.send(message)

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._socket)
