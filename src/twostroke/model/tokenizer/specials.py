"""Finds added tokens (control and user-defined) in a text, leftmost and longest first."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

import regex

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Unicode's white space; Python's `str.strip` would also remove U+001C to U+001F.
WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_SPACES = re.compile(f"[{re.escape(WHITE_SPACE)}]*")
# A letter, mark, digit or joining sign (Unicode TR 18, annex C).
_WORD_CHARACTER = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200c\u200d]")


class AddedToken(Frozen):
    """A token that is recognized as a whole in the text instead of being merged from bytes.

    A `special` token (a control token such as an end of turn) is recognized only in text that the
    caller trusts; other tokens are recognized everywhere. With `lstrip` or `rstrip` the token
    includes the white space on that side. With `single_word`, it is recognized only if no letter,
    digit or underscore is on either side. With `normalized`, the normalized token text is searched
    in the normalized text (tokenizer.json, `added_tokens`).
    """

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class AddedTokenSplitter:
    """Cuts a text at added tokens, in time that grows linearly with the text.

    It finds the same tokens as Hugging Face's `tokenizers`. A match is rejected if the token must
    be a single word and is not, or if it is special and the text is not trusted. Even a rejected
    match hides other matches that begin inside it.
    """

    def __init__(self, tokens: Iterable[AddedToken], normalize: Callable[[str], str] = str) -> None:
        """Prepare to find added tokens in texts.

        `normalize` is applied to the texts of tokens with the flag `normalized`. If several tokens
        have equal texts, a special token among them is used, else the first token.
        """
        self._tokens = sorted(tokens, key=lambda token: not token.special)
        self._normalize = normalize

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | AddedToken]:
        """Yield the plain segments of a text as strings, and the added tokens between, in order."""
        end_of_last = 0
        matches = self._matches(text) if self._can_find(parse_special=parse_special) else iter(())
        for start, end, token in matches:
            if token.special and not parse_special:
                continue
            if token.single_word and not _is_single_word(text, start, end):
                continue
            left, right = start, end
            if token.lstrip:
                left = end_of_last + len(text[end_of_last:start].rstrip(WHITE_SPACE))
                if left >= end:  # the token before it includes this white space
                    continue
            if token.rstrip and (spaces := _SPACES.match(text, end)):
                right = spaces.end()
            if left > end_of_last:
                yield text[end_of_last:left]
            yield token
            end_of_last = right
        if end_of_last < len(text):
            yield text[end_of_last:]

    def _can_find(self, *, parse_special: bool) -> bool:
        return bool(self._tokens) and (parse_special or not self._tokens[-1].special)

    def _matches(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        position = 0
        while (hit := self._index.starts.search(text, position)) is not None:
            start = hit.start()
            length = self._index.length_at(text, start)
            position = start + (length or 1)
            if length:
                yield start, position, self._index.by_text[text[start:position]]

    @cached_property
    def _index(self) -> _TokenPrefixes:
        # Built on first use: some models have thousands of control tokens.
        by_text: dict[str, AddedToken] = {}
        for token in self._tokens:
            if text := self._normalize(token.text):
                by_text.setdefault(text, token)
        return _TokenPrefixes(by_text)


class _TokenPrefixes:
    """Finds the longest added token that begins at a position of a text.

    Tokens are stored by text, and their lengths by their first two characters.
    """

    def __init__(self, by_text: dict[str, AddedToken]) -> None:
        self.by_text = by_text
        lengths: dict[str, set[int]] = {}
        for text in by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        starts = sorted(lengths, key=len, reverse=True)
        self.starts = re.compile("|".join(map(re.escape, starts)) or r"(?!)")

    def length_at(self, text: str, start: int) -> int:
        """Return the length of the longest added token that begins at `start`, or 0."""
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                if text[start : start + length] in self.by_text:
                    return length
        return 0


def _is_single_word(text: str, start: int, end: int) -> bool:
    around = text[max(start - 1, 0) : start] + text[end : end + 1]
    return _WORD_CHARACTER.search(around) is None


# Files often name only one end token, such as the end of a document, while the chat template ends
# turns with another. So these well-known texts always end a generation.
_END_TEXTS = """
    <|im_end|> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|>
    <|endofturn|> <end_of_turn> <turn|> <EOT> <｜end▁of▁sentence｜> <|calls|> <|flush|>
    <|end_of_msg|>
"""
# Where one of these exists (harmony, Solar), `<|end|>` ends a message and not the answer.
_ENDS_BESIDE_MESSAGES = frozenset(("<|return|>", "<|calls|>"))


def end_ids(named_ids: Iterable[int], added: Iterable[AddedToken]) -> frozenset[int]:
    """Return the ids of tokens that end an answer.

    They are `named_ids`, and the added tokens with well-known texts, such as `<|im_end|>`.
    """
    by_text = {token.text: token.id for token in added}
    known_texts = {text for text in _END_TEXTS.split() if text in by_text}
    if not _ENDS_BESIDE_MESSAGES.isdisjoint(known_texts):
        known_texts.discard("<|end|>")
    return frozenset(named_ids) | {by_text[text] for text in known_texts}
