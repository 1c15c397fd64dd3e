"""Messages on a byte stream: the length of the body in four bytes, little-endian, and the body."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import BackendError, TwostrokeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader

MAX_FRAME: Final = 256 << 20  # bytes of a body

_HEAD: Final = struct.Struct("<I")


class WireError(BackendError):
    """The received bytes are not a message of the other process."""


def frame(body: bytes) -> bytes:
    """Return a message with the length of its body in front, ready to be sent."""
    return _HEAD.pack(len(body)) + body


def read_frame(file: BufferedReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """Wait for the next message on a pipe or socket file, and return the message decoded.

    Raises:
        WireError: the file ended, or the frame is too large or not a message.
        OSError, ValueError: the file cannot be read.
    """
    size = _size(_read(file, _HEAD.size))
    return _decode(decoder, _read(file, size))


class Frames:
    """Splits the bytes that arrive on a connection into messages, and decodes them."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """Decode the body of each message with `decoder`."""
        self._decoder = decoder
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes, and yield the messages that are now complete.

        Raises:
            WireError: a frame is too large or not a message.
        """
        self._received += data
        received = self._received
        start = 0
        try:
            while len(received) - start >= _HEAD.size:
                size = _size(received, start)
                end = start + _HEAD.size + size
                if len(received) < end:
                    break
                body = bytes(memoryview(received)[start + _HEAD.size : end])
                start = end
                yield _decode(self._decoder, body)
        finally:
            del received[:start]


def _size(data: bytes | bytearray, start: int = 0) -> int:
    (size,) = _HEAD.unpack_from(data, start)
    if size > MAX_FRAME:
        raise WireError(f"A frame of {size} bytes arrived; at most {MAX_FRAME} may.")
    return int(size)


def _read(file: BufferedReader, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise WireError("The connection ended.")
    return data


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, TwostrokeError, KeyError, ValueError, TypeError) as error:
        raise WireError(f"A message cannot be read: {error}") from None
