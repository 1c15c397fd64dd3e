"""Text into words: normalize it, and cut it at patterns in the ways that `tokenizers` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import regex

from twostroke.core.errors import ModelFormatError
from twostroke.tokenize.ages import normal_form, seen_by

if TYPE_CHECKING:
    from twostroke.tokenize.ages import Form

Normalize = Callable[[str], str]
Cut = Callable[[str], list[str]]
Join = Callable[[Sequence[str], Sequence[str]], Iterable[str]]

# The pattern of GPT-2 (encoder.py of openai/gpt-2).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The step `Digits` of a tokenizer.json asks Rust, which knows some numbers more than patterns do.
DIGIT = "[\\p{N}\U00011de0-\U00011de9\U00016ff4-\U00016ff6]"


def normalizing(steps: Sequence[Normalize]) -> Normalize:
    """Return what takes a text through all `steps`."""
    return lambda text: reduce(lambda done, step: step(done), steps, text)


def words_by(cuts: Sequence[Cut]) -> Cut:
    """Return what cuts a text into words; a cut works on the pieces of those before."""

    def words_of(text: str) -> list[str]:
        words = [text] if text else []
        for cut in cuts:
            words = list(chain.from_iterable(map(cut, words)))
        return words

    return words_of


def unicode_form(form: Form) -> Normalize:
    """Return what brings a text into a normal form of Unicode."""
    return lambda text: normal_form(form, text)


def replacing(pattern: str, content: str) -> Normalize:
    """Return what puts `content` in the place of every match of `pattern`."""
    compiled = _compile(pattern)
    return lambda text: compiled.sub(lambda _match: content, text)


def cut_at(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> Cut:
    """Return what cuts a text at every match of `pattern`.

    `behavior` says what becomes of a match, `invert` takes the stretches between matches for the
    matches (tokenizer.json, `Split`). No word is empty. Raises ModelFormatError for a pattern that
    is not valid, KeyError for another behavior.
    """
    if behavior == "Contiguous":
        pattern = f"(?:{pattern})+"
    join = _JOINS[_INVERTED.get(behavior, behavior) if invert else behavior]
    compiled, seen = _compile(pattern), seen_by(pattern)
    if join is _isolated and compiled.groups == 0:
        # One call for the whole text: a pattern in parentheses stays among what it splits.
        split = _compile(f"({pattern})").split

        def cut_whole(text: str) -> list[str]:
            shown = seen(text)
            words = [word for word in split(shown) if word]
            return words if shown == text else _sliced(text, words)

        return cut_whole

    def cut(text: str) -> list[str]:
        gaps: list[str] = []
        matches: list[str] = []
        done = 0
        for match in compiled.finditer(seen(text)):
            start, end = match.span()
            gaps.append(text[done:start])
            matches.append(text[start:end])
            done = end
        gaps.append(text[done:])
        return [word for word in join(gaps, matches) if word]

    return cut


def _sliced(text: str, words: Iterable[str]) -> list[str]:
    """Return `text` in pieces as long as `words` are."""
    ends = [0, *accumulate(map(len, words))]
    return [text[start:end] for start, end in pairwise(ends)]


def _isolated(gaps: Sequence[str], matches: Sequence[str]) -> Iterable[str]:
    return chain(chain.from_iterable(zip(gaps, matches, strict=False)), gaps[-1:])


def _with_previous(gaps: Sequence[str], matches: Sequence[str]) -> Iterable[str]:
    return [*map("".join, zip(gaps, matches, strict=False)), gaps[-1]]


def _with_next(gaps: Sequence[str], matches: Sequence[str]) -> Iterable[str]:
    return [gaps[0], *map("".join, zip(matches, gaps[1:], strict=True))]


# What becomes of the n matches between n + 1 gaps.
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


def _compile(pattern: str) -> regex.Pattern[str]:
    # The patterns of model files are Oniguruma's, where ^ and $ match at every line.
    try:
        return regex.compile(pattern, regex.MULTILINE)
    except regex.error as error:
        raise ModelFormatError(
            f"The tokenizer's pattern {pattern[:80]!r} is not valid: {error}."
        ) from error
