"""The normalizers of tokenizer.json files that change letters or spaces, as functions on text."""

from __future__ import annotations

import base64
from array import array
from typing import TYPE_CHECKING, Any, Final
from unicodedata import category, normalize

import regex

from twostroke.core.errors import ModelFormatError
from twostroke.model.tokenizer.specials import WHITE_SPACE

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE_SPACES: Final = "\t\n\r"
_CJK: Final = regex.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
_MARKS: Final = regex.compile(r"\p{M}+")
_MARKS_WITHOUT_WIDTH: Final = regex.compile(r"\p{Mn}+")
_CLUSTERS: Final = regex.compile(r"\X")
# The rule nmt of SentencePiece (normalization_rule.cc of google/sentencepiece): some characters
# are dropped, and others become spaces.
_NMT_DROPPED: Final = (*range(0x01, 0x09), 0x0B, *range(0x0E, 0x20), 0x7F, 0x8F, 0x9F)
_NMT_SPACES: Final = (0x09, 0x0A, 0x0C, 0x0D, 0x1680, *range(0x200B, 0x2010), 0x2028, 0x2029)
_NMT_SPACES_ABOVE: Final = (0x2581, 0xFEFF, 0xFFFD)
_NMT: Final[dict[int, str | None]] = {
    **dict.fromkeys(_NMT_DROPPED),
    **dict.fromkeys((*_NMT_SPACES, *_NMT_SPACES_ABOVE), " "),
}
_MAX_CLUSTER_BYTES: Final = 6  # longer clusters are looked up character by character
_MAX_CACHED_CLUSTERS: Final = 1 << 16
_HAS_LEAF, _VALUE, _LABEL = 0x100, 0x7FFFFFFF, 0x800000FF


def lower_case(text: str) -> str:
    """Return a text in lower case; each character is converted by itself."""
    return text.lower() if text.isascii() else "".join(map(str.lower, text))


def strip(text: str, *, left: bool, right: bool) -> str:
    """Return a text without the white space at its start (`left`) and at its end (`right`)."""
    text = text.lstrip(WHITE_SPACE) if left else text
    return text.rstrip(WHITE_SPACE) if right else text


def strip_accents(text: str) -> str:
    """Return a text without combining marks; composed characters, such as é, do not change."""
    return text if text.isascii() else _MARKS.sub("", text)


def nmt(text: str) -> str:
    """Return a text normalized by SentencePiece's rule `nmt`, which drops control characters."""
    return text.translate(_NMT)


def bert(step: dict[str, Any]) -> Callable[[str], str]:
    """Return a function that normalizes text as BERT does, with the options in `step`.

    `step` is a normalizer of a tokenizer.json.
    """
    lowers_case = bool(step.get("lowercase", True))
    accents = step.get("strip_accents")
    strips_accents = lowers_case if accents is None else bool(accents)
    cleans = step.get("clean_text", True)
    spaces_cjk = step.get("handle_chinese_chars", True)

    def run(text: str) -> str:
        if cleans:
            text = "".join(map(_clean, text))
        if spaces_cjk:
            text = _CJK.sub(r" \g<0> ", text)
        if strips_accents and not text.isascii():
            text = _MARKS_WITHOUT_WIDTH.sub("", normalize("NFD", text))
        return lower_case(text) if lowers_case else text

    return run


def _clean(char: str) -> str:
    if char in _LINE_SPACES:
        return " "
    if char in "\0\ufffd" or category(char).startswith("C"):
        return ""
    return " " if char in WHITE_SPACE else char


def precompiled(step: dict[str, Any]) -> Callable[[str], str]:
    """Return a function that normalizes text by a SentencePiece table (`precompiled_charsmap`).

    `step` is the normalizer of a tokenizer.json that has the table. Raises ModelFormatError for a
    damaged table.
    """
    table = _CharacterMap(base64.b64decode(step["precompiled_charsmap"]))

    def run(text: str) -> str:
        return "".join(map(table.replaced_cluster, _CLUSTERS.findall(text)))

    return run


class _CharacterMap:
    """A SentencePiece normalization table (a double-array trie): texts and their replacements.

    SentencePiece writes it as Darts-clone does (s-yata/darts-clone, include/darts.h): the size of
    the array in bytes, the array of 32-bit units, then the replacements, each ended by a zero byte.
    """

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or size % 4 or not 4 <= size <= len(data) - 4:
            raise ModelFormatError("its table precompiled_charsmap is damaged.")
        self._units = array("I", data[4 : 4 + size])
        self._replacements = data[4 + size :]
        self._cache: dict[str, str] = {}

    def replaced_cluster(self, cluster: str) -> str:
        """Return the normalized text of a grapheme cluster.

        If the table has no entry for the cluster, its characters are replaced one by one.
        """
        replacement = self._cache.get(cluster)
        if replacement is None:
            replacement = self._replace(cluster)
            if len(self._cache) < _MAX_CACHED_CLUSTERS:
                self._cache[cluster] = replacement
        return replacement

    def _replace(self, cluster: str) -> str:
        if len(cluster.encode()) < _MAX_CLUSTER_BYTES:
            replacement = self._find(cluster)
            if replacement is not None:
                return replacement
        replacements = ((char, self._find(char)) for char in cluster)
        return "".join(char if text is None else text for char, text in replacements)

    def _find(self, text: str) -> str | None:
        """Return the replacement of the shortest prefix of `text` in the table, or None."""
        units = self._units
        index = _offset(units[0])
        for byte in text.encode():
            index ^= byte
            if not byte or index >= len(units):
                return None
            unit = units[index]
            if unit & _LABEL != byte:
                return None
            index ^= _offset(unit)
            if unit & _HAS_LEAF:
                return self._replacement_at(units[index] & _VALUE) if index < len(units) else None
        return None

    def _replacement_at(self, start: int) -> str:
        end = self._replacements.find(b"\0", start)
        text = self._replacements[start : end if end >= 0 else None]
        return text.decode("utf-8", "replace")


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
