"""How deep and how often the lists and objects of a JSON text are nested, before it is decoded."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

# Decoding makes all lists and objects in one step, in which no other thread runs. These take some
# tenths of a second; a body of 8 MB can have 4,000,000.
MAX_CONTAINERS: Final = 250_000
_CURLY: Final = ord("{") ^ ord("[")  # the bit by which curly brackets differ from square ones
_SCANNED_BYTES: Final = 1 << 18  # at a time


class Nesting(NamedTuple):
    """How deep the lists and objects of a JSON text are nested, and how many there are at most."""

    depth: int
    num_containers: int


def nesting_of(body: bytes, max_depth: int) -> Nesting:
    """Return the nesting of a JSON text, an upper bound if it has at most `max_depth` brackets.

    Takes time in proportion to the body, whatever it contains, and lets other threads run.
    """
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets <= max_depth:
        return Nesting(num_brackets, num_brackets)
    if b"\\" in body:  # quotes in strings end no string
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    depth = deepest = num_containers = num_quotes = 0
    for start in range(0, len(body), _SCANNED_BYTES):
        size = min(_SCANNED_BYTES, len(body) - start)
        codes = np.frombuffer(body, np.uint8, size, start)
        quotes = np.cumsum(codes == ord('"'), dtype=np.int32) + num_quotes
        is_outside = quotes % 2 == 0
        squares = codes & ~np.uint8(_CURLY)
        opens = is_outside & (squares == ord("["))
        closes = is_outside & (squares == ord("]"))
        depths = np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32) + depth
        deepest = max(deepest, int(depths.max()))
        depth, num_quotes = int(depths[-1]), int(quotes[-1])
        num_containers += int(np.count_nonzero(opens))
    return Nesting(deepest, num_containers)
