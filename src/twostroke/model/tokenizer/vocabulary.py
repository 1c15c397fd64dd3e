"""A vocabulary's texts in one block of memory, and the lookup of a text's token id."""

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
    """The texts of a tokenizer's tokens, in UTF-8, with fast lookup of a text's token id.

    Token ids are 0, 1, 2 and so on. A quarter of a million Python strings and a dictionary of them
    take some 35 MB; this class takes about 7 MB. Texts are found by their hashes in a sorted array,
    and are then compared.
    """

    def __init__(
        self,
        texts: Iterable[str],
        hidden: Collection[int] = (),
        changed: Mapping[int, str] | None = None,
    ) -> None:
        """Store the texts of a vocabulary's tokens, in the order of their ids.

        `find` never returns the ids in `hidden`, although they have a text. `changed` maps ids to a
        text that replaces the text in `texts`. Raises ModelFormatError for more text than can be
        addressed.
        """
        self._blob, starts, ends = _text_spans(texts)
        if len(self._blob) >= 1 << 32:
            raise ModelFormatError("The tokenizer's texts take more than 4 GiB.")
        self._starts = array("I", starts.astype(np.uint32).tobytes())
        self._ends = array("I", ends.astype(np.uint32).tobytes())
        self._changed_texts = {id_: text.encode() for id_, text in (changed or {}).items()}
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        keys = np.array([hash(self._blob[start:end]) for start, end in spans], np.int64)
        for id_, text in self._changed_texts.items():
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
        """Return the id of the token with this text in UTF-8; None if there is none.

        If several tokens have the text, the last id is returned.
        """
        keys, key = self._sorted_keys, hash(text)
        index = bisect_left(keys, key)
        token_id = None
        while index < len(keys) and keys[index] == key:
            id_ = self._ids[index]
            if (token_id is None or id_ > token_id) and self.spelling(id_) == text:
                token_id = id_
            index += 1
        return token_id

    def spelling(self, token_id: int) -> bytes:
        """Return the UTF-8 of a token's text; empty for an id outside of the vocabulary."""
        if not 0 <= token_id < len(self._starts):
            return b""
        if self._changed_texts and token_id in self._changed_texts:
            return self._changed_texts[token_id]
        return self._blob[self._starts[token_id] : self._ends[token_id]]

    def text(self, token_id: int) -> str | None:
        """Return a token's text; None for an id outside of the vocabulary."""
        spelling = self.spelling(token_id)
        return spelling.decode("utf-8", "surrogateescape") if spelling else None

    def max_length(self, chars: str) -> int:
        """Return the length in characters of the longest token whose bytes all occur in `chars`.

        `Merges.min_tokens` uses it as a bound.
        """
        used = chars.encode("utf-8", "surrogateescape")
        blob = np.frombuffer(self._blob, np.uint8)
        starts, ends = np.asarray(self._starts), np.asarray(self._ends)
        marks = ~np.isin(blob, [*used]), blob & 0xC0 != 0x80
        sums = (np.cumsum(np.append(False, mark), dtype=np.uint32) for mark in marks)
        num_others, lengths = (total[ends] - total[starts] for total in sums)
        num_others[[*self._changed_texts]] = 1
        changed = (text for text in self._changed_texts.values() if not {*text}.difference(used))
        longest = int(lengths.max(where=num_others == 0, initial=0))
        return max(longest, *(len(text.decode()) for text in changed), 0)

    def characters_before(self, char: str) -> str:
        """Return the characters that directly precede `char` in some token, without `char` itself.

        `cut_before_spaces` does not cut text after these characters, since a token may span the
        cut.
        """
        encoded = char.encode()
        matches = re.finditer(re.escape(encoded), self._blob)
        offsets = np.fromiter((match.start() for match in matches), np.int64)
        inner = offsets[~np.isin(offsets, self._starts) & ~np.isin(offsets - len(encoded), offsets)]
        ends = (self._blob[max(offset - 4, 0) : offset] for offset in inner.tolist())
        return "".join(sorted({end.decode("utf-8", "ignore")[-1:] for end in ends}))


def _text_spans(texts: Iterable[str]) -> Spans:
    """Return all texts as one block of bytes, and the offsets where each text begins and ends.

    If `texts` is an array of a GGUF file, its bytes are used without decoding them.
    """
    get_spans: Callable[[], Spans] | None = getattr(texts, "spans", None)
    if get_spans is not None:
        return get_spans()
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    ends = np.cumsum(lengths)
    return b"".join(encoded), ends - lengths, ends
