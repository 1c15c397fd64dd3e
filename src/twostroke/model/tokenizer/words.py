"""Normalizes text and cuts it into words, as Hugging Face's `tokenizers` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain, pairwise
from typing import Literal
from unicodedata import normalize

import regex

from twostroke.core.errors import ModelFormatError
from twostroke.core.message_text import counted_noun
from twostroke.model.tokenizer import oniguruma

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
Normalize = Callable[[str], str]
Cut = Callable[[str], list[str]]
Join = Callable[[Sequence[str], Sequence[str]], Iterable[str]]

# The pattern of GPT-2 (encoder.py of openai/gpt-2).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
WHITE_SPACE = r"\p{White_Space}"
PUNCTUATION = r"[\p{P}!-/:-@\[-`{-~]"
_WORD_CHARACTERS = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200c\u200d"
WORDS = rf"[{_WORD_CHARACTERS}]+|[^{_WORD_CHARACTERS}\p{{White_Space}}]+"
# Patterns that group digits by three from the right (tokenizer.json of Tiny Aya, SuperBPE,
# Trinity). A regular expression engine takes quadratic time for them on long numbers, so `cut_at`
# recognizes them and calls `_cut_thousands`.
THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"
BEFORE_THOUSANDS = r"(?=(\d{3})+(?!\d))"
NUMBER_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


def normalize_by(steps: Sequence[Normalize]) -> Normalize:
    """Return a function that applies the text normalizers `steps` in order."""
    return lambda text: reduce(lambda current, step: step(current), steps, text)


def cut_by_all(cuts: Sequence[Cut]) -> Cut:
    """Return a function that applies all of `cuts`: each one cuts the words of the previous one.

    Words are the parts of a text that are merged into tokens separately.
    """

    def words_of(text: str) -> list[str]:
        words = [text] if text else []
        for cut in cuts:
            words = list(chain.from_iterable(map(cut, words)))
        return words

    return words_of


def unicode_form(form: Form) -> Normalize:
    """Return a function that converts text to a Unicode normal form, such as NFC."""
    return lambda text: text if text.isascii() else normalize(form, text)


def replace_matches(pattern: str, content: str) -> Normalize:
    """Return a function that replaces every match of `pattern` in a text by `content`."""
    compiled = _compile(pattern)
    return lambda text: compiled.sub(lambda _match: content, text)


def cut_at(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> Cut:
    """Return a function that cuts a text into words at every match of `pattern`.

    `behavior` says how matches are treated, such as "Removed"; `invert` exchanges the roles of
    matches and of the text between them (tokenizer.json, `Split`). No word is empty. Raises
    ModelFormatError for an invalid pattern, KeyError for an unknown behavior.
    """
    if behavior == "Isolated" and not invert and pattern in _CUTS_BY_PATTERN:
        return _CUTS_BY_PATTERN[pattern]
    repeated = behavior == "Contiguous"
    join = _JOINS[_INVERTED.get(behavior, behavior) if invert else behavior]
    compiled = _compile(pattern, "(?:{})+" if repeated else "{}")
    is_never_empty = compiled.match("") is None
    if join is _isolated and compiled.groups == 0 and is_never_empty:
        # One call for the whole text: `split` returns the matches of a pattern in parentheses.
        split = _compile(pattern, "((?:{})+)" if repeated else "({})").split

        return lambda text: [word for word in split(text) if word]
    matches_of = compiled.finditer if is_never_empty else partial(_matches_in, compiled)

    def cut(text: str) -> list[str]:
        gaps: list[str] = []
        matches: list[str] = []
        end_of_last = 0
        for match in matches_of(text):
            start, end = match.span()
            gaps.append(text[end_of_last:start])
            matches.append(text[start:end])
            end_of_last = end
        gaps.append(text[end_of_last:])
        return [word for word in join(gaps, matches) if word]

    return cut


def cut_by_length(length: int) -> Cut:
    """Return a function that cuts a text into words of `length` characters.

    The last word may be shorter.
    """
    if length < 1:
        raise ModelFormatError(
            f"its pre-tokenizer makes words of {counted_noun(length, 'character')}."
        )
    return lambda text: [text[start : start + length] for start in range(0, len(text), length)]


def _cut_thousands(run: str, *, isolates: bool = True, before_word: bool = True) -> Cut:
    """Return a function that cuts long numbers in a text into groups of three digits.

    Groups are counted from the right: 1234567 becomes 1, 234 and 567. `run` is the pattern of a
    number. With `isolates`, text is also cut before and after a number. If `before_word` is false,
    a number directly before a word character is not cut.
    """
    find_runs = regex.compile(run).finditer
    is_word = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}²³¹¼½¾]").match  # as in Oniguruma

    def cut(text: str) -> list[str]:
        offsets = [0]
        for match in find_runs(text):
            start, end = match.span()
            if not before_word and is_word(text, end):
                continue
            offsets += [start] if isolates else []
            first = start + ((end - start) % 3 or (3 if isolates else 0))
            offsets += range(first, end, 3)
            offsets += [end] if isolates else []
        offsets.append(len(text))
        return [text[start:end] for start, end in pairwise(offsets) if start < end]

    return cut


_CUTS_BY_PATTERN: dict[str, Cut] = {
    THOUSANDS: _cut_thousands(r"\d++", before_word=False),
    BEFORE_THOUSANDS: _cut_thousands(r"\d++", isolates=False),
    NUMBER_THOUSANDS: _cut_thousands(r"\p{N}++"),
}


def _isolated(gaps: Sequence[str], matches: Sequence[str]) -> Iterable[str]:
    return chain(chain.from_iterable(zip(gaps, matches, strict=False)), gaps[-1:])


def _with_previous(gaps: Sequence[str], matches: Sequence[str]) -> Iterable[str]:
    return [*map("".join, zip(gaps, matches, strict=False)), gaps[-1]]


def _with_next(gaps: Sequence[str], matches: Sequence[str]) -> Iterable[str]:
    return [gaps[0], *map("".join, zip(matches, gaps[1:], strict=True))]


# How the n matches and the n + 1 gaps between them become words.
_JOINS: dict[str, Join] = {
    "Isolated": _isolated,
    "Contiguous": _isolated,
    "Removed": lambda gaps, _matches: gaps,
    "Kept": lambda _gaps, matches: matches,
    "MergedWithPrevious": _with_previous,
    "MergedWithNext": _with_next,
}
_INVERTED = {
    "Removed": "Kept",
    "MergedWithPrevious": "MergedWithNext",
    "MergedWithNext": "MergedWithPrevious",
}


def _matches_in(compiled: regex.Pattern[str], text: str) -> Iterator[regex.Match[str]]:
    """Yield the matches of a pattern in a text as Hugging Face's `tokenizers` finds them.

    That library uses Oniguruma, which differs from Python if a pattern matches an empty text. After
    an empty match, Oniguruma continues at the next character; Python's `finditer` first looks for a
    longer match at the same character.
    """
    start = 0
    last_end = -1
    while start <= len(text) and (match := compiled.search(text, start)):
        if match.end() == match.start() == last_end:
            start += 1
            continue
        yield match
        start = last_end = match.end()


def _compile(pattern: str, form: str = "{}") -> regex.Pattern[str]:
    try:
        return oniguruma.compile_pattern(pattern, form)
    except (regex.error, RecursionError) as error:
        raise ModelFormatError(
            f"The tokenizer's pattern {pattern[:80]!r} is not valid: {error}."
        ) from error
