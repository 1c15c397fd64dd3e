"""Connections between a prefill engine and a decode engine: who may connect, and what must agree.

Engines of one user on one machine connect by a Unix socket and need no secret. All other engines
connect by TCP, and each proves to the other that it knows the secret (`TWOSTROKE_PEER_SECRET`).
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from twostroke.core.errors import PortInUseError
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.core.transport.listener import (
    AuthenticationError,
    Listener,
    LocalSocket,
    SharedSecret,
    connect,
    connect_locally,
    is_own_address,
)
from twostroke.engine.disaggregation import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.transport.frames import MessageFormat
    from twostroke.engine.disaggregation.messages import DecodeMessage, PrefillMessage

_logger = logging.getLogger("twostroke.handover")

T = TypeVar("T")

_SIDES: Final = (b"decode", b"prefill")
_SOCKET_NAME: Final = "twostroke-prefill"
_SEND_TIMEOUT_S: Final = 10  # in which the other engine must read a part of the bytes sent to it
_LOST_HOST_AFTER_S: Final = 4


class RefusedError(ConnectionLostError):
    """A prefill and a decode engine cannot exchange KV pages, since their specs differ.

    The spec describes the model, the version and the format of pages.
    """


def listen_for_decode_engines(
    address: tuple[str, int],
    secret: bytes,
    *,
    page_file: int | None,
    serve: Callable[[Connection[DecodeMessage]], None],
) -> Listener[DecodeMessage]:
    """Listen on a prefill engine, and call `serve` in a new thread for each decode engine.

    Engines of this machine and user get `page_file`, the descriptor of the file that holds the KV
    pages. Without a secret, only these engines are admitted. Port 0 takes a free port.

    Raises:
        PortInUseError: the address is in use, or does not belong to this machine.
    """
    try:
        return Listener(
            address,
            _shared(secret),
            open_connection=lambda sock: _open(sock, messages.RECEIVED_BY_PREFILL),
            on_refused=_log_refusal,
            serve=serve,
            local=LocalSocket(_SOCKET_NAME, page_file),
        )
    except OSError as error:
        host, port = address
        cause = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            cause = "another program has this port (--peer-address, peer_port of a fleet)"
        reason = f"Decode engines cannot connect to {host}:{port}: {cause}."
        raise PortInUseError(reason) from None


def connect_to_prefill_engine(
    address: tuple[str, int], secret: bytes
) -> tuple[Connection[PrefillMessage], int | None]:
    """Connect to a prefill engine; return also the open file of its KV pages, if shared.

    Raises:
        ConnectionLostError: the engine does not answer, or has another secret.
    """
    host, port = address
    if is_own_address(host):
        with suppress(OSError):
            sock, page_file = connect_locally(LocalSocket(_SOCKET_NAME), port)
            return _open(sock, messages.RECEIVED_BY_DECODE), page_file
    if not secret:
        reason = f"No prefill engine of this user answers at {host}:{port} on this machine; others "
        raise ConnectionLostError(reason + "need the same TWOSTROKE_PEER_SECRET here and there.")
    try:
        sock = connect(address, _shared(secret))
    except AuthenticationError:
        reason = f"The program at {host}:{port} is not a prefill engine with the same secret: "
        raise ConnectionLostError(reason + "check TWOSTROKE_PEER_SECRET.") from None
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConnectionLostError(
            f"No prefill engine answers at {host}:{port} ({cause})."
        ) from None
    return _open(sock, messages.RECEIVED_BY_DECODE), None


def check_spec(connection: Connection[PrefillMessage], spec: messages.KvCacheSpecMessage) -> int:
    """Check that a prefill engine's KV pages have the same format as the pages of this engine.

    Returns the number of the prefill engine's pages.

    Raises:
        RefusedError: the engine has another spec or version.
        ConnectionLostError: the prefill engine is gone, or sent an invalid message.
    """
    connection.send(messages.DecodeHello(messages.VERSION, spec))
    welcome = connection.receive()
    if isinstance(welcome, messages.Refused):
        raise RefusedError(welcome.reason)
    if not isinstance(welcome, messages.Welcome) or welcome.version != messages.VERSION:
        raise RefusedError("The prefill engine has another version of Twostroke.")
    if (difference := spec.difference(welcome.spec)) is not None:
        raise RefusedError(f"The prefill engine has {difference}.")
    return welcome.num_pages


def _shared(secret: bytes) -> SharedSecret:
    return SharedSecret(secret, _SIDES, "TWOSTROKE_PEER_SECRET")


def _open(sock: socket.socket, message_format: MessageFormat[T]) -> Connection[T]:
    connection = Connection(sock, message_format, send_timeout_s=_SEND_TIMEOUT_S)
    if sock.family != socket.AF_UNIX:
        connection.detect_lost_host(_LOST_HOST_AFTER_S)
    return connection


def _log_refusal(host: str, error: OSError) -> None:
    if isinstance(error, PermissionError):
        _logger.warning("A decode engine at %s was refused: %s.", host, error)
