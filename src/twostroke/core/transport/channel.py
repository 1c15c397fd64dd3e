"""`Channel`: messages between rank 0 and one other rank, over a socket.

A message is its type and the length of its body, each in four bytes, and the body.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from enum import IntEnum
from queue import Empty, Queue
from typing import Final

from twostroke.core.errors import BackendError, PortInUseError
from twostroke.core.frozen import Frozen
from twostroke.core.transport.handshake import admit, introduce

_logger = logging.getLogger("twostroke.ranks")

_HEAD: Final = struct.Struct("<II")  # type, bytes of the body
_MAX_BODY_BYTES: Final = 1 << 30
_CHUNK_BYTES: Final = 1 << 16
_SPIN_S: Final = 0.0008  # about the time between the steps of a small model
_HANDSHAKE_TIMEOUT_S: Final = 2.0
_ACCEPT_PAUSE_S: Final = 0.05  # after a connection that could not be accepted
_MAX_REPORTED_STRANGERS: Final = 32  # hosts without the secret that are logged
_SIDES: Final = (b"rank", b"zero")


class MessageType(IntEnum):
    """The type of a message between rank 0 and another rank.

    The body of a `FRAME` is binary; other bodies are JSON structs.
    """

    HELLO = 1  # to rank 0: the sender's rank and machine
    JOB = 2  # from rank 0: the model to load
    READY = 3  # to rank 0: the model is loaded, or the state is reset
    FRAME = 4  # from rank 0: a step to run
    EVALUATE = 5  # from rank 0: a sequence to compute on separate pages
    RESET = 6  # from rank 0: a step failed; drop the state of steps
    FAILED = 7  # to rank 0: this rank failed
    BEAT = 8  # both ways: a heartbeat
    COPY = 9  # from rank 0: pages to copy
    TIMES = 10  # from rank 0: asks for the times of operations; to rank 0: the times
    MEASURE = 11  # from rank 0: connect to the other ranks, so that the link can be measured
    END = 12  # from rank 0: exit
    LEAVE = 13  # to rank 0: this rank exits, and must not be started again


class ChannelClosedError(BackendError):
    """The process of the other rank is gone, or sent bytes that are not a message."""


class Message(Frozen):
    """A message that was received from another rank.

    The body is a copy of the received bytes.
    """

    kind: MessageType
    body: bytes


class Channel:
    """Sends and receives messages between rank 0 and another rank, over a socket.

    Any thread may send; only one thread at a time may receive.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Use a socket that is connected to another rank; `close` closes the socket."""
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._lock = threading.Lock()
        self._received = bytearray()
        self._is_open = True

    def send(self, kind: MessageType, body: bytes = b"") -> None:
        """Send a message to the other rank; block while the other process does not read.

        Raises:
            ChannelClosedError: the other process is gone.
        """
        with self._lock:
            head = _HEAD.pack(kind, len(body))
            if len(body) < _CHUNK_BYTES:  # a copy is faster than a list of parts
                self._send_all(head + body)
            else:
                self._send_all(head, body)

    def beat(self, body: bytes = b"") -> None:
        """Send a heartbeat, unless another thread is sending a message, which serves as one."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            beat = _HEAD.pack(MessageType.BEAT, len(body)) + body
            sent = self._socket.send(beat, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if sent < len(beat):
                self._send_all(beat[sent:])
        except BlockingIOError:
            pass  # the other process has many unread heartbeats
        except OSError as error:
            raise ChannelClosedError(f"The connection ended: {error}.") from None
        finally:
            self._lock.release()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message of the other rank, or None if none arrives within `timeout_s`.

        Without a timeout the wait has no limit. The thread spins for a moment before it sleeps,
        because the next step usually follows at once.

        Raises:
            ChannelClosedError: the other process is gone, or sent bytes that are not a message.
        """
        now = time.monotonic()
        spin_until = now + (_SPIN_S if timeout_s is None else min(_SPIN_S, timeout_s))
        deadline = None if timeout_s is None else now + timeout_s
        while (message := self._next()) is None:
            if self._read():
                continue
            now = time.monotonic()
            if now < spin_until:
                continue
            if deadline is not None and now >= deadline:
                return None
            wait_s = None if deadline is None else deadline - now
            self._wait(wait_s)
        return message

    def is_cut(self) -> bool:
        """Whether the other process is gone, even if some of its messages are unread."""
        if not self._is_open:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def notice_silence(self, after_s: int) -> None:
        """Make the connection fail when the other host is unreachable for `after_s` seconds."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, after_s - 1)
        # Keep-alive detects an idle connection to a lost host; this, data that is not acknowledged.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_s * 1000)

    def own_address(self) -> str:
        """Return the network address of this process's end of the connection."""
        host: str = self._socket.getsockname()[0]
        return host

    def fileno(self) -> int:
        """Return the file descriptor of the channel's socket, for `select`."""
        return self._socket.fileno()

    def cut(self) -> None:
        """End the connection to the other rank, so that neither process waits for the other."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket to the other rank; a second call does nothing."""
        self._is_open = False
        self.cut()
        self._socket.close()

    def _send_all(self, *parts: bytes) -> None:
        rest = [memoryview(part) for part in parts if part]
        try:
            while rest:
                sent = self._socket.sendmsg(rest, (), socket.MSG_NOSIGNAL)
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][sent:]
        except OSError as error:
            raise ChannelClosedError(f"The connection ended: {error}.") from None

    def _next(self) -> Message | None:
        """Remove the first complete message from the received bytes, and return it.

        The result is None if no message is complete.
        """
        data = self._received
        if len(data) < _HEAD.size:
            return None
        kind, size = _HEAD.unpack_from(data)
        if not MessageType.HELLO <= kind <= MessageType.LEAVE or size > _MAX_BODY_BYTES:
            raise ChannelClosedError("The received bytes are not a message of a rank.")
        end = _HEAD.size + size
        if len(data) < end:
            return None
        message = Message(MessageType(kind), bytes(memoryview(data)[_HEAD.size : end]))
        del data[:end]
        return message

    def _read(self) -> bool:
        """Read the bytes that have arrived on the socket; return whether there were any."""
        try:
            data = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosedError(f"The connection ended: {error}.") from None
        if not data:
            raise ChannelClosedError("The connection ended.")
        self._received += data
        return True

    def _wait(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(None if timeout_s is None else max(1, int(timeout_s * 1000)))


class Listener:
    """Accepts the TCP connections of other ranks to rank 0, and drops others without the secret."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """Listen for other ranks at an address; port 0 takes a free port.

        Raises:
            PortInUseError: the address is taken, or does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            reason = f"Ranks cannot connect to {host}:{port}: {error.strerror}."
            raise PortInUseError(reason) from None
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]
        self._secret = secret
        self._greeted: Queue[Channel] = Queue()
        self.is_open = True
        self._strangers: set[tuple[str, str]] = set()
        threading.Thread(target=self._accept, name="twostroke-ranks", daemon=True).start()

    def accept(self, timeout_s: float) -> Channel | None:
        """Return the connection of the next rank that knows the secret; None after the timeout."""
        with suppress(Empty):
            return self._greeted.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Stop listening for ranks, and close connections that `accept` has not returned."""
        self.is_open = False
        with suppress(OSError):  # ends `accept` in the other thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._close_unaccepted()

    def _close_unaccepted(self) -> None:
        with suppress(Empty):
            while True:
                self._greeted.get_nowait().close()

    def _accept(self) -> None:
        while self.is_open:
            try:
                sock, address = self._socket.accept()
                # A process that sends nothing must not delay other connections.
                threading.Thread(target=self._greet, args=(sock, address[0]), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or too many strangers at once
                time.sleep(_ACCEPT_PAUSE_S)

    def _greet(self, sock: socket.socket, host: str) -> None:
        try:
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            admit(sock, self._secret, _SIDES)
            channel = Channel(sock)
        except OSError as error:
            sock.close()
            self._log_stranger(host, has_answered=isinstance(error, PermissionError))
            return
        self._greeted.put(channel)
        if not self.is_open:  # closed meanwhile, so that the connection would never be accepted
            self._close_unaccepted()

    def _log_stranger(self, host: str, *, has_answered: bool) -> None:
        """Log a connection that was refused, once for each host and reason.

        `has_answered` tells whether the other process took part in the handshake.
        """
        reason = "it did not answer as a rank does"
        if has_answered:
            reason = "it does not know their secret (TWOSTROKE_RANK_SECRET)"
        logged = self._strangers
        is_full = len(logged) == _MAX_REPORTED_STRANGERS
        if (host, reason) in logged or is_full or not self.is_open:
            return
        logged.add((host, reason))
        _logger.warning("A process at %s was refused among the ranks: %s.", host, reason)


def connect(
    host: str, port: int, secret: bytes, timeout_s: float, *, has_listened: bool = False
) -> Channel:
    """Connect to rank 0's `Listener`, and do the handshake that proves the secret.

    Until `timeout_s` is over, a refused connection is tried again, because rank 0 may not listen
    yet. If `has_listened` says that rank 0 listened before, a refused connection means that rank 0
    has ended.

    Raises:
        ChannelClosedError: rank 0 does not answer in time, or has another secret.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=_HANDSHAKE_TIMEOUT_S)
            break
        except UnicodeError:
            reason = (
                f"Rank 0 cannot be at '{host}', which is not the name of a host: set MASTER_ADDR."
            )
            raise ChannelClosedError(reason) from None
        except OSError as error:
            has_ended = has_listened and isinstance(error, ConnectionRefusedError)
            if has_ended or time.monotonic() > deadline:
                reason = f"Rank 0 does not answer at {host}:{port} ({error.strerror or error})."
                raise ChannelClosedError(reason) from None
            time.sleep(0.1)
    try:
        introduce(sock, secret, _SIDES)
    except OSError:
        sock.close()
        reason = (
            f"The process at {host}:{port} is not rank 0, or has another secret: check "
            "MASTER_PORT and TWOSTROKE_RANK_SECRET."
        )
        raise ChannelClosedError(reason) from None
    return Channel(sock)
