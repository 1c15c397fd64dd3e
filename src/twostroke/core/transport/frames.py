"""Framing and encoding of messages: a length in four bytes, little-endian, and a body.

The body of a message is MessagePack. If the highest bit of the length is set, the body has another
encoding, and is passed on as bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import msgspec

from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_BODY_BYTES: Final = 256 << 20

_HEAD: Final = struct.Struct("<I")
_BINARY_BIT: Final = 1 << 31  # of the length
_encode: Final = msgspec.msgpack.Encoder().encode


class ConnectionLostError(BackendError):
    """The other process of a connection is gone, does not read, or sent an invalid message."""


class InvalidMessageError(ConnectionLostError):
    """The received bytes are not a message that the other process may send."""


class MessageFormat(Generic[T]):
    """How one end of a connection encodes messages, and which messages it accepts.

    Attributes:
        encode, decode: functions that encode and decode the body of a message.
        takes_bytes: whether bodies that are not MessagePack are accepted.
    """

    def __init__(
        self,
        received: Any,
        *,
        encode: Callable[[Any], bytes] = _encode,
        decode_other: Callable[[type, Any], Any] | None = None,
        takes_bytes: bool = False,
    ) -> None:
        """Accept messages of the type, or of the union of types, `received`.

        `decode_other` decodes types that msgspec does not know. With `takes_bytes`, bodies that are
        not MessagePack are accepted, and arrive as `bytes`.
        """
        self.encode: Final = encode
        self.takes_bytes: Final = takes_bytes
        decoder = msgspec.msgpack.Decoder(received, dec_hook=decode_other)
        self.decode: Final[Callable[[bytes], T]] = decoder.decode

    def frame(self, message: object) -> bytes:
        """Return a message as bytes that can be sent: its length and its encoded body."""
        body = self.encode(message)
        return _HEAD.pack(len(body)) + body


def binary_head(body: bytes) -> bytes:
    """Return the four bytes to send before a body that is not MessagePack: length and a marker."""
    return _HEAD.pack(len(body) | _BINARY_BIT)


class MessageReader(Generic[T]):
    """Splits the bytes of a connection into messages, as they arrive, and decodes them.

    Attributes:
        received: the bytes that have arrived and are not part of a returned message. The owner
            of the connection appends new bytes here.
    """

    def __init__(self, message_format: MessageFormat[T]) -> None:
        """Decode messages in the format `message_format`."""
        self.received = bytearray()
        self._decode = message_format.decode
        self._takes_bytes = message_format.takes_bytes

    def next(self) -> T | None:
        """Remove the first complete message from the received bytes, and return it decoded.

        The result is None if no message is complete.

        Raises:
            InvalidMessageError: the length is above the limit, or the bytes are not a message.
        """
        received = self.received
        if len(received) < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(received)
        is_binary = False
        if size > MAX_BODY_BYTES:
            size = self._binary_size(size)
            is_binary = True
        end = _HEAD.size + size
        if len(received) < end:
            return None
        body: Any = bytes(memoryview(received)[_HEAD.size : end])
        del received[:end]
        if is_binary:
            return cast("T", body)
        try:
            return self._decode(body)
        except (msgspec.MsgspecError, TwostrokeError, KeyError, ValueError, TypeError) as error:
            raise InvalidMessageError(f"A message cannot be read: {error}") from None

    def _binary_size(self, size: int) -> int:
        """Return the size of a body that is not MessagePack, from the length in its head."""
        is_binary = self._takes_bytes and size >= _BINARY_BIT
        if not is_binary or size - _BINARY_BIT > MAX_BODY_BYTES:
            reason = (
                f"A frame of {counted_noun(size, 'byte')} arrived; at most {MAX_BODY_BYTES} may."
            )
            raise InvalidMessageError(reason)
        return size - _BINARY_BIT

    def take_into(self, view: memoryview[Any]) -> int:
        """Move raw bytes that arrived after a message into `view`; return how many were moved."""
        count = min(len(view), len(self.received))
        view[:count] = memoryview(self.received)[:count]
        del self.received[:count]
        return count
