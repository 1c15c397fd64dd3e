"""Keeps an answer from beginning with texts that were rejected before, by masking tokens.

A grammar cannot say "anything but this prefix" about the middle of an answer, but a mask can. An
excluded text is, for example, an answer up to a value that broke its JSON schema. While the answer
so far is a prefix of an excluded text, two kinds of tokens are cleared: tokens that complete the
excluded text, and tokens after which the answer could only continue to it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from twostroke.core.constraint import ExcludedPrefix
    from twostroke.model.tokenizer import Tokenizer

_MAX_LOOKAHEAD: Final = 256  # texts that a step looks at


class TokenTexts:
    """The bytes of each token in a vocabulary, and searches for tokens by their bytes."""

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
        """Return the bytes that a token stands for; empty for a special token."""
        return self._texts[token] if token < len(self._texts) else b""

    def tokens_starting_with(self, text: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes begin with a text or are equal to it."""
        index = bisect_left(self._sorted, (text, -1))
        while index < len(self._sorted) and self._sorted[index][0].startswith(text):
            yield self._sorted[index][1]
            index += 1

    def tokens_equal_to(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that stand for exactly these bytes."""
        index = bisect_left(self._sorted, (text, -1))
        while index < len(self._sorted) and self._sorted[index][0] == text:
            yield self._sorted[index][1]
            index += 1

    def proper_prefixes_of(self, text: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes begin a text without being the whole text."""
        for length in range(1, min(len(text), self.longest + 1)):
            yield from self.tokens_equal_to(text[:length])


class _RemainingText(NamedTuple):
    """The rest of an excluded text: the bytes that the answer still lacks to be the whole text.

    `text` is this rest. Empty `text` means that the answer has become the excluded text.
    `num_before` is the number of bytes before the wrong value; it is negative if the answer is
    inside this value already. With `is_whole`, only an answer that is equal to the text is
    excluded, not each answer that begins with it.
    """

    text: bytes
    num_before: int
    is_whole: bool


class Exclusions:
    """The texts that one answer must not begin with, and how much of each the answer has already.

    When an answer breaks its JSON schema, it is generated again, and the broken beginning is
    excluded. The grammar's matcher uses this class to remove tokens from its masks. An excluded
    text is dropped once the answer differs from it.
    """

    def __init__(
        self, rests: Sequence[_RemainingText], texts: TokenTexts, ends: Collection[int]
    ) -> None:
        self._rests = rests
        self._texts = texts
        self._ends = ends

    @classmethod
    def of(
        cls, excluded: Iterable[ExcludedPrefix], texts: TokenTexts, ends: Collection[int]
    ) -> Exclusions:
        """Return the exclusions of a new answer, which has no tokens yet.

        `excluded` are the texts, `texts` the bytes of the vocabulary's tokens, and `ends` the
        model's end tokens.
        """
        rests = [
            _RemainingText(value.text.encode(), value.start, value.is_whole) for value in excluded
        ]
        return cls(rests, texts, ends)

    def after(self, tokens: Iterable[int]) -> Exclusions:
        """Return the exclusions that remain after the answer has grown by some tokens."""
        rests = self._rests
        for token in tokens:
            if not rests:
                return self
            text = self._texts.text(token)
            rests = [
                _RemainingText(rest.text[len(text) :], rest.num_before - len(text), rest.is_whole)
                for rest in rests
                if rest.text.startswith(text)
            ]
        return Exclusions(rests, self._texts, self._ends)

    def clear(self, matcher: LLMatcher, row: NDArray[np.uint32]) -> None:
        """Remove the tokens from a mask that would make the answer begin with an excluded text.

        These are tokens that complete an excluded text, and tokens after which the grammar allows
        nothing but excluded texts. `row` is the mask, one bit for each token of the vocabulary.
        """
        self._clear_complete(row)
        dead_ends: set[bytes] = set()
        for token in self._partial_tokens(row, is_near=True):
            if not self._has_alternative(matcher, token, len(row), dead_ends):
                row[token // 32] &= ~np.uint32(1 << (token % 32))

    def _clear_complete(self, row: NDArray[np.uint32]) -> None:
        for rest in self._rests:
            tokens: Iterable[int] = ()
            if not rest.text:
                tokens = self._ends if rest.is_whole else ()
            elif not rest.is_whole:
                tokens = self._texts.tokens_starting_with(rest.text)
            for token in tokens:
                row[token // 32] &= ~np.uint32(1 << (token % 32))

    def _partial_tokens(self, row: NDArray[np.uint32], *, is_near: bool = False) -> dict[int, None]:
        """Return the allowed tokens after which the answer is still a prefix of an excluded text.

        Tokens that complete the text are not included. `row` is the mask of allowed tokens. With
        `is_near`, texts are skipped if no next token can reach their wrong value.
        """
        tokens: dict[int, None] = {}
        for rest in self._rests:
            is_far = is_near and rest.num_before > self._texts.longest
            if rest.text and not is_far:
                tokens |= dict.fromkeys(self._texts.proper_prefixes_of(rest.text))
                if rest.is_whole:
                    tokens |= dict.fromkeys(self._texts.tokens_equal_to(rest.text))
        return {token: None for token in tokens if row[token // 32] >> (token % 32) & 1}

    def _has_alternative(
        self, matcher: LLMatcher, token: int, num_words: int, dead_ends: set[bytes]
    ) -> bool:
        """Return whether the answer can avoid all excluded texts after a token.

        `matcher` is the grammar's state before the token, `num_words` the size of a mask in 32-bit
        words. Searches the continuations that the grammar allows, and returns True if the search
        reaches its limit. Many sequences of tokens spell the same text, so each text is examined
        only once. `dead_ends` are texts after which only excluded texts can follow; the method adds
        the dead ends that it finds.
        """
        seen = set(dead_ends)
        waiting = [(self, matcher, b"", token)]
        while waiting:
            exclusions, matcher, text, token = waiting.pop()
            text += self._texts.text(token)
            if text in seen:
                continue
            seen.add(text)
            exclusions, matcher = exclusions.after([token]), _copy_after(matcher, token)
            if not exclusions or len(seen) > _MAX_LOOKAHEAD:
                return True
            row = np.zeros(num_words, np.uint32)
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            partial_tokens = exclusions.take_partial_tokens(row)
            if row.any():
                return True
            waiting += [(exclusions, matcher, text, token) for token in partial_tokens]
        dead_ends |= seen
        return False

    def take_partial_tokens(self, row: NDArray[np.uint32]) -> list[int]:
        """Remove all tokens from a mask that complete, or may lead to, an excluded text.

        Returns the tokens that may lead to an excluded text. `_has_alternative` then examines these
        tokens one by one.
        """
        self._clear_complete(row)
        tokens = [*self._partial_tokens(row)]
        for token in tokens:
            row[token // 32] &= ~np.uint32(1 << (token % 32))
        return tokens

    def __bool__(self) -> bool:
        """Whether any excluded text can still be reached by the answer."""
        return bool(self._rests)


def _copy_after(matcher: LLMatcher, token: int) -> LLMatcher:
    """Return a copy of llguidance's matcher that has consumed one more token."""
    copy = matcher.deep_copy()
    copy.consume_token(token)
    return copy
