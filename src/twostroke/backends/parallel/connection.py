"""Connections between rank 0 and the other ranks: who may connect, and what to do if it fails."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from twostroke.backends.parallel.rank_messages import RECEIVED_BY_RANKS
from twostroke.core.errors import PortInUseError
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.core.transport.listener import (
    AuthenticationError,
    Listener,
    SharedSecret,
    connect,
)

if TYPE_CHECKING:
    import socket

    from twostroke.backends.parallel.rank_messages import RankMessage
    from twostroke.core.transport.frames import MessageFormat

    RankConnection = Connection[RankMessage | bytes]

_logger = logging.getLogger("twostroke.ranks")

T = TypeVar("T")

LOST_HOST_AFTER_S: Final = 3
_SIDES: Final = (b"rank", b"zero")
_SPIN_S: Final = 0.0008  # about the time between the steps of a small model
_RETRY_PAUSE_S: Final = 0.1
_MAX_HANDSHAKES: Final = 1024  # all ranks may connect at the same time


def open_connection(sock: socket.socket) -> RankConnection:
    """Use a socket that is connected to rank 0, or on rank 0 to another rank."""
    return _open(sock, RECEIVED_BY_RANKS)


def listen_for_ranks(
    host: str, port: int, secret: bytes, message_format: MessageFormat[T]
) -> Listener[T]:
    """Listen on rank 0 for ranks that know the secret; port 0 takes a free port.

    Raises:
        PortInUseError: the address is taken, or does not belong to this machine.
    """
    try:
        return Listener(
            (host, port),
            _shared(secret),
            open_connection=lambda sock: _open(sock, message_format),
            on_refused=_log_refusal,
            max_handshakes=_MAX_HANDSHAKES,
        )
    except OSError as error:
        reason = f"Ranks cannot connect to {host}:{port}: {error.strerror or error}."
        raise PortInUseError(reason) from None


def connect_to_rank0(
    address: tuple[str, int],
    secret: bytes,
    message_format: MessageFormat[T],
    timeout_s: float,
    *,
    has_listened: bool = False,
) -> Connection[T]:
    """Connect to rank 0, and prove to each other that both know the secret.

    Until `timeout_s` is over, a refused connection is tried again, because rank 0 may not listen
    yet. If `has_listened` says that rank 0 listened before, a refused connection means that rank 0
    has ended.

    Raises:
        ConnectionLostError: rank 0 does not answer in time, or has another secret.
    """
    host, port = address
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return _open(connect(address, _shared(secret)), message_format)
        except UnicodeError:
            reason = (
                f"Rank 0 cannot be at '{host}', which is not the name of a host: set MASTER_ADDR."
            )
            raise ConnectionLostError(reason) from None
        except AuthenticationError:
            reason = (
                f"The process at {host}:{port} is not rank 0, or has another secret: check "
                "MASTER_PORT and TWOSTROKE_RANK_SECRET."
            )
            raise ConnectionLostError(reason) from None
        except OSError as error:
            has_ended = has_listened and isinstance(error, ConnectionRefusedError)
            if has_ended or time.monotonic() > deadline_s:
                reason = f"Rank 0 does not answer at {host}:{port} ({error.strerror or error})."
                raise ConnectionLostError(reason) from None
            time.sleep(_RETRY_PAUSE_S)


def _shared(secret: bytes) -> SharedSecret:
    return SharedSecret(secret, _SIDES, "TWOSTROKE_RANK_SECRET", may_be_empty=True)


def _open(sock: socket.socket, message_format: MessageFormat[Any]) -> Connection[Any]:
    return Connection(sock, message_format, spin_s=_SPIN_S)


def _log_refusal(host: str, error: OSError) -> None:
    reason = "it did not answer as a rank does"
    if isinstance(error, PermissionError):
        reason = "it does not know their secret (TWOSTROKE_RANK_SECRET)"
    _logger.warning("A process at %s was refused among the ranks: %s.", host, reason)
