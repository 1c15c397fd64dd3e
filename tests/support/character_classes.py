"""The characters of a pattern's class in Twostroke and in Hugging Face's `tokenizers`."""

from __future__ import annotations

import unicodedata

from tokenizers import Regex, pre_tokenizers

from twostroke.model.tokenizer.words import cut_at

CLASSES = (
    r"\p{L}",
    r"\p{Lu}",
    r"\p{Ll}",
    r"\p{Lo}",
    r"\p{N}",
    r"\p{P}",
    r"\p{M}",
    r"\p{S}",
    r"\s",
)
# Of characters that both know, without the inside of the large blocks of one class. Newer versions
# of Unicode have more; one of these is in another class there.
_KEPT_RANGES = [range(0x3501), range(0x9F00, 0xAC11), range(0xD700, 0xE011), range(0xF8F0, 0x17011)]
_KEPT_RANGES += [range(0x187E0, 0x20011), range(0x2A600, 0x2A6E1)]
_MOVED = "\u0295"
VARIED = "".join(
    chr(code)
    for codes in _KEPT_RANGES
    for code in codes
    if unicodedata.category(chr(code)) not in {"Cn", "Cs"} and chr(code) not in _MOVED
)
_CHUNK = 4096  # the time of `tokenizers` grows faster than the text


def matches_here(pattern: str, characters: str = VARIED) -> frozenset[str]:
    """Return the characters that match a class of a pattern in Twostroke."""
    return frozenset(cut_at(pattern, "Removed", invert=True)(characters))


def matches_in_guidance(pattern: str, characters: str = VARIED) -> frozenset[str]:
    """Return the characters that match a class of a pattern in Hugging Face's `tokenizers`."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    chunks = (characters[start : start + _CHUNK] for start in range(0, len(characters), _CHUNK))
    return frozenset(char for chunk in chunks for char, _ in split.pre_tokenize_str(chunk))
