"""Calls of tools out of an answer's text, however it is cut."""

from __future__ import annotations

import json
import random
import time

import pytest

from twostroke.serve.calls import ArgumentsPiece, CallBegin, CallReader, TextPiece

ARGUMENTS = '{"city": "Par\\"is}", "deep": [{"x": ["}", "\\\\"]}], "n": 1.5}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>'
BARE = f'{{"name": "f", "arguments": {ARGUMENTS}}}'


def read(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces."""
    reader, said, calls = CallReader(("f", "g-2")), "", list[tuple[str, str]]()
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += reader.feed(text[start:end])
    for piece in [*pieces, *reader.finish()]:
        if isinstance(piece, TextPiece):
            assert piece.text
            said += piece.text
        elif isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, ArgumentsPiece)
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    assert reader.num_calls == len(calls)
    return said, calls


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("", "", []),
        ("hello", "hello", []),
        (" two words \n", " two words \n", []),
        (CALL, "", [("f", ARGUMENTS)]),
        (f"{CALL}\n{OTHER}", "", [("f", ARGUMENTS), ("g-2", "{}")]),
        (f"Let me look.\n\n{CALL}\n", "Let me look.", [("f", ARGUMENTS)]),
        (f"{OTHER} Hello world again. ", "Hello world again.", [("g-2", "{}")]),
        (f"a {OTHER} b {OTHER}", "ab", [("g-2", "{}"), ("g-2", "{}")]),
        ("1 < 2 and <tool", "1 < 2 and <tool", []),
        ("<tool_cal", "<tool_cal", []),
        ("<tool_call>\nnothing", "<tool_call>\nnothing", []),
        ("<tool_call>" + "x" * 600, "<tool_call>" + "x" * 600, []),
        (CALL[:-13], "", [("f", ARGUMENTS)]),
        (CALL[:60], "", [("f", ARGUMENTS[: 60 - CALL.index(ARGUMENTS)])]),
        (CALL[:25], CALL[:25], []),
        (BARE, "", [("f", ARGUMENTS)]),
        (f" {BARE}\n", "", [("f", ARGUMENTS)]),
        (f"```json\n{json.dumps(json.loads(BARE), indent=2)}\n```", "", None),
        (f"```\n{BARE}\n```\nDone.", "Done.", [("f", ARGUMENTS)]),
        ('{"name": "nobody", "arguments": {}}', '{"name": "nobody", "arguments": {}}', []),
        ('{"name": "f", "argumen', '{"name": "f", "argumen', []),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        (f"So: {BARE}", f"So: {BARE}", []),
    ],
)
def test_pieces_do_not_depend_on_the_cuts(
    text: str, said: str, calls: list[tuple[str, str]] | None
) -> None:
    found = read(text, [])
    assert found[0] == said
    if calls is None:
        assert [json.loads(arguments) for _, arguments in found[1]] == [json.loads(ARGUMENTS)]
    else:
        assert found[1] == calls
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
        assert read(text, cuts) == found
    assert read(text, list(range(len(text)))) == found


@pytest.mark.parametrize(
    "text",
    [
        "<" * 200_000,
        "<tool_call>" * 20_000,
        " " * 200_000,
        '{"name"' + " " * 200_000,
        '<tool_call>{"name": "' + "\\" * 200_000,
        '{"name": "' + "\\a" * 100_000,
        CALL[:70] + "[" * 200_000,
    ],
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    def seconds(part: str) -> float:
        began = time.process_time()
        read(part, list(range(0, len(part), 40)))
        return time.process_time() - began

    assert seconds(text) < 10 * seconds(text[: len(text) // 4]) + 0.5
