"""A tokenizer.json's normalizer and pre-tokenizer, as functions on text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.tokenize.alphabets import SPACE, marking
from twostroke.tokenize.words import (
    DIGIT,
    GPT2,
    cut_at,
    normalizing,
    replacing,
    unicode_form,
    words_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.tokenize.words import Cut, Normalize

Description = dict[str, Any]
# The schemes of Metaspace that add a space: before the first stretch of text, before the others,
# and before text that must be encoded exactly.
_SCHEMES = (frozenset({"always", "first"}), frozenset({"always"}), frozenset[str]())


class Words(Frozen):
    """How words are made of a text: it is normalized, then cut.

    `cut` cuts the first stretch of a text, `cut_rest` each stretch after an added token.
    `cut_exact` adds no space before a text. `byte_level` says whether the merges work on the bytes
    of a word instead of its characters.
    """

    normalize: Normalize
    cut: Cut
    cut_rest: Cut
    cut_exact: Cut
    byte_level: bool


def read_words(description: Description) -> Words:
    """Return how the description of a whole tokenizer makes words.

    Raises ModelFormatError for a step of a kind that is not known. A damaged description raises
    KeyError, TypeError, AttributeError or ValueError.
    """
    normalizers = [
        _step(_NORMALIZERS, step, "normalizer")(step)
        for step in flat(description.get("normalizer"), "normalizers")
    ]
    steps = list(flat(description.get("pre_tokenizer"), "pretokenizers"))
    for place, step in enumerate(steps):
        _step(_PRE_TOKENIZERS, step, "pre-tokenizer")
        # After it a text has no characters any more, only bytes.
        if step["type"] == "ByteLevel" and place < len(steps) - 1:
            raise ModelFormatError("its pre-tokenizer ByteLevel is not the last step.")
        if step["type"] == "Metaspace" and place > 0:
            raise ModelFormatError("its pre-tokenizer Metaspace is not the first step.")
    first, rest, exact = (
        [_PRE_TOKENIZERS[step["type"]](step, schemes) for step in steps] for schemes in _SCHEMES
    )
    byte_level = bool(steps) and steps[-1]["type"] == "ByteLevel"
    if not byte_level:  # a normalizer may be what marks the spaces
        exact.insert(0, marking(prefix=False))
    return Words(
        normalize=normalizing(normalizers),
        cut=words_by(first),
        cut_rest=words_by(rest),
        cut_exact=words_by(exact),
        byte_level=byte_level,
    )


def flat(description: Description | None, key: str) -> Iterator[Description]:
    """Yield the steps of a description; `key` names those of a sequence, which may be nested."""
    if not description:
        return
    if description.get("type") != "Sequence":
        yield description
        return
    for step in description[key]:
        yield from flat(step, key)


def _step(known: dict[str, Any], step: Description, what: str) -> Any:
    found = known.get(step.get("type", ""))
    if found is None:
        raise ModelFormatError(
            f"its {what} '{step.get('type')}' is not known; known are {', '.join(known)}."
        )
    return found


def _pattern(step: Description) -> str:
    """Return a step's pattern, which is a text or a regular expression."""
    ((kind, pattern),) = step["pattern"].items()
    return re.escape(pattern) if kind == "String" else str(pattern)


_NORMALIZERS: dict[str, Callable[[Description], Normalize]] = {
    "NFC": lambda _step: unicode_form("NFC"),
    "NFD": lambda _step: unicode_form("NFD"),
    "NFKC": lambda _step: unicode_form("NFKC"),
    "NFKD": lambda _step: unicode_form("NFKD"),
    "Prepend": lambda step: lambda text: str(step["prepend"]) + text if text else text,
    "Replace": lambda step: replacing(_pattern(step), str(step["content"])),
}


def _byte_level(step: Description, schemes: frozenset[str]) -> Cut:
    words = cut_at(GPT2) if step.get("use_regex", True) else lambda text: [text]
    if not step.get("add_prefix_space") or "always" not in schemes:
        return words
    return lambda text: words(text if text.startswith(" ") else " " + text)


def _metaspace(step: Description, schemes: frozenset[str]) -> Cut:
    mark = str(step.get("replacement", SPACE))
    scheme = step.get("prepend_scheme", "always")
    if step.get("add_prefix_space") is False:
        scheme = "never"
    prefix = mark if scheme in schemes else ""
    split = step.get("split", True)
    words = cut_at(re.escape(mark), "MergedWithNext") if split else lambda text: [text]

    def cut(text: str) -> list[str]:
        marked = text.replace(" ", mark)
        return words(marked if marked.startswith(mark) else prefix + marked)

    return cut


_PRE_TOKENIZERS: dict[str, Callable[[Description, frozenset[str]], Cut]] = {
    "ByteLevel": _byte_level,
    "Split": lambda step, _schemes: cut_at(
        _pattern(step), step["behavior"], invert=bool(step.get("invert"))
    ),
    "Digits": lambda step, _schemes: cut_at(
        DIGIT, "Isolated" if step.get("individual_digits") else "Contiguous"
    ),
    "Metaspace": _metaspace,
}
