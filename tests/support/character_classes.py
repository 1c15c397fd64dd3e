"""Which characters a class of a pattern holds: here, and in Hugging Face's `tokenizers`."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from twostroke.tokenize.words import cut_at

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
    r"\p{Cn}",
)
EVERY = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
# Without planes of nothing, and without the inside of the large blocks of one class.
_LARGE = [(0x3500, 0x9F00), (0xAC10, 0xD700), (0xE010, 0xF8F0), (0x17010, 0x187E0)]
_LARGE += [(0x20010, 0x2A600), (0x34000, 0x110000)]
VARIED = "".join(char for char in EVERY if not any(a < ord(char) < b for a, b in _LARGE))
_CHUNK = 4096  # the time of `tokenizers` grows faster than the text


def here(pattern: str, characters: str = VARIED) -> frozenset[str]:
    """Return the characters of a class as Twostroke reads it."""
    return frozenset(cut_at(pattern, "Removed", invert=True)(characters))


def there(pattern: str, characters: str = VARIED) -> frozenset[str]:
    """Return the characters of a class as `tokenizers` reads it."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    chunks = (characters[start : start + _CHUNK] for start in range(0, len(characters), _CHUNK))
    return frozenset(char for chunk in chunks for char, _ in split.pre_tokenize_str(chunk))
