"""Translates tokens of one vocabulary into tokens of another with the same text."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.model.tokenizer.tokenizer import Tokenizer

_CONTINUES, _BEGINS = 0x80, 0xC0  # first bytes of the rest of a character, and of others


@dataclass(slots=True)
class TranslatedTokens:
    """Translated tokens; `ends[i]` is the byte of the text at which `tokens[i]` ends.

    `is_whole` is false if the text ends inside a character, whose beginning is not translated yet.
    """

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_whole: bool = True


class Translation:
    """Translates tokens of `source` into tokens of `target`.

    Text is encoded by the target's tokenizer. A control token becomes the one with the same text;
    without one, an end token becomes the target's first end token, and others are left out.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        """Pair the control tokens of both."""
        self.source = source
        self.target = target
        names = {target.token_text(token): token for token in target.special_ids}
        end = min(target.eos_ids, default=None)
        self._special = {
            token: names.get(source.token_text(token), end if token in source.eos_ids else None)
            for token in source.special_ids
        }

    def say(self, ids: Iterable[int]) -> TranslatedTokens:
        """Return the same text in the target's tokens, up to its last whole character."""
        said, text, at = TranslatedTokens(), bytearray(), 0
        for token in ids:
            data = self.source.token_bytes(token)
            if token not in self._special:
                text += data
                continue
            at = self._add_text(said, text, at) + len(data)
            text.clear()
            if (namesake := self._special[token]) is not None:
                said.tokens.append(namesake)
                said.ends.append(at)
        self._add_text(said, text, at)
        return said

    def ends(self, ids: Iterable[int]) -> list[int]:
        """Return for each of the source's tokens the byte of the text at which it ends."""
        return list(accumulate(len(self.source.token_bytes(token)) for token in ids))

    def breaks(self, ids: Sequence[int]) -> dict[int, int]:
        """Map bytes at which a character begins to the number of source tokens before them."""
        found, end = {}, 0
        for count, token in enumerate(ids):
            data = self.source.token_bytes(token)
            if data and not _CONTINUES <= data[0] < _BEGINS:
                found[end] = count
            end += len(data)
        found[end] = len(ids)
        return found

    def is_able(self) -> bool:
        """Whether ordinary text stays the same."""
        said = self._encode(string.printable)
        return b"".join(map(self.target.token_bytes, said)) == string.printable.encode()

    def _add_text(self, said: TranslatedTokens, text: bytearray, start: int) -> int:
        """Add the tokens of a text that begins at byte `start`; return where it ends.

        Bytes that are not UTF-8 are left out.
        """
        rest, at = bytes(text), start
        said.is_whole = True
        while rest:
            try:
                rest.decode()
                size, skipped = len(rest), 0
            except UnicodeDecodeError as error:
                size, skipped = error.start, error.end - error.start
                said.is_whole = error.end < len(rest) or "unexpected end" not in error.reason
            self._add_tokens(said, rest[:size], at)
            rest, at = rest[size + skipped :], at + size + skipped
        return start + len(text)

    def _add_tokens(self, said: TranslatedTokens, text: bytes, start: int) -> None:
        """Add the tokens of a text of whole characters.

        Where a tokenizer changes the text, later tokens get the end of the whole text.
        """
        at = 0
        for token in self._encode(text.decode()):
            data = self.target.token_bytes(token)
            at = at + len(data) if text.startswith(data, at) else len(text)
            said.tokens.append(token)
            said.ends.append(start + at)

    def _encode(self, text: str) -> Sequence[int]:
        return self.target.encode(text) if text else ()
