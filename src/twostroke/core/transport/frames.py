"""Frames of messages: the length of a body in four bytes, lowest first, and the body.

Bodies are in MessagePack. They come from files that wait for them (`read_frame`), or in pieces
(`Frames`).
"""

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
    """What arrived is not a message of the other end."""


def frame(body: bytes) -> bytes:
    """Return a body as a frame."""
    return _HEAD.pack(len(body)) + body


def read_frame(file: BufferedReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """Wait for a message, and return it.

    Raises:
        WireError: the file ended, or a frame is too large, or not a message.
        OSError, ValueError: the file cannot be read.
    """
    size = _size(_read(file, _HEAD.size))
    return _decode(decoder, _read(file, size))


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """Decode with `requests` or `answers`."""
        self._decoder = decoder
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are complete with `data`.

        Raises:
            WireError: a frame is too large, or not a message.
        """
        self._received += data
        received, start = self._received, 0
        try:
            while len(received) - start >= _HEAD.size:
                size = _size(received, start)
                end = start + _HEAD.size + size
                if len(received) < end:
                    break
                body, start = bytes(memoryview(received)[start + _HEAD.size : end]), end
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
