"""Find added tokens (control and user-defined) in a text, leftmost and longest first."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

import regex

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# What Unicode calls white space; Python's `str.strip` alone would take U+001C to U+001F too.
WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_SPACES = re.compile(f"[{re.escape(WHITE_SPACE)}]*")
# A letter, mark, digit or joining sign (Unicode TR 18, annex C).
_OF_A_WORD = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200c\u200d]")


class AddedToken(Frozen):
    """A token that is matched as a whole in the text instead of being merged from bytes.

    `special` (a control token such as an end of turn) is found only where the caller vouches for
    the text; the others are found everywhere. `lstrip` and `rstrip` swallow the white space on
    that side, `single_word` asks for no letter, digit or underscore on either side, `normalized`
    looks for the token's text, normalized, in the normalized text (tokenizer.json,
    `added_tokens`).
    """

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class Splitter:
    """Cuts a text at added tokens; the time is linear in the text for tokens of bounded length.

    It finds the tokens that Hugging Face's `tokenizers` finds: a match that does not count (it is
    not a single word, or a special token in a text that nobody vouches for) hides the others that
    begin inside it.
    """

    def __init__(self, tokens: Iterable[AddedToken], normalize: Callable[[str], str] = str) -> None:
        """`normalize` changes the tokens' texts; of equal ones a special one wins, or the first."""
        self._tokens = sorted(tokens, key=lambda token: not token.special)
        self._normalize = normalize

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | AddedToken]:
        """Yield plain stretches of `text` as strings and the tokens between them, in order."""
        done = 0
        matches = self._matches(text) if self._can_find(parse_special=parse_special) else iter(())
        for start, end, token in matches:
            if token.special and not parse_special:
                continue
            if token.single_word and not _alone(text, start, end):
                continue
            left, right = start, end
            if token.lstrip:
                left = done + len(text[done:start].rstrip(WHITE_SPACE))
                if left >= end:  # the token before it has taken it
                    continue
            if token.rstrip and (spaces := _SPACES.match(text, end)):
                right = spaces.end()
            if left > done:
                yield text[done:left]
            yield token
            done = right
        if done < len(text):
            yield text[done:]

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
        # Made when it is first needed: some models have thousands of control tokens.
        by_text: dict[str, AddedToken] = {}
        for token in self._tokens:
            if text := self._normalize(token.text):
                by_text.setdefault(text, token)
        return _TokenPrefixes(by_text)


class _TokenPrefixes:
    """Tokens by text, and the lengths of tokens by their first two characters."""

    def __init__(self, by_text: dict[str, AddedToken]) -> None:
        self.by_text = by_text
        lengths: dict[str, set[int]] = {}
        for text in by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        starts = sorted(lengths, key=len, reverse=True)
        self.starts = re.compile("|".join(map(re.escape, starts)) or r"(?!)")

    def length_at(self, text: str, start: int) -> int:
        """Return the length of the longest token that begins there, or 0."""
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                if text[start : start + length] in self.by_text:
                    return length
        return 0


def _alone(text: str, start: int, end: int) -> bool:
    around = text[max(start - 1, 0) : start] + text[end : end + 1]
    return _OF_A_WORD.search(around) is None


# Files often name only one end, say the end of a document, while the chat template closes turns
# with another; so every engine knows these texts.
_END_TEXTS = """
    <|im_end|> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|>
    <|endofturn|> <end_of_turn> <turn|> <EOT> <｜end▁of▁sentence｜>
"""


def end_ids(named: Iterable[int], added: Iterable[AddedToken]) -> frozenset[int]:
    """Return the ids that end a generation: those in `named`, and those of well-known texts.

    Where `<|return|>` exists (the harmony format), `<|end|>` closes a message and not the answer.
    """
    by_text = {token.text: token.id for token in added}
    known = {text for text in _END_TEXTS.split() if text in by_text}
    if "<|return|>" in known:
        known.discard("<|end|>")
    return frozenset(named) | {by_text[text] for text in known}
