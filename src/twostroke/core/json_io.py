"""JSON encoding with escaped line ends, and small JSON files with a checksum."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import read_small_file, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CHECKSUM_KEY = "checksum"
_CHECKSUM_BYTES = 16
_MAX_SHOWN_DIGITS: Final = 40  # of a number in an error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text that a user or a model wrote.

    Raises:
        ValueError: the text is not JSON, or has a number that no float can hold, such as 1e999.
        RecursionError: the text is nested too deeply.
    """
    return json.loads(text, parse_float=_finite_float, parse_constant=_finite_float)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:_MAX_SHOWN_DIGITS]} is not finite")
    return number


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; raise ModelFormatError if it has none."""
    value = _parse(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name!r} is damaged: it is not a JSON object.")
    return value


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace a small file by a JSON object; readers see the old content or the new one."""
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def write_checked_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a small JSON file with a checksum, so that a reader notices damage and renaming.

    The checksum covers the file's name and the values. An existing file is replaced atomically.
    """
    write_json(path, {**values, _CHECKSUM_KEY: _checksum(path, values)})


def read_checked_json(path: Path) -> dict[str, Any]:
    """Return the values that `write_checked_json` wrote; a file without a checksum is accepted.

    Raises:
        ModelFormatError: the file cannot be read, was renamed, or its values have changed since
            they were written.
    """
    values = read_json(path)
    checksum = values.pop(_CHECKSUM_KEY, None)
    if checksum is not None and checksum != _checksum(path, values):
        raise ModelFormatError(f"{path.name!r} is damaged: its values differ from its checksum.")
    return values


def _checksum(path: Path, values: Mapping[str, object]) -> str:
    text = json.dumps([path.name, values], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_CHECKSUM_BYTES).hexdigest()


def _parse(path: Path) -> Any:
    try:
        return json.loads(read_small_file(path))
    except (ValueError, RecursionError):
        raise ModelFormatError(f"{path.name!r} is damaged: it is not JSON.") from None


_encode = msgspec.json.Encoder().encode

# JSON allows these characters in strings, but Python's `str.splitlines` and the line readers of
# several clients end a line at them. (JSON always escapes the other characters that end lines.)
_LINE_ENDS: Final = {
    b"\xe2\x80\xa8": rb"\u2028",  # line separator
    b"\xe2\x80\xa9": rb"\u2029",  # paragraph separator
    b"\xc2\x85": rb"\u0085",  # next line
}


def encode_json(body: Any) -> bytes:
    """Return a value as one line of UTF-8 JSON, for server-sent events and JSON lines.

    Unicode line ends inside texts are escaped, since some clients would split the line there.
    """
    return escape_line_ends(_encode(body))


def escape_line_ends(data: bytes) -> bytes:
    """Return encoded JSON in which Unicode line ends (U+2028, U+2029, U+0085) are escaped."""
    if data.isascii():  # much faster than three searches
        return data
    for character, escaped in _LINE_ENDS.items():
        if character in data:
            data = data.replace(character, escaped)
    return data
