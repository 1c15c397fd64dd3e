"""`Connection`: messages between two processes over a socket, in threads that may wait."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from twostroke.core.transport.frames import ConnectionLostError, MessageReader, binary_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.core.transport.frames import MessageFormat

T = TypeVar("T")

_READ_BYTES: Final = 1 << 16  # malloc maps larger buffers anew for each read, in 15 us
_MAX_BUFFERS: Final = 64  # of one system call
_MAX_COPIED_BYTES: Final = 1 << 16


class Connection(Generic[T]):
    """A message connection to another process, over a socket, for threads that may wait.

    Any thread may send; only one thread at a time may receive.
    """

    def __init__(
        self,
        sock: socket.socket,
        message_format: MessageFormat[T],
        *,
        send_timeout_s: int | None = None,
        spin_s: float = 0.0,
    ) -> None:
        """Use a socket that is connected to another process; `close` closes the socket.

        `send_timeout_s`: a send fails if the other process reads nothing for this time. `spin_s`: a
        thread that receives polls the socket for this time before it sleeps.
        """
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_timeout_s is not None:
            timeout = struct.pack("ll", send_timeout_s, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = sock
        self._frame = message_format.frame
        self._spin_s = spin_s
        self._lock = threading.Lock()
        self._reader = MessageReader(message_format)
        self._poll = select.poll()  # `select` takes no descriptor above 1023
        self._poll.register(sock, select.POLLIN)
        self._is_open = True

    def send(self, message: object, buffers: Iterable[memoryview[Any]] | None = None) -> None:
        """Send a message, and after it the raw bytes of `buffers`, which the receiver must expect.

        The buffers are taken from the iterator one after the other. Waits while the other process
        does not read.

        Raises:
            ConnectionLostError: the other process is gone, or has not read for too long.
        """
        self.send_frame(self._frame(message), buffers)

    def send_bytes(self, body: bytes) -> None:
        """Send bytes as a message that is not MessagePack; the receiver gets them as `bytes`.

        Waits and raises as `send`.
        """
        if len(body) < _MAX_COPIED_BYTES:  # a copy is faster than two buffers
            self.send_frame(binary_head(body) + body)
        else:
            self.send_frame(binary_head(body), [memoryview(body)])

    def send_frame(self, frame: bytes, buffers: Iterable[memoryview[Any]] | None = None) -> None:
        """Send an encoded message (from `MessageFormat.frame`), and after it raw bytes.

        Waits and raises as `send`.
        """
        try:
            with self._lock:
                if buffers is None:
                    self._socket.sendall(frame, socket.MSG_NOSIGNAL)
                else:
                    self._send_all(frame, iter(buffers))
        except (OSError, ValueError) as error:
            self.cut()
            raise ConnectionLostError(f"The connection ended: {error}.") from None

    def try_send(self, message: object) -> None:
        """Send a message if that is possible at once; otherwise do nothing.

        Nothing is sent if the other process does not read, or another thread is sending. This is
        for heartbeats, which other messages replace. The call waits only to send the rest of a
        message that the socket accepted in part.

        Raises:
            ConnectionLostError: the other process is gone.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            frame = self._frame(message)
            num_sent = self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if num_sent < len(frame):
                self._socket.sendall(frame[num_sent:], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass  # the other process has many unread messages
        except OSError as error:
            raise ConnectionLostError(f"The connection ended: {error}.") from None
        finally:
            self._lock.release()

    @overload
    def receive(self) -> T: ...

    @overload
    def receive(self, timeout_s: float) -> T | None: ...

    def receive(self, timeout_s: float | None = None) -> T | None:
        """Return the next message, or None if none arrives within `timeout_s`.

        Without a timeout the wait has no limit.

        Raises:
            ConnectionLostError: the other process is gone, or sent an invalid message.
        """
        if (message := self._reader.next()) is not None:
            return message
        remaining_s = timeout_s
        deadline_s = 0.0 if timeout_s is None else time.monotonic() + timeout_s
        while self._read(remaining_s):
            if (message := self._reader.next()) is not None:
                return message
            if timeout_s is not None:
                remaining_s = max(0.0, deadline_s - time.monotonic())
        return None

    def receive_arrived(self, timeout_s: float | None = None) -> Iterator[T]:
        """Wait at most `timeout_s` until bytes arrive; yield the messages that are then complete.

        Raises:
            ConnectionLostError: the other process is gone, or sent an invalid message.
        """
        if self._read(timeout_s):
            reader = self._reader
            while reader.received and (message := reader.next()) is not None:
                yield message

    def receive_into(self, view: memoryview[Any]) -> None:
        """Fill a buffer with the next raw bytes that the sender has put after its last message.

        Raises:
            ConnectionLostError: the other process is gone.
        """
        start = self._reader.take_into(view) if self._reader.received else 0
        try:
            while start < len(view):
                rest = view[start:] if start else view
                count = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionLostError("The connection ended.")
                start += count
        except OSError as error:
            raise ConnectionLostError(f"The connection ended: {error}.") from None

    def is_cut(self) -> bool:
        """Whether the other process is gone, even if some of its messages are unread."""
        if not self._is_open:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def detect_lost_host(self, after_s: int) -> None:
        """Make the connection end if the other host is unreachable for `after_s` seconds."""
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, after_s - 1),
            # Keep-alive covers an idle connection; this, data that is not acknowledged.
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_s * 1000),
        ):
            self._socket.setsockopt(level, name, value)

    def own_address(self) -> str:
        """Return the network address that this process has in the connection."""
        host: str = self._socket.getsockname()[0]
        return host

    def fileno(self) -> int:
        """Return the file descriptor of the socket, by which `select` can watch the connection."""
        return self._socket.fileno()

    def cut(self) -> None:
        """End the connection for both processes and all threads; any thread may call this."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, after the receiving thread has ended; a second call does nothing."""
        self._is_open = False
        self.cut()
        self._socket.close()

    def _send_all(self, frame: bytes, remaining: Iterator[memoryview[Any]]) -> None:
        buffers = [memoryview(frame)]
        while buffers := [*buffers, *islice(remaining, _MAX_BUFFERS - len(buffers))]:
            num_sent = self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            while buffers and num_sent >= len(buffers[0]):
                num_sent -= len(buffers.pop(0))
            if num_sent:
                buffers[0] = buffers[0][num_sent:]

    def _read(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` for bytes for the message reader; return False if none come."""
        try:
            if self._spin_s:
                data = self._spin(timeout_s)
            elif timeout_s is None or self._poll.poll(1000 * timeout_s):
                data = self._socket.recv(_READ_BYTES)
            else:
                return False
        except BlockingIOError:  # of an event loop's socket
            return False
        except OSError as error:
            raise ConnectionLostError(f"The connection ended: {error}.") from None
        if data is None:
            return False
        if not data:
            raise ConnectionLostError("The connection ended.")
        self._reader.received += data
        return True

    def _spin(self, timeout_s: float | None) -> bytes | None:
        """Return the next bytes of the socket, or None after the timeout.

        The thread polls the socket for `spin_s` seconds before it sleeps, which is faster if bytes
        come soon.
        """
        now_s = time.monotonic()
        spin_until_s = now_s + self._spin_s
        deadline_s = None if timeout_s is None else now_s + timeout_s
        while True:
            try:
                return self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                now_s = time.monotonic()
            if deadline_s is not None and now_s >= deadline_s:
                return None
            if now_s >= spin_until_s:
                self._poll.poll(None if deadline_s is None else 1000 * (deadline_s - now_s))
