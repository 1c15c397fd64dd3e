"""`Channel`: messages between rank 0 and one other rank, over a socket."""

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

_HEAD: Final = struct.Struct("<II")  # kind, bytes of the body
_MAX_BODY: Final = 1 << 30
_CHUNK: Final = 1 << 16
_SPIN_S: Final = 0.0008  # about the time between the steps of a small model
_PATIENCE_S: Final = 2.0  # with a peer that has not proved itself
_PAUSE_S: Final = 0.05  # after a connection that could not be accepted
_MOST_STRANGERS: Final = 32  # that are reported
_SIDES: Final = (b"rank", b"zero")


class MessageType(IntEnum):
    """What a message is; all bodies but that of a frame are JSON of a struct in `job.py`."""

    HELLO = 1  # to rank 0: who I am
    JOB = 2  # from rank 0: what to load
    READY = 3  # to rank 0: loaded, or reset
    FRAME = 4  # from rank 0: a step
    EVALUATE = 5  # from rank 0: a sequence, on separate pages
    RESET = 6  # from rank 0: a step failed; begin again
    FAILED = 7  # to rank 0: my part failed
    BEAT = 8  # both ways: I live
    COPY = 9  # from rank 0: pages
    TIMES = 10  # from rank 0: say how long your operations took; and the answer
    MEASURE = 11  # from rank 0: meet the others, so that it can measure the link
    END = 12  # from rank 0
    LEAVE = 13  # to rank 0: this rank is not started again


class ChannelClosedError(BackendError):
    """The other end is gone, or sent what is not a message."""


class Message(Frozen):
    """A message; its body is a copy."""

    kind: MessageType
    body: bytes


class Channel:
    """Sends and receives whole messages. Any thread may send, one at a time receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected stream socket."""
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._lock = threading.Lock()
        self._received = bytearray()
        self._is_open = True

    def send(self, kind: MessageType, body: bytes = b"") -> None:
        """Send a message; waits while the other end does not read.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        with self._lock:
            head = _HEAD.pack(kind, len(body))
            if len(body) < _CHUNK:  # a copy is quicker than a list of parts
                self._send_all(head + body)
            else:
                self._send_all(head, body)

    def beat(self, body: bytes = b"") -> None:
        """Send a heartbeat, unless a message is on its way, which says the same."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            beat = _HEAD.pack(MessageType.BEAT, len(body)) + body
            sent = self._socket.send(beat, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if sent < len(beat):
                self._send_all(beat[sent:])
        except BlockingIOError:
            pass  # the other end has not read for long: it will find many
        except OSError as error:
            raise ChannelClosedError(f"The connection ended: {error}.") from None
        finally:
            self._lock.release()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None if none comes in time.

        Spins for a moment before it sleeps, because the next step usually follows at once.

        Raises:
            ChannelClosedError: the other end is gone, or what it sent is not a message.
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
        """Whether the other end is gone, even if some of its messages are still unread."""
        if not self._is_open:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def notice_silence(self, after_s: int) -> None:
        """Let the connection end once the other host has been unreachable for a few seconds."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, after_s - 1)
        # Those are for when nothing is on its way; this is for data that nobody confirms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_s * 1000)

    def own_address(self) -> str:
        """This end's network address."""
        host: str = self._socket.getsockname()[0]
        return host

    def fileno(self) -> int:
        """The socket's number, for `select`."""
        return self._socket.fileno()

    def cut(self) -> None:
        """End the connection: both ends stop waiting for each other."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; twice does no harm."""
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
        """Take a whole message out of what was received."""
        data = self._received
        if len(data) < _HEAD.size:
            return None
        kind, size = _HEAD.unpack_from(data)
        if not MessageType.HELLO <= kind <= MessageType.LEAVE or size > _MAX_BODY:
            raise ChannelClosedError("What arrived is not a message of a rank.")
        end = _HEAD.size + size
        if len(data) < end:
            return None
        message = Message(MessageType(kind), bytes(memoryview(data)[_HEAD.size : end]))
        del data[:end]
        return message

    def _read(self) -> bool:
        """Read what has arrived; return whether anything had."""
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
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
    """Where other ranks connect to rank 0 by TCP; those without the secret are dropped."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            PortInUseError: the address is taken, or is not one of this machine.
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
        """Return the connection of the next rank that knows the secret, or None."""
        with suppress(Empty):
            return self._greeted.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Accept no more ranks."""
        self.is_open = False
        with suppress(OSError):  # ends `accept`
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
                # A stranger that says nothing must not keep ranks waiting.
                threading.Thread(target=self._greet, args=(sock, address[0]), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or too many strangers at once
                time.sleep(_PAUSE_S)

    def _greet(self, sock: socket.socket, host: str) -> None:
        try:
            sock.settimeout(_PATIENCE_S)
            admit(sock, self._secret, _SIDES)
            channel = Channel(sock)
        except OSError as error:
            sock.close()
            self._tell_stranger(host, has_spoken=isinstance(error, PermissionError))
            return
        self._greeted.put(channel)
        if not self.is_open:  # closed meanwhile: nobody accepts the connection any more
            self._close_unaccepted()

    def _tell_stranger(self, host: str, *, has_spoken: bool) -> None:
        """Report a connection that was refused; those like an earlier one are not."""
        why = "it did not answer as a rank does"
        if has_spoken:
            why = "it does not know their secret (TWOSTROKE_RANK_SECRET)"
        known = self._strangers
        if (host, why) in known or len(known) == _MOST_STRANGERS or not self.is_open:
            return
        known.add((host, why))
        _logger.warning("A process at %s was refused among the ranks: %s.", host, why)


def connect(
    host: str, port: int, secret: bytes, timeout_s: float, *, has_listened: bool = False
) -> Channel:
    """Connect to rank 0's `Listener`; waits until it listens, unless it `has_listened` before.

    Raises:
        ChannelClosedError: it does not answer in time, or does not know the secret.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=_PATIENCE_S)
            break
        except UnicodeError:
            reason = f"Rank 0 cannot be at '{host}', as no host has such a name: set MASTER_ADDR."
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
            f"What listens at {host}:{port} is not rank 0, or has another secret: check "
            "MASTER_PORT and TWOSTROKE_RANK_SECRET."
        )
        raise ChannelClosedError(reason) from None
    return Channel(sock)
