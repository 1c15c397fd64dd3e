"""Many texts in one piece of memory, and the way from a text to its number."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    Spans = tuple[bytes, NDArray[np.int64], NDArray[np.int64]]


class Vocabulary:
    """The texts of the token ids 0, 1, 2 and so on, in UTF-8, and `find` for the way back.

    A quarter of a million Python strings and a dictionary over them take some 35 MB; this takes
    about 7. Texts are found by their hashes in a sorted array, then compared.
    """

    def __init__(
        self,
        texts: Iterable[str],
        hidden: Collection[int] = (),
        changed: Mapping[int, str] | None = None,
    ) -> None:
        """`hidden` ids have a text but are never found by it; `changed` ones have another text.

        Raises ModelFormatError for more text than can be addressed.
        """
        self._blob, starts, ends = _spans_of(texts)
        if len(self._blob) >= 1 << 32:
            raise ModelFormatError("The tokenizer's texts take more than 4 GiB.")
        self._starts = array("I", starts.astype(np.uint32).tobytes())
        self._ends = array("I", ends.astype(np.uint32).tobytes())
        self._changed = {id_: text.encode() for id_, text in (changed or {}).items()}
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        keys = np.array([hash(self._blob[start:end]) for start, end in spans], np.int64)
        for id_, text in self._changed.items():
            keys[id_] = hash(text)
        ids = np.arange(len(keys), dtype=np.uint32)
        if hidden:
            ids = np.delete(ids, [*hidden])
        order = ids[np.argsort(keys[ids])]
        self._sorted_keys = array("q", keys[order].tobytes())
        self._ids = array("I", order.tobytes())

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, text: bytes) -> int | None:
        """Return the last id whose text is `text` in UTF-8, or None."""
        keys, key = self._sorted_keys, hash(text)
        place = bisect_left(keys, key)
        found = None
        while place < len(keys) and keys[place] == key:
            id_ = self._ids[place]
            if (found is None or id_ > found) and self.spelling(id_) == text:
                found = id_
            place += 1
        return found

    def spelling(self, token_id: int) -> bytes:
        """Return the UTF-8 of a token's text; empty for an id that the vocabulary lacks."""
        if not 0 <= token_id < len(self._starts):
            return b""
        if self._changed and token_id in self._changed:
            return self._changed[token_id]
        return self._blob[self._starts[token_id] : self._ends[token_id]]

    def text(self, token_id: int) -> str | None:
        """Return a token's text, or None for an id that the vocabulary lacks."""
        spelling = self.spelling(token_id)
        return spelling.decode("utf-8", "surrogateescape") if spelling else None

    def max_length(self, chars: str) -> int:
        """Return the characters of the longest text whose bytes are all in `chars`."""
        used = chars.encode("utf-8", "surrogateescape")
        blob = np.frombuffer(self._blob, np.uint8)
        starts, ends = np.asarray(self._starts), np.asarray(self._ends)
        marks = ~np.isin(blob, [*used]), blob & 0xC0 != 0x80
        sums = (np.cumsum(np.append(False, mark), dtype=np.uint32) for mark in marks)
        num_others, lengths = (total[ends] - total[starts] for total in sums)
        num_others[[*self._changed]] = 1
        changed = (text for text in self._changed.values() if not {*text}.difference(used))
        longest = int(lengths.max(where=num_others == 0, initial=0))
        return max(longest, *(len(text.decode()) for text in changed), 0)

    def before(self, char: str) -> str:
        """Return the characters that come before `char` inside some token, except `char`."""
        sign = char.encode()
        matches = re.finditer(re.escape(sign), self._blob)
        places = np.fromiter((match.start() for match in matches), np.int64)
        inner = places[~np.isin(places, self._starts) & ~np.isin(places - len(sign), places)]
        ends = (self._blob[max(place - 4, 0) : place] for place in inner.tolist())
        return "".join(sorted({end.decode("utf-8", "ignore")[-1:] for end in ends}))


def _spans_of(texts: Iterable[str]) -> Spans:
    """Return bytes, and where in them each text begins and ends.

    Arrays of a file that offer their bytes are not decoded.
    """
    offered: Callable[[], Spans] | None = getattr(texts, "spans", None)
    if offered is not None:
        return offered()
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    ends = np.cumsum(lengths)
    return b"".join(encoded), ends - lengths, ends
