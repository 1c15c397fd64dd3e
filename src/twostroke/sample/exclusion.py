"""Excluded texts: an answer that failed its check is drawn again without its wrong value.

A grammar cannot say "anything but this beginning" about the middle of an answer. A mask can: while
an answer is the beginning of an excluded text, the tokens that would complete the text are cleared,
and so are tokens after which nothing else could be written.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from twostroke.core.constraint import Excluded
    from twostroke.tokenize import Tokenizer

_MAX_DEPTH: Final = 32  # tokens that are looked ahead


class TokenTexts:
    """The bytes of a vocabulary's tokens, and the tokens that begin with some bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special_ids = frozenset(tokenizer.special_ids)
        self._texts = [
            b"" if token in special_ids else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        order = sorted(range(len(self._texts)), key=self._texts.__getitem__)
        self._sorted = [(self._texts[token], token) for token in order if self._texts[token]]
        self.longest = max(map(len, self._texts))

    def text(self, token: int) -> bytes:
        """Return a token's bytes; none of a special token."""
        return self._texts[token] if token < len(self._texts) else b""

    def beginning_with(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that begin with a text, itself included."""
        index = bisect_left(self._sorted, (text, -1))
        while index < len(self._sorted) and self._sorted[index][0].startswith(text):
            yield self._sorted[index][1]
            index += 1

    def equal(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that are a text."""
        index = bisect_left(self._sorted, (text, -1))
        while index < len(self._sorted) and self._sorted[index][0] == text:
            yield self._sorted[index][1]
            index += 1

    def beginning(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that a text begins with and goes beyond."""
        for length in range(1, min(len(text), self.longest + 1)):
            yield from self.equal(text[:length])


class _Rest(NamedTuple):
    """The bytes that would complete an excluded text, and how many of them precede the value."""

    text: bytes
    num_before: int
    is_whole: bool


class Exclusions:
    """The excluded texts that the answer so far begins."""

    def __init__(self, rests: Sequence[_Rest], texts: TokenTexts, ends: Collection[int]) -> None:
        self._rests = rests
        self._texts = texts
        self._ends = ends

    @classmethod
    def of(
        cls, excluded: Iterable[Excluded], texts: TokenTexts, ends: Collection[int]
    ) -> Exclusions:
        """Return the exclusions of an answer that has not begun."""
        rests = [_Rest(value.text.encode(), value.start, value.is_whole) for value in excluded]
        return cls(rests, texts, ends)

    def after(self, tokens: Iterable[int]) -> Exclusions:
        """Return the exclusions that are left after more tokens."""
        rests = self._rests
        for token in tokens:
            if not rests:
                return self
            text = self._texts.text(token)
            rests = [
                _Rest(rest.text[len(text) :], rest.num_before - len(text), rest.is_whole)
                for rest in rests
                if rest.text.startswith(text)
            ]
        return Exclusions(rests, self._texts, self._ends)

    def clear(self, matcher: LLMatcher, row: NDArray[np.uint32]) -> None:
        """Clear the tokens in a mask that would complete a text, or could only go on to it."""
        self._clear_complete(row)
        for token in self._beginning(row, is_near=True):
            if not self.after([token]).has_other(_copy_after(matcher, token), len(row), 0):
                row[token // 32] &= ~np.uint32(1 << (token % 32))

    def _clear_complete(self, row: NDArray[np.uint32]) -> None:
        for rest in self._rests:
            tokens: Iterable[int] = ()
            if not rest.text:
                tokens = self._ends if rest.is_whole else ()
            elif not rest.is_whole:
                tokens = self._texts.beginning_with(rest.text)
            for token in tokens:
                row[token // 32] &= ~np.uint32(1 << (token % 32))

    def _beginning(self, row: NDArray[np.uint32], *, is_near: bool = False) -> dict[int, None]:
        """Return the allowed tokens that go on to an excluded text; `is_near` only into a value."""
        tokens: dict[int, None] = {}
        for rest in self._rests:
            is_far = is_near and rest.num_before > self._texts.longest
            if rest.text and not is_far:
                tokens |= dict.fromkeys(self._texts.beginning(rest.text))
                if rest.is_whole:
                    tokens |= dict.fromkeys(self._texts.equal(rest.text))
        return {token: None for token in tokens if row[token // 32] >> (token % 32) & 1}

    def has_other(self, matcher: LLMatcher, num_words: int, depth: int) -> bool:
        """Return whether anything but the excluded texts can follow."""
        if not self._rests or depth > _MAX_DEPTH:
            return True
        row = np.zeros(num_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._clear_complete(row)
        tokens = self._beginning(row)
        for token in tokens:
            row[token // 32] &= ~np.uint32(1 << (token % 32))
        if row.any():
            return True
        return any(
            self.after([token]).has_other(_copy_after(matcher, token), num_words, depth + 1)
            for token in tokens
        )

    def __bool__(self) -> bool:
        """Whether any text can still be completed."""
        return bool(self._rests)


def _copy_after(matcher: LLMatcher, token: int) -> LLMatcher:
    """Return a copy of a matcher that has taken in a token."""
    copy = matcher.deep_copy()
    copy.consume_token(token)
    return copy
