"""Translates tokens of one model's vocabulary to tokens of another with the same text."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.model.tokenizer.tokenizer import Tokenizer

_CONTINUATION_BYTE, _LEAD_BYTE = 0x80, 0xC0  # the lowest of each kind of byte in UTF-8


@dataclass(slots=True)
class TranslatedTokens:
    """A text in the tokens of another vocabulary; `tokens[i]` ends at byte `ends[i]` of the text.

    `is_whole` is false if the source tokens end inside a character, whose first bytes are not
    translated yet.
    """

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_whole: bool = True


class Translation:
    """Translates tokens of one model (`source`) to tokens of another (`target`) with the same text.

    With it, a draft model with another vocabulary can propose drafts. Text is encoded by the
    target's tokenizer. A control token becomes the control token with the same text. If the target
    has none, an end token becomes the target's first end token, and other control tokens are left
    out.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        """Find the control tokens of `target` that correspond to the control tokens of `source`."""
        self.source = source
        self.target = target
        names = {target.token_text(token): token for token in target.special_ids}
        end = min(target.eos_ids, default=None)
        self._special = {
            token: names.get(source.token_text(token), end if token in source.eos_ids else None)
            for token in source.special_ids
        }

    def translate(self, ids: Iterable[int]) -> TranslatedTokens:
        """Return the text of source tokens as target tokens, up to its last complete character."""
        translated = TranslatedTokens()
        text = bytearray()
        offset = 0
        for token in ids:
            data = self.source.token_bytes(token)
            if token not in self._special:
                text += data
                continue
            offset = self._add_text(translated, text, offset) + len(data)
            text.clear()
            if (target_token := self._special[token]) is not None:
                translated.tokens.append(target_token)
                translated.ends.append(offset)
        self._add_text(translated, text, offset)
        return translated

    def end_offsets(self, ids: Iterable[int]) -> list[int]:
        """Return, for each source token, the byte offset in the text at which the token ends."""
        return list(accumulate(len(self.source.token_bytes(token)) for token in ids))

    def character_starts(self, ids: Sequence[int]) -> dict[int, int]:
        """Return the byte offsets at which both a character and a source token begin.

        Each offset is mapped to the number of source tokens before it.
        """
        num_tokens_before = {}
        end = 0
        for count, token in enumerate(ids):
            data = self.source.token_bytes(token)
            if data and not _CONTINUATION_BYTE <= data[0] < _LEAD_BYTE:
                num_tokens_before[end] = count
            end += len(data)
        num_tokens_before[end] = len(ids)
        return num_tokens_before

    def preserves_text(self) -> bool:
        """Whether ordinary text is unchanged by translating its tokens."""
        tokens = self._encode(string.printable)
        return b"".join(map(self.target.token_bytes, tokens)) == string.printable.encode()

    def _add_text(self, translated: TranslatedTokens, text: bytearray, start: int) -> int:
        """Append the target tokens of a text that begins at byte `start`.

        Returns the offset at which the text ends. Bytes that are not UTF-8 are left out.
        """
        remaining = bytes(text)
        offset = start
        translated.is_whole = True
        while remaining:
            try:
                remaining.decode()
                size, skipped = len(remaining), 0
            except UnicodeDecodeError as error:
                size, skipped = error.start, error.end - error.start
                translated.is_whole = (
                    error.end < len(remaining) or "unexpected end" not in error.reason
                )
            self._add_tokens(translated, remaining[:size], offset)
            remaining, offset = remaining[size + skipped :], offset + size + skipped
        return start + len(text)

    def _add_tokens(self, translated: TranslatedTokens, text: bytes, start: int) -> None:
        """Append the target tokens of a text that consists of complete characters.

        `start` is the text's byte offset. If encoding changes the text (normalization), the tokens
        after the change all get the offset of the end of the text.
        """
        offset = 0
        for token in self._encode(text.decode()):
            data = self.target.token_bytes(token)
            offset = offset + len(data) if text.startswith(data, offset) else len(text)
            translated.tokens.append(token)
            translated.ends.append(start + offset)

    def _encode(self, text: str) -> Sequence[int]:
        return self.target.encode(text) if text else ()
