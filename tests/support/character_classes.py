"""Which characters a class of a pattern holds: here, and in Hugging Face's `tokenizers`."""

from __future__ import annotations

import functools

from tokenizers import Regex, pre_tokenizers

from twostroke.tokenize.words import cut_at

CLASSES = (r"\p{L}", r"\p{N}", r"\p{P}", r"\p{M}", r"\p{S}", r"\s")
EVERY = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
_CHUNK = 4096  # the time of `tokenizers` grows faster than the text


def here(pattern: str, characters: str = EVERY) -> frozenset[str]:
    """Return the characters of a class as Twostroke reads it."""
    return frozenset(cut_at(pattern, "Removed", invert=True)(characters))


def there(pattern: str, characters: str = EVERY) -> frozenset[str]:
    """Return the characters of a class as `tokenizers` reads it."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    chunks = (characters[start : start + _CHUNK] for start in range(0, len(characters), _CHUNK))
    return frozenset(char for chunk in chunks for char, _ in split.pre_tokenize_str(chunk))


@functools.cache
def disputed() -> frozenset[str]:
    """Return the characters that the two put into different classes, being of different age."""
    return frozenset().union(*(here(name) ^ there(name) for name in CLASSES))
