"""Find added tokens (control and user-defined) in a text, leftmost and longest first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched as a whole in the text instead of being merged from bytes.

    `special` (a control token such as an end of turn) is found only where the caller vouches for
    the text; the others are found everywhere. `lstrip` and `rstrip` swallow the white space on
    that side, `single_word` asks for no letter, digit or underscore on either side
    (tokenizer.json, `added_tokens`).
    """

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Splitter:
    """Cuts a text at added tokens; the time is linear in the text for tokens of bounded length."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        starts = sorted(lengths, key=len, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, starts))) if starts else None

    def split(self, text: str) -> Iterator[str | AddedToken]:
        """Yield plain stretches of `text` as strings and the tokens between them, in order."""
        done = 0
        for start, end, token in self._matches(text):
            left, right = start, end
            if token.lstrip:
                left = done + len(text[done:start].rstrip())
            if token.rstrip:
                right = len(text) - len(text[end:].lstrip())
            if left > done:
                yield text[done:left]
            yield token
            done = right
        if done < len(text):
            yield text[done:]

    def _matches(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        if self._starts is None:
            return
        position = 0
        while (hit := self._starts.search(text, position)) is not None:
            start = hit.start()
            token = self._token_at(text, start)
            if token is None:
                position = start + 1
                continue
            position = start + len(token.text)
            yield start, position, token

    def _token_at(self, text: str, start: int) -> AddedToken | None:
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                token = self._by_text.get(text[start : start + length])
                if token is not None and (not token.single_word or _alone(text, start, length)):
                    return token
        return None


def _alone(text: str, start: int, length: int) -> bool:
    around = text[max(start - 1, 0) : start] + text[start + length : start + length + 1]
    return not any(char.isalnum() or char == "_" for char in around)
