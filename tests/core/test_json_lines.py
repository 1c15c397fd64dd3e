"""JSON without infinite numbers, and lines of JSON that no reader of lines splits."""

from __future__ import annotations

import json

import pytest

from twostroke.core.json_io import encode_json, escape_line_ends, parse_json

# Every character at which `str.splitlines` ends a line.
LINE_ENDS = [line[-1] for line in "".join(map(chr, range(0x110000))).splitlines(True)[:-1]]


@pytest.mark.parametrize(
    "character", LINE_ENDS, ids=lambda end_character: f"U+{ord(end_character):04X}"
)
def test_characters_that_end_lines_are_escaped(character: str) -> None:
    value = {f"key{character}": [f"text {character}{character} goes on", character]}
    line = encode_json(value)
    assert line.decode().splitlines() == [line.decode()]
    assert json.loads(line) == value


def test_other_characters_stay_as_they_are() -> None:
    text = "é ü … € 媽 🤗 \u2027\u202a\u0084\u0086\\u2028"
    assert json.loads(encode_json(text)) == text
    assert encode_json("é…🤗") == '"é…🤗"'.encode()


def test_json_made_elsewhere_is_escaped_too() -> None:
    assert escape_line_ends('{"a": "b\u2028c"}'.encode()) == rb'{"a": "b\u2028c"}'


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_no_float_holds_are_no_json(number: str) -> None:
    for text in (number, f'{{"a": [{number}]}}'):
        with pytest.raises(ValueError, match="is not finite"):
            parse_json(text)
    assert parse_json('{"a": [1, 1e300, "1e999"]}') == {"a": [1, 1e300, "1e999"]}
