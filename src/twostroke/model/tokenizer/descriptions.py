"""Converts a tokenizer.json's normalizer and pre-tokenizer to functions on text."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer import normalizers
from twostroke.model.tokenizer.alphabets import SPACE, byte_level_text, mark_spaces
from twostroke.model.tokenizer.steps import flatten_steps
from twostroke.model.tokenizer.words import (
    DIGIT,
    GPT2,
    PUNCTUATION,
    WHITE_SPACE,
    WORDS,
    cut_at,
    cut_by_all,
    cut_by_length,
    normalize_by,
    replace_matches,
    unicode_form,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.model.tokenizer.words import Cut, Normalize

Description = dict[str, Any]
# The Metaspace schemes that add a space: before the first segment of a text, before later ones,
# and before text that must be encoded exactly.
_SCHEMES = (frozenset({"always", "first"}), frozenset({"always"}), frozenset[str]())


class WordSplitter(Frozen):
    """The functions by which a tokenizer.json normalizes a text and cuts it into words.

    `cut` cuts the first segment of a text, `cut_rest` each segment after an added token, and
    `cut_exact` text that must be encoded exactly, without an added space. With `has_bytes` the
    vocabulary is byte-level (GPT-2): its tokens are spelled bytes. With `spells_bytes` the words
    that the cut functions return are spelled in this way already; otherwise `Merges` spells them.
    """

    normalize: Normalize
    cut: Cut
    cut_rest: Cut
    cut_exact: Cut
    has_bytes: bool
    spells_bytes: bool


def read_words(description: Description) -> WordSplitter:
    """Return the functions by which a tokenizer.json normalizes text and cuts it into words.

    The caller must have checked the fields of the file with `check_steps`. Raises ModelFormatError
    for an unknown kind of normalizer or pre-tokenizer.
    """
    normalizer_steps = list(flatten_steps(description.get("normalizer"), "normalizers"))
    normalize: list[Normalize] = []
    for step in normalizer_steps:
        build = _reader_of(_NORMALIZERS, step, "normalizer")
        with _name_step_in_errors("normalizer", step):
            normalize.append(build(step))
    steps = list(flatten_steps(description.get("pre_tokenizer"), "pretokenizers"))
    for index, step in enumerate(steps):
        _reader_of(_PRE_TOKENIZERS, step, "pre-tokenizer")
        if step["type"] == "Metaspace" and index > 0 and step.get("prepend_scheme") == "first":
            raise ModelFormatError("its pre-tokenizer Metaspace is not the first step.")
    normalizes_bytes = _is_any_byte_level(normalizer_steps)
    has_bytes = normalizes_bytes or _is_any_byte_level(steps)
    # If only the last step is ByteLevel, the merges spell the bytes of its words.
    spells_bytes = normalizes_bytes or _is_any_byte_level(steps[:-1])
    first, rest, exact = (_cuts(steps, schemes, spells_bytes=spells_bytes) for schemes in _SCHEMES)
    if normalizes_bytes:  # text to encode exactly is not normalized
        exact.insert(0, _spell_bytes)
    elif not has_bytes:  # a normalizer may mark the spaces
        exact.insert(0, mark_spaces(prefix=False))
    return WordSplitter(
        normalize=normalize_by(normalize),
        cut=cut_by_all(first),
        cut_rest=cut_by_all(rest),
        cut_exact=cut_by_all(exact),
        has_bytes=has_bytes,
        spells_bytes=spells_bytes,
    )


def _cuts(steps: list[Description], schemes: frozenset[str], *, spells_bytes: bool) -> list[Cut]:
    """Return a function for each pre-tokenizer that cuts text into words, in order.

    `schemes` are the Metaspace schemes that add a space in this case: before a first segment,
    before a later segment, or in text that must be encoded exactly (none). With `spells_bytes`, a
    ByteLevel pre-tokenizer also spells the bytes of its words as characters.
    """
    cuts: list[Cut] = []
    for step in steps:
        with _name_step_in_errors("pre-tokenizer", step):
            cuts.append(_PRE_TOKENIZERS[step["type"]](step, schemes))
        if step["type"] == "ByteLevel" and spells_bytes:
            cuts.append(_spell_bytes)
    return cuts


@contextmanager
def _name_step_in_errors(kind: str, step: Description) -> Iterator[None]:
    """Add the name of a normalizer or pre-tokenizer to errors about its pattern or table."""
    try:
        yield
    except ModelFormatError as error:
        raise ModelFormatError(f"its {kind} {step['type']} is damaged: {error}") from error


def _is_any_byte_level(steps: list[Description]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _spell_bytes(word: str) -> list[str]:
    return [byte_level_text(word)]


def _reader_of(readers: dict[str, Any], step: Description, kind: str) -> Any:
    reader = readers.get(step.get("type", ""))
    if reader is None:
        raise ModelFormatError(
            f"its {kind} '{step.get('type')}' is not known; known are {', '.join(readers)}."
        )
    return reader


def pattern_of(step: Description) -> str:
    """Return a pre-tokenizer's or normalizer's pattern as a regular expression.

    A file may have plain text instead, which is escaped.
    """
    ((kind, pattern),) = step["pattern"].items()
    return re.escape(pattern) if kind == "String" else str(pattern)


_NORMALIZERS: dict[str, Callable[[Description], Normalize]] = {
    "NFC": lambda _reader_of: unicode_form("NFC"),
    "NFD": lambda _reader_of: unicode_form("NFD"),
    "NFKC": lambda _reader_of: unicode_form("NFKC"),
    "NFKD": lambda _reader_of: unicode_form("NFKD"),
    "Prepend": lambda step: lambda text: str(step["prepend"]) + text if text else text,
    "Replace": lambda step: replace_matches(pattern_of(step), str(step["content"])),
    "Lowercase": lambda _reader_of: normalizers.lower_case,
    "Strip": lambda step: partial(
        normalizers.strip, left=bool(step["strip_left"]), right=bool(step["strip_right"])
    ),
    "StripAccents": lambda _reader_of: normalizers.strip_accents,
    "Nmt": lambda _reader_of: normalizers.nmt,
    "BertNormalizer": normalizers.bert,
    "Precompiled": normalizers.precompiled,
    "ByteLevel": lambda _reader_of: byte_level_text,
}


def _byte_level(step: Description, schemes: frozenset[str]) -> Cut:
    words = cut_at(GPT2) if step.get("use_regex") is not False else lambda text: [text]
    if not step.get("add_prefix_space") or "always" not in schemes:
        return words
    return lambda text: words(text if text.startswith(" ") else " " + text)


def _metaspace(step: Description, schemes: frozenset[str]) -> Cut:
    mark = step.get("replacement") or SPACE
    scheme = step.get("prepend_scheme") or "always"
    if step.get("add_prefix_space") is False:
        scheme = "never"
    prefix = mark if scheme in schemes else ""
    split = step.get("split") is not False
    words = cut_at(re.escape(mark), "MergedWithNext") if split else lambda text: [text]

    def cut(text: str) -> list[str]:
        marked = text.replace(" ", mark)
        return words(marked if marked.startswith(mark) else prefix + marked)

    return cut


def _word_length(step: Description) -> int:
    length: int | None = step.get("length")
    return 5 if length is None else length


def _behavior_for(behavior: str, schemes: frozenset[str]) -> str:
    """Return how a pre-tokenizer treats the matches of its pattern, such as "Isolated".

    If no `schemes` are given, text must be encoded exactly: no match is removed from it.
    """
    return behavior if schemes or behavior != "Removed" else "Isolated"


_PRE_TOKENIZERS: dict[str, Callable[[Description, frozenset[str]], Cut]] = {
    "ByteLevel": _byte_level,
    "Split": lambda step, schemes: cut_at(
        pattern_of(step), _behavior_for(step["behavior"], schemes), invert=bool(step.get("invert"))
    ),
    "Digits": lambda step, _schemes: cut_at(
        DIGIT, "Isolated" if step.get("individual_digits") else "Contiguous"
    ),
    "Metaspace": _metaspace,
    "Whitespace": lambda _reader_of, schemes: cut_at(
        WORDS, _behavior_for("Removed", schemes), invert=True
    ),
    "WhitespaceSplit": lambda _reader_of, schemes: cut_at(
        WHITE_SPACE, _behavior_for("Removed", schemes)
    ),
    "Punctuation": lambda step, schemes: cut_at(
        PUNCTUATION, _behavior_for(step.get("behavior") or "Isolated", schemes)
    ),
    "BertPreTokenizer": lambda _reader_of, schemes: cut_by_all(
        [cut_at(WHITE_SPACE, _behavior_for("Removed", schemes)), cut_at(PUNCTUATION)]
    ),
    "CharDelimiterSplit": lambda step, schemes: cut_at(
        re.escape(step["delimiter"]), _behavior_for("Removed", schemes)
    ),
    "FixedLength": lambda step, _schemes: cut_by_length(_word_length(step)),
}
