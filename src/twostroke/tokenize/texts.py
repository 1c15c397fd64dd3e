"""Many short texts in one piece of memory, and keys by which they are found."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

_BYTES = 256
_POSITIONS = 64  # of a text that a table has numbers for


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in UTF-8, in any order: text `i` is `blob[starts[i]:ends[i]]`."""

    blob: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Take strings; arrays of a file that offer their bytes are not decoded for it."""
        offered: Callable[[], tuple[bytes, NDArray[np.int64], NDArray[np.int64]]] | None
        offered = getattr(texts, "spans", None)
        if offered is None:
            return cls.joined([text.encode("utf-8", "surrogateescape") for text in texts])
        raw, starts, ends = offered()
        return cls(np.frombuffer(raw, np.uint8), starts, ends)

    @classmethod
    def joined(cls, texts: list[bytes]) -> Self:
        """Take texts that are encoded already."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        ends = np.cumsum(lengths)
        return cls(np.frombuffer(b"".join(texts), np.uint8), ends - lengths, ends)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The bytes of each."""
        return self.ends - self.starts

    def replaced(self, changed: Mapping[int, bytes]) -> Texts:
        """Return them with other texts at some places."""
        if not changed:
            return self
        new = Texts.joined(list(changed.values()))
        starts, ends = self.starts.copy(), self.ends.copy()
        places = list(changed)
        starts[places] = new.starts + len(self.blob)
        ends[places] = new.ends + len(self.blob)
        return Texts(np.concatenate([self.blob, new.blob]), starts, ends)

    def chosen(self, which: NDArray[np.bool_]) -> Texts:
        """Return some of them."""
        return Texts(self.blob, self.starts[which], self.ends[which])

    def packed(self) -> Texts:
        """Return the texts joined, with nothing between."""
        lengths = self.lengths
        ends = np.cumsum(lengths)
        starts = ends - lengths
        from_where = np.repeat(self.starts - starts, lengths)
        from_where += np.arange(len(from_where))
        return Texts(self.blob[from_where], starts, ends)

    def split(self, sign: bytes) -> tuple[Texts, Texts, Texts]:
        """Cut each at its first `sign`; return the texts before it, after it, and both joined.

        The part after it is empty in a text without it.
        """
        signs = np.append(np.flatnonzero(self.blob == sign[0]), len(self.blob))
        first = signs[np.searchsorted(signs, self.starts)]
        has = first < self.ends
        cuts = np.where(has, first, self.ends)
        after = np.where(has, cuts + 1, cuts)
        kept = np.ones(len(self.blob), bool)
        kept[cuts[has]] = False
        gone = np.zeros(len(self.blob) + 1, np.int64)
        np.cumsum(~kept, out=gone[1:])
        both = Texts(self.blob[kept], self.starts - gone[self.starts], self.ends - gone[self.ends])
        return Texts(self.blob, self.starts, cuts), Texts(self.blob, after, self.ends), both


class Keys:
    """Numbers of 64 bits by which texts are found, from tables that cannot be predicted.

    A text's bytes choose numbers from a table, one for each position, which are added without
    carry (tabulation hashing: Zobrist 1970; Carter and Wegman 1979). So no file can choose texts
    with the same keys. What is after the table's last position is hashed with a key (BLAKE2).
    """

    def __init__(self) -> None:
        """Draw a table: keys of another one are not the same."""
        self._table = array("Q", secrets.token_bytes(8 * _POSITIONS * _BYTES))
        self._secret = secrets.token_bytes(16)

    def of(self, text: bytes) -> int:
        """Return a text's key, with a sign."""
        table, key = self._table, 0
        for position, value in enumerate(text[:_POSITIONS]):
            key ^= table[position * _BYTES + value]
        if len(text) > _POSITIONS:
            key ^= self._of_rest(text)
        return key - (1 << 64) if key >> 63 else key

    def of_all(self, texts: Texts) -> NDArray[np.int64]:
        """Return the keys of many: the same numbers, position by position for all at once."""
        table = np.frombuffer(self._table, np.uint64).reshape(_POSITIONS, _BYTES)
        order = np.argsort(-texts.lengths, kind="stable")  # so that those that go on come first
        shortness, starts = -texts.lengths[order], texts.starts[order]
        keys = np.zeros(len(texts), np.uint64)
        longest = -int(shortness[0]) if len(texts) else 0
        for position in range(min(longest, _POSITIONS)):
            count = np.searchsorted(shortness, -position)
            keys[:count] ^= table[position][texts.blob[starts[:count] + position]]
        for place in range(np.searchsorted(shortness, -_POSITIONS)):
            text = texts.blob[starts[place] : starts[place] - shortness[place]].tobytes()
            keys[place] ^= np.uint64(self._of_rest(text))
        by_text = np.empty_like(keys)
        by_text[order] = keys
        return by_text.view(np.int64)

    def _of_rest(self, text: bytes) -> int:
        rest = blake2b(text[_POSITIONS:], digest_size=8, key=self._secret)
        return int.from_bytes(rest.digest(), "little")
