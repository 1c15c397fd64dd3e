"""A vocabulary as one piece of memory: every token's text, and the way from a text to its id."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.tokenize.texts import Keys, Texts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray


class Vocabulary:
    """The texts of the token ids 0, 1, 2 and so on, in UTF-8, and `find` for the way back.

    A quarter of a million Python strings and a dictionary over them take some 35 MB; this takes
    about 7. Texts are found by keys that no file can make collide (`Keys`). Of several ids with one
    text the last is found.
    """

    def __init__(
        self,
        texts: Iterable[str],
        hidden: Collection[int] = (),
        changed: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`hidden` ids have a text but are never found by it; `changed` ones have another text.

        Raises ModelFormatError for more text than can be addressed.
        """
        spelled = {id_: text.encode() for id_, text in changed.items()}
        packed = Texts.of(texts).replaced(spelled).packed()
        if len(packed.blob) >= 1 << 32:
            raise ModelFormatError("The tokenizer's texts take more than 4 GiB.")
        self._blob = packed.blob.tobytes()
        self._starts = array("I", bytes(4))
        self._starts.frombytes(packed.ends.astype(np.uint32).tobytes())
        ids = np.arange(len(packed), dtype=np.uint32)
        if hidden:
            ids = np.delete(ids, np.fromiter(hidden, np.int64, len(hidden)))
        self._keys = Keys()
        keys = self._keys.of_all(packed)
        order = ids[np.argsort(keys[ids], kind="stable")]
        self._sorted_keys = array("q", keys[order].tobytes())
        self._ids = array("I", order.tobytes())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def find(self, text: bytes) -> int | None:
        """Return the id of the token whose UTF-8 is `text`, or None."""
        every, key = self._sorted_keys, self._keys.of(text)
        place = bisect_left(every, key)
        found = None
        while place < len(every) and every[place] == key:
            id_ = self._ids[place]
            if self._blob[self._starts[id_] : self._starts[id_ + 1]] == text:
                found = id_
            place += 1
        return found

    def find_all(self, texts: Texts) -> NDArray[np.int64]:
        """Return the ids of many texts at once, -1 for those that are no tokens.

        Here a text is taken for the token that has its key and its length.
        """
        known = np.frombuffer(self._sorted_keys, np.int64)
        if not len(known):
            return np.full(len(texts), -1)
        keys = self._keys.of_all(texts)
        places = np.searchsorted(known, keys, side="right") - 1
        ids = np.frombuffer(self._ids, np.uint32)[places].astype(np.int64)
        same = np.diff(np.frombuffer(self._starts, np.uint32))[ids] == texts.lengths
        return np.where((known[places] == keys) & same, ids, -1)

    def spelling(self, token_id: int) -> bytes:
        """Return the UTF-8 of a token's text; empty for an id that the vocabulary lacks."""
        if not 0 <= token_id < len(self):
            return b""
        return self._blob[self._starts[token_id] : self._starts[token_id + 1]]

    def text(self, token_id: int) -> str | None:
        """Return a token's text, or None for an id that the vocabulary lacks."""
        spelling = self.spelling(token_id)
        return spelling.decode("utf-8", "surrogateescape") if spelling else None

    def longest_of(self, chars: str) -> int:
        """Return the characters of the longest token that is written with nothing but `chars`.

        Bytes are spelled as characters here, so it may be a token that also has others.
        """
        blob, starts = np.frombuffer(self._blob, np.uint8), np.frombuffer(self._starts, np.uint32)
        known = np.zeros(256, bool)
        known[list(chars.encode())] = True
        starts = starts[:-1][np.diff(starts) > 0]  # without tokens that have no text
        if not len(starts):
            return 0
        is_known = np.logical_and.reduceat(known[blob], starts)
        lengths = np.add.reduceat(blob & 0xC0 != 0x80, starts, dtype=np.int64)
        return int(lengths.max(where=is_known, initial=0))

    def before(self, char: str) -> str:
        """Return the characters that come before `char` inside some token, `char` apart."""
        sign = char.encode()
        matches = re.finditer(re.escape(sign), self._blob)
        places = np.fromiter((match.start() for match in matches), np.int64)
        starts = np.frombuffer(self._starts, np.uint32)
        inner = places[~np.isin(places, starts) & ~np.isin(places - len(sign), places)]
        ends = (self._blob[max(place - 4, 0) : place] for place in inner.tolist())
        return "".join(sorted({end.decode("utf-8", "ignore")[-1:] for end in ends}))
