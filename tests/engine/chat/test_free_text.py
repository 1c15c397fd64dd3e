"""The text of a custom tool's input is read, wherever its JSON arguments are cut."""

from __future__ import annotations

import json

import pytest

from twostroke.engine.chat.call_reader import FreeTextReader

TEXT = 'a\n"b" \\ \t/ é 😀 \\u0041 }'


def read(arguments: str, cuts: list[int]) -> str:
    reader = FreeTextReader()
    ends = [*cuts, len(arguments)]
    return "".join(reader.feed(arguments[a:b]) for a, b in zip([0, *cuts], ends, strict=True))


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("blank", ["", " \n"])
def test_text_is_decoded_however_it_is_cut(is_ascii: bool, blank: str) -> None:
    quoted = json.dumps(TEXT, ensure_ascii=is_ascii)
    arguments = f'{blank}{{{blank}"input"{blank}:{blank}{quoted}{blank}}}{blank}'
    assert read(arguments, []) == TEXT
    assert read(arguments, list(range(1, len(arguments)))) == TEXT
    for cut in range(len(arguments)):
        assert read(arguments, [cut]) == TEXT
        assert TEXT.startswith(read(arguments[:cut], []))


def test_half_a_character_is_replaced() -> None:
    assert read(r'{"input": "a\ud83d b\ude00"}', []) == "a\ufffd b\ufffd"
    assert read(r'{"input": "\ud83d\n"}', [13]) == "\ufffd\n"


def test_other_arguments_have_no_text() -> None:
    assert read('{"other": "x"}', [3]) == ""
