"""A tokenizer.json's normalizer and pre-tokenizer, as functions on text."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer import normalizers
from twostroke.model.tokenizer.alphabets import SPACE, byte_level_text, marking
from twostroke.model.tokenizer.steps import flat
from twostroke.model.tokenizer.words import (
    DIGIT,
    GPT2,
    PUNCTUATION,
    WHITE_SPACE,
    WORDS,
    cut_at,
    cut_by_length,
    normalizing,
    replacing,
    unicode_form,
    words_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.model.tokenizer.words import Cut, Normalize

Description = dict[str, Any]
# The schemes of Metaspace that add a space: before the first stretch of text, before the others,
# and before text that must be encoded exactly.
_SCHEMES = (frozenset({"always", "first"}), frozenset({"always"}), frozenset[str]())


class WordSplitter(Frozen):
    """How words are made of a text: it is normalized, then cut.

    `cut` cuts the first stretch of a text, `cut_rest` each stretch after an added token.
    `cut_exact` adds no space before a text. `has_bytes` says whether tokens spell bytes instead of
    characters; `spells_bytes`, whether words are spelled so already.
    """

    normalize: Normalize
    cut: Cut
    cut_rest: Cut
    cut_exact: Cut
    has_bytes: bool
    spells_bytes: bool


def read_words(description: Description) -> WordSplitter:
    """Return how the description of a whole tokenizer makes words.

    Raises ModelFormatError for a step of a kind that is not known. The fields of the steps have
    been checked (`check_steps`).
    """
    changes = list(flat(description.get("normalizer"), "normalizers"))
    normalize: list[Normalize] = []
    for step in changes:
        build = _step(_NORMALIZERS, step, "normalizer")
        with _naming("normalizer", step):
            normalize.append(build(step))
    steps = list(flat(description.get("pre_tokenizer"), "pretokenizers"))
    for place, step in enumerate(steps):
        _step(_PRE_TOKENIZERS, step, "pre-tokenizer")
        if step["type"] == "Metaspace" and place > 0 and step.get("prepend_scheme") == "first":
            raise ModelFormatError("its pre-tokenizer Metaspace is not the first step.")
    normalizes_bytes = _is_any_byte_level(changes)
    has_bytes = normalizes_bytes or _is_any_byte_level(steps)
    # The merges themselves spell the words that the last step leaves in characters.
    spells_bytes = normalizes_bytes or _is_any_byte_level(steps[:-1])
    first, rest, exact = (_cuts(steps, schemes, spells_bytes=spells_bytes) for schemes in _SCHEMES)
    if normalizes_bytes:  # text that must be encoded exactly is not normalized
        exact.insert(0, _spell)
    elif not has_bytes:  # a normalizer may be what marks the spaces
        exact.insert(0, marking(prefix=False))
    return WordSplitter(
        normalize=normalizing(normalize),
        cut=words_by(first),
        cut_rest=words_by(rest),
        cut_exact=words_by(exact),
        has_bytes=has_bytes,
        spells_bytes=spells_bytes,
    )


def _cuts(steps: list[Description], schemes: frozenset[str], *, spells_bytes: bool) -> list[Cut]:
    """Return a cut for each step; with `spells_bytes`, ByteLevel spells the bytes of its words."""
    cuts: list[Cut] = []
    for step in steps:
        with _naming("pre-tokenizer", step):
            cuts.append(_PRE_TOKENIZERS[step["type"]](step, schemes))
        if step["type"] == "ByteLevel" and spells_bytes:
            cuts.append(_spell)
    return cuts


@contextmanager
def _naming(kind: str, step: Description) -> Iterator[None]:
    """Add the step to an error about its pattern or table."""
    try:
        yield
    except ModelFormatError as error:
        raise ModelFormatError(f"its {kind} {step['type']} is damaged: {error}") from error


def _is_any_byte_level(steps: list[Description]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _spell(word: str) -> list[str]:
    return [byte_level_text(word)]


def _step(known: dict[str, Any], step: Description, what: str) -> Any:
    found = known.get(step.get("type", ""))
    if found is None:
        raise ModelFormatError(
            f"its {what} '{step.get('type')}' is not known; known are {', '.join(known)}."
        )
    return found


def pattern_of(step: Description) -> str:
    """Return a step's pattern, which is a text or a regular expression."""
    ((kind, pattern),) = step["pattern"].items()
    return re.escape(pattern) if kind == "String" else str(pattern)


_NORMALIZERS: dict[str, Callable[[Description], Normalize]] = {
    "NFC": lambda _step: unicode_form("NFC"),
    "NFD": lambda _step: unicode_form("NFD"),
    "NFKC": lambda _step: unicode_form("NFKC"),
    "NFKD": lambda _step: unicode_form("NFKD"),
    "Prepend": lambda step: lambda text: str(step["prepend"]) + text if text else text,
    "Replace": lambda step: replacing(pattern_of(step), str(step["content"])),
    "Lowercase": lambda _step: normalizers.lower_case,
    "Strip": lambda step: partial(
        normalizers.strip, left=bool(step["strip_left"]), right=bool(step["strip_right"])
    ),
    "StripAccents": lambda _step: normalizers.strip_accents,
    "Nmt": lambda _step: normalizers.nmt,
    "BertNormalizer": normalizers.bert,
    "Precompiled": normalizers.precompiled,
    "ByteLevel": lambda _step: byte_level_text,
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


def _length(step: Description) -> int:
    length: int | None = step.get("length")
    return 5 if length is None else length


def _behavior(behavior: str, schemes: frozenset[str]) -> str:
    """Return the behavior of a cut, which keeps the matches if text must be encoded exactly."""
    return behavior if schemes or behavior != "Removed" else "Isolated"


_PRE_TOKENIZERS: dict[str, Callable[[Description, frozenset[str]], Cut]] = {
    "ByteLevel": _byte_level,
    "Split": lambda step, schemes: cut_at(
        pattern_of(step), _behavior(step["behavior"], schemes), invert=bool(step.get("invert"))
    ),
    "Digits": lambda step, _schemes: cut_at(
        DIGIT, "Isolated" if step.get("individual_digits") else "Contiguous"
    ),
    "Metaspace": _metaspace,
    "Whitespace": lambda _step, schemes: cut_at(WORDS, _behavior("Removed", schemes), invert=True),
    "WhitespaceSplit": lambda _step, schemes: cut_at(WHITE_SPACE, _behavior("Removed", schemes)),
    "Punctuation": lambda step, schemes: cut_at(
        PUNCTUATION, _behavior(step.get("behavior") or "Isolated", schemes)
    ),
    "BertPreTokenizer": lambda _step, schemes: words_by(
        [cut_at(WHITE_SPACE, _behavior("Removed", schemes)), cut_at(PUNCTUATION)]
    ),
    "CharDelimiterSplit": lambda step, schemes: cut_at(
        re.escape(step["delimiter"]), _behavior("Removed", schemes)
    ),
    "FixedLength": lambda step, _schemes: cut_by_length(_length(step)),
}
