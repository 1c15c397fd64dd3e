"""Text as an older Unicode sees it: models were trained with tokenizers that know fewer characters.

The tables of `tokenizers` decide, whatever versions of Python and of `regex` are installed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal
from unicodedata import normalize

from twostroke.tokenize.unicode_ages import UNKNOWN_TO_NORMAL_FORMS, UNKNOWN_TO_PATTERNS

if TYPE_CHECKING:
    from collections.abc import Callable

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
# A noncharacter: in no class of any version, as what a pattern does not know.
_STAND_IN = "\ufdd0"
# Those that a later Unicode put into another class, each with one that is still in the old class.
_MOVED = {"\u0295": "\u0250"}
_EXPLICIT = re.compile(r"([^\x00-\x7f])-([^\x00-\x7f])")


def seen_by(pattern: str) -> Callable[[str], str]:
    """Return what makes of a text the one that `pattern` should be matched against.

    It is as long as the text, with a noncharacter for each character that is not known. One that
    lies in a range which the pattern spells out is in it all the same: the first of that range
    stands for it.
    """
    spelled_out = _EXPLICIT.findall(pattern)

    def stand_in(match: re.Match[str]) -> str:
        char = match[0]
        if char not in _MOVED and _known(UNKNOWN_TO_PATTERNS, char):
            return char
        other = _MOVED.get(char, _STAND_IN)
        return next((low for low, high in spelled_out if low <= char <= high), other)

    def seen(text: str) -> str:
        return text if text.isascii() else _perhaps_unknown(UNKNOWN_TO_PATTERNS).sub(stand_in, text)

    return seen


def normal_form(form: Form, text: str) -> str:
    """Return `text` in a normal form of Unicode; characters that are not known stay, and part."""
    if text.isascii():
        return text
    parts: list[str] = []
    done = 0
    for match in _perhaps_unknown(UNKNOWN_TO_NORMAL_FORMS).finditer(text):
        if not _known(UNKNOWN_TO_NORMAL_FORMS, match[0]):
            parts += [normalize(form, text[done : match.start()]), match[0]]
            done = match.end()
    return "".join([*parts, normalize(form, text[done:])])


@cache
def _bounds(table: str) -> list[int]:
    """Return where runs begin that are not known, and where they end, in turns."""
    return [*accumulate(int(number, 16) for number in table.split())]


def _known(table: str, char: str) -> bool:
    return bisect_right(_bounds(table), ord(char)) % 2 == 0


@cache
def _perhaps_unknown(table: str) -> re.Pattern[str]:
    # Ranges of the first plane are one table to `re`; all others would be tried one by one.
    return re.compile(f"[{''.join(_MOVED)}{_ranges(table, 0xFFFF)}\U00010000-\U0010ffff]")


def _ranges(table: str, last: int) -> str:
    bounds = _bounds(table)
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return "".join(
        f"\\U{first:08x}-\\U{min(after - 1, last):08x}" for first, after in pairs if first <= last
    )
