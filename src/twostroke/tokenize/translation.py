"""A text in the tokens of one vocabulary, said in those of another one."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.tokenize.tokenizer import Tokenizer

_CONTINUES, _BEGINS = 0x80, 0xC0  # first bytes of the rest of a character, and of others


@dataclass(slots=True)
class Said:
    """Tokens, and how far each gets: `ends[i]` bytes of the text, `tokens[i]` included.

    The text `is_whole` unless it ends with the beginning of a character, which is not said yet.
    """

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_whole: bool = True


class Translation:
    """Says in tokens of `target` what tokens of `source` say.

    Text is tokenized as the target's own tokenizer does it. Control tokens become those with the
    same text; any end of a text that has no namesake is the target's first. A control token that
    the target does not have is left out.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        """Look at the control tokens."""
        self.source = source
        self.target = target
        names = {target.token_text(token): token for token in target.special_ids}
        end = min(target.eos_ids, default=None)
        self._special = {
            token: names.get(source.token_text(token), end if token in source.eos_ids else None)
            for token in source.special_ids
        }

    def say(self, ids: Iterable[int]) -> Said:
        """Return the same text in the target's tokens; half a character at its end waits."""
        said, text, at = Said(), bytearray(), 0
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
        """Return how many bytes of the text the source's tokens make, each with those before."""
        return list(accumulate(len(self.source.token_bytes(token)) for token in ids))

    def breaks(self, ids: Sequence[int]) -> dict[int, int]:
        """Return how many of the source's tokens make how many bytes of whole characters."""
        found, end = {}, 0
        for count, token in enumerate(ids):
            data = self.source.token_bytes(token)
            if data and not _CONTINUES <= data[0] < _BEGINS:
                found[end] = count
            end += len(data)
        found[end] = len(ids)
        return found

    def is_able(self) -> bool:
        """Whether ordinary text comes through whole."""
        said = self._encode(string.printable)
        return b"".join(map(self.target.token_bytes, said)) == string.printable.encode()

    def _add_text(self, said: Said, text: bytearray, start: int) -> int:
        """Add the tokens of a text that begins at byte `start`; return where it ends.

        Bytes that are no UTF-8 are left out.
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

    def _add_tokens(self, said: Said, text: bytes, start: int) -> None:
        """Add the tokens of a text of whole characters.

        Some tokenizers spell it otherwise: from there on only the end is known.
        """
        at = 0
        for token in self._encode(text.decode()):
            data = self.target.token_bytes(token)
            at = at + len(data) if text.startswith(data, at) else len(text)
            said.tokens.append(token)
            said.ends.append(start + at)

    def _encode(self, text: str) -> Sequence[int]:
        return self.target.encode(text) if text else ()
