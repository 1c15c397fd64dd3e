"""The fewest tokens that words can become, known before they are encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.tokenize.alphabets import byte_level_characters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.tokenize.vocabulary import Vocabulary

SHORT_TEXT: Final = 1 << 16  # characters that are encoded to the end, so that errors say how many
_LONG_WORD: Final = 1 << 14  # characters; looking through the vocabulary then takes less time


class TooManyTokensError(Exception):
    """A text has more tokens than its reader wants: `num_tokens` of them, or still more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"At least {num_tokens} tokens.")
        self.num_tokens = num_tokens


class Fewest:
    """Tells how few tokens words can be, where no character of theirs can get lost."""

    def __init__(self, vocabulary: Vocabulary, *, byte_level: bool) -> None:
        """`byte_level` vocabularies spell each byte of a word as one character."""
        self._vocabulary = vocabulary
        self._byte_level = byte_level

    def of_each(self, words: Iterable[str]) -> dict[str, int]:
        """Return the least of each word that surely becomes more than one token.

        No token is longer than the longest that is written with the word's own characters.
        """
        return {word: self._of(word) for word in words if len(word) >= _LONG_WORD}

    def _of(self, word: str) -> int:
        raw = word.encode() if self._byte_level else b""
        used = byte_level_characters(set(raw)) if self._byte_level else "".join(set(word))
        length = len(raw) if self._byte_level else len(word)
        return -(-length // max(self._vocabulary.longest_of(used), 1))
