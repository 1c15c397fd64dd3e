"""Tool calls are read from an answer's text, wherever the stream is cut."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from twostroke.engine.chat.call_forms import FORMS, HERMES, CallForm, Unmarked
from twostroke.engine.chat.call_reader import ArgumentsPiece, CallBegin, CallReader, TextPiece

ARGUMENTS = '{"city": "Par\\"is}", "deep": [{"x": ["}", "\\\\"]}], "n": 1.5}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>'
BLANKS = " \n" * 600
JSON_FORMS = [name for name, form in FORMS.items() if form.has_json]
BARE = f'{{"name": "f", "arguments": {ARGUMENTS}}}'


def read(
    text: str, cuts: list[int], form: CallForm = HERMES, names: tuple[str, ...] = ("f", "g-2")
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer that is streamed with these cuts."""
    reader, text_read, calls = CallReader(names, form), "", list[tuple[str, str]]()
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += reader.feed(text[start:end])
    for piece in [*pieces, *reader.finish()]:
        if isinstance(piece, TextPiece):
            assert piece.text
            text_read += piece.text
        elif isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, ArgumentsPiece)
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    assert reader.num_calls == len(calls)
    return text_read, calls


@pytest.mark.parametrize("id_", ["call000001", "chatcmpl-tool-1", "functions.f:0"])
def test_ids_that_the_model_makes_up_may_have_signs(id_: str) -> None:
    form = FORMS["solar"]
    call = form.write([("f", ARGUMENTS)]).replace("call000000", id_)
    assert id_ in call
    for size in (1, 7, len(call)):
        reader = CallReader(("f",), form)
        parts = [call[start : start + size] for start in range(0, len(call), size)]
        pieces = [piece for part in parts for piece in reader.feed(part)]
        pieces += reader.finish(is_cut=False)
        assert [piece.name for piece in pieces if isinstance(piece, CallBegin)] == ["f"]


@pytest.mark.parametrize(
    ("text", "sentence", "calls"),
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
        (f"```json\n{BARE}\nAnd so on.", "And so on.", [("f", ARGUMENTS)]),
        (f"```json\n{BARE}", "", [("f", ARGUMENTS)]),
        (f"```json\n{BARE}\n``", "", [("f", ARGUMENTS)]),
        (f"{BARE}\n{BARE}", "", [("f", ARGUMENTS), ("f", ARGUMENTS)]),
        (f"{OTHER}<tool_call> nope", "<tool_call> nope", [("g-2", "{}")]),
        (CALL.replace("arguments", "parameters"), "", [("f", ARGUMENTS)]),
        (CALL.replace("</tool_call>", "") + "More.", "More.", [("f", ARGUMENTS)]),
        *(
            (begin + named, begin + named, [])
            for begin in ("", "<tool_call>")
            for named in (
                r'{"name": "a\qb", "arguments": {}}',
                r'{"name": "\u12", "arguments": {}}',
                r'{"name": "\ud83d", "arguments": {}}',
                '{"name": "a\nb", "arguments": {}}',
                '{"name": "f",' + " " * 600 + '"arguments": {}}',
            )
        ),
        (f"a{BLANKS}b", f"a{BLANKS}b", []),
        (f"```\n{BARE}{BLANKS}```", "```", [("f", ARGUMENTS)]),
        (f"{CALL}{BLANKS}Done.", "Done.", [("f", ARGUMENTS)]),
    ],
)
def test_pieces_do_not_depend_on_the_cuts(
    text: str, sentence: str, calls: list[tuple[str, str]] | None
) -> None:
    result = read(text, [])
    assert result[0] == sentence
    if calls is None:
        assert [json.loads(arguments) for _, arguments in result[1]] == [json.loads(ARGUMENTS)]
    else:
        assert result[1] == calls
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
        assert read(text, cuts) == result
    assert read(text, list(range(len(text)))) == result


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_however_it_is_cut(name: str) -> None:
    form = FORMS[name]
    two = [("f", ARGUMENTS), ("g-2", "{}")]
    texts = {
        form.write(two): ("", two),
        form.write(two[:1]) + "\nDone.": ("Done.", two[:1]),
        form.mark[:-1]: (form.mark[:-1], []),
        f"a {form.mark} b": (f"a {form.mark} b", []),
        form.write(two).replace(": ", ":").replace(", ", " , "): ("", None),
    }
    if not form.is_bare:
        texts |= {
            f"Well. {form.write(two)} ": ("Well.", two),
            form.write(two[1:]) + form.write(two[:1]): ("", [two[1], two[0]]),
        }
    else:
        texts[form.mark + form.write(two[:1])] = ("", two[:1])
    if form.id_mark:
        text = form.write(two[:1]).replace(form.middle, f"{form.id_mark}abc123XYZ{form.middle}")
        texts[text] = ("", two[:1])
    for text, (expected_text, calls) in texts.items():
        result = read(text, [], form)
        assert result[0] == expected_text
        if calls is None:
            read_back = [json.loads(arguments) for _, arguments in result[1]]
            assert read_back == [json.loads(ARGUMENTS), {}]
        else:
            assert result[1] == calls
        assert read(text, list(range(len(text))), form) == result
        rng = random.Random(0)
        for _ in range(20):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
            assert read(text, cuts, form) == result


@pytest.mark.parametrize("name", FORMS)
def test_random_text_is_read_as_if_it_came_character_by_character(name: str) -> None:
    form, rng = FORMS[name], random.Random(name)
    call = form.write([("f", ARGUMENTS)])
    two = form.write([("g-2", "{}"), ("f", '{"a": []}')])
    signs = [*' \n"{}[],;:`\\x', "```json\n", '"name": "f"', '"arguments": {', " " * 499]
    marks = [*form.all_marks, form.opening, form.middle, form.tail, form.between, form.end]
    for _ in range(50):
        text = ""
        for _ in range(rng.randint(1, 8)):
            whole_text = rng.choice([call, two, BARE, rng.choice(signs), rng.choice(marks)])
            cut = rng.choice([len(whole_text), rng.randint(0, len(whole_text))])
            text += whole_text[:cut]
        alone = read(text, list(range(1, len(text))), form)
        assert read(text, [], form) == alone
        for _ in range(5):
            cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
            assert read(text, cuts, form) == alone


@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_pure_answer_is_calls_or_text_that_may_contain_calls(name: str) -> None:
    form = FORMS[name]
    call = form.write([("f", ARGUMENTS)])
    marked = form.mark + call if form.is_bare else call
    bare = form.is_bare
    fenced = f"```json\n{BARE}\n```"
    for text, unmarked, expected_text, num_calls in (
        (marked, Unmarked.NONE, "", 1),
        (call, Unmarked.NONE, call if bare else "", 0 if bare else 1),
        (BARE, Unmarked.ALL, "", 1),
        (BARE, Unmarked.FENCED, BARE, 0),
        (fenced, Unmarked.FENCED, "", 1),
        (fenced, Unmarked.NONE, fenced, 0),
        (marked + form.mark[:-1], Unmarked.ALL, "", 1),
        (f'["{marked}"] ', Unmarked.ALL, f'["{marked}"] ', 0),
        (form.mark[:-1], Unmarked.ALL, form.mark[:-1], 0),
        (f"{form.mark} no {marked}", Unmarked.ALL, f"{form.mark} no {marked}", 0),
    ):
        for cuts in ([len(text)], range(1, len(text) + 1)):
            reader = CallReader(("f",), form, is_pure=True, unmarked=unmarked)
            pieces = [
                piece
                for start, end in zip([0, *cuts], [*cuts], strict=False)
                for piece in reader.feed(text[start:end])
            ]
            pieces += reader.finish()
            result = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
            assert (result, reader.num_calls) == (expected_text, num_calls), text


@pytest.mark.parametrize("name", JSON_FORMS)
def test_doubled_braces_are_read(name: str) -> None:
    form = FORMS[name]
    doubled = f"{{{BARE}}}"
    texts = [doubled, f"```json\n{doubled}\n```", f"{doubled}\n{BARE}"]
    if form.is_quoted:
        texts.append(form.write([("f", ARGUMENTS)]).replace('{"name"', '{{"name"'))
        if form.tail[0] == "}":
            texts.append(texts[-1].replace(f"{ARGUMENTS}}}", f"{ARGUMENTS}}}}}"))
    for text in texts:
        for cuts in ([], list(range(len(text)))):
            text_read, calls = read(text, cuts, form)
            assert text_read == ""
            assert {*calls} == {("f", ARGUMENTS)}


class Copied(str):
    """A string that counts how many of its characters are copied by slices."""

    __slots__ = ()
    num_chars = 0

    def __getitem__(self, key: Any) -> Copied:
        part = Copied(super().__getitem__(key))
        Copied.num_chars += len(part)
        return part

    def __radd__(self, before: str) -> Copied:
        return Copied(before + str(self))


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_comes_at_once_is_copied_a_few_times(name: str) -> None:
    form = FORMS[name]
    call = ("f", '{"a": 1}')
    texts = [
        form.write([call]) * 1000,
        form.write([call] * 1000),
        f"a{form.mark}" * 1000,
        '{"name": "f", "arguments": {"a": 1}}\n' * 1000,
        f"```\n{BARE}\n```\n" * 1000,
    ]
    for text in texts:
        Copied.num_chars = 0
        CallReader(("f",), form).feed(Copied(text))
        assert 0 < Copied.num_chars < 4 * len(text)


@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_call_is_whole_once_its_arguments_are(name: str) -> None:
    form = FORMS[name]
    text = form.write([("f", ARGUMENTS)])
    end = text.index(ARGUMENTS) + len(ARGUMENTS)
    for cut in range(len(text) + 1):
        reader = CallReader(("f",), form)
        pieces = reader.feed(text[:cut]) + reader.finish()
        assert reader.has_whole_calls is (cut >= end)
        if cut >= end:
            assert not any(isinstance(piece, TextPiece) for piece in pieces)


@pytest.mark.parametrize("name", [*FORMS, "without marks"])
def test_beginning_of_a_call_that_the_limit_cut_is_not_text(name: str) -> None:
    form = FORMS.get(name, HERMES)
    calls = [("f", ARGUMENTS), ("g-2", "{}")]
    text, first = form.write(calls), form.write(calls[:1])
    if name not in FORMS:
        text, first = f"{BARE}\n{BARE}", BARE
    end = len(first.removesuffix(form.end))
    name_end = text.index("f", len(form.opening) if name in FORMS else 0) + 1
    for cut in range(len(text) + 1):
        reader = CallReader(("f", "g-2"), form)
        pieces = [*reader.feed(text[: cut // 2]), *reader.feed(text[cut // 2 : cut])]
        pieces += reader.finish(is_cut=True)
        output = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        if cut >= end:
            assert reader.num_calls >= 1
        if cut >= min(end, name_end):
            assert not output, (cut, output)
    for plain in ("5 <", "{", '{"name": "other', "a [", '{"city": '):
        reader = CallReader(("f",), form)
        pieces = reader.feed(plain) + reader.finish(is_cut=True)
        assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == plain


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_in_linear_time(name: str) -> None:
    form = FORMS[name]
    parts = (form.mark, form.opening + "f" * 60, form.opening + form.name("f") + form.middle)

    def seconds(text: str) -> float:
        start_s = time.process_time()
        read(text, list(range(0, len(text), 40)), form)
        return time.process_time() - start_s

    for part in parts:
        for filling in (" ", '"', "{", "a"):
            for text in ((part + filling) * 10_000, part + filling * 20_000):
                assert seconds(text[:20_000]) < 10 * seconds(text[:5000]) + 0.5


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
        start_s = time.process_time()
        read(part, list(range(0, len(part), 40)))
        return time.process_time() - start_s

    assert seconds(text) < 10 * seconds(text[: len(text) // 4]) + 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name", ["a.b", "a/b:c", "mcp__a__b-c", "1", "f" * 128, "n" * 128 + "." + "f" * 128]
)
def test_calls_are_read_whatever_their_functions_are_called(form: str, name: str) -> None:
    text = FORMS[form].write([(name, ARGUMENTS)])
    for cuts in ([], list(range(1, len(text)))):
        assert read(text, cuts, FORMS[form], (name, "f")) == ("", [(name, ARGUMENTS)])


@pytest.mark.parametrize("name", ["a.b", "a/b:c", "n" * 128 + "." + "f" * 128])
def test_calls_without_marks_are_read_whatever_their_functions_are_called(name: str) -> None:
    bare = f'{{"name": "{name}", "arguments": {ARGUMENTS}}}'
    for text in (bare, f"```json\n{bare}\n```"):
        assert read(text, list(range(1, len(text))), names=(name,)) == ("", [(name, ARGUMENTS)])
        cut = text[: text.index("arguments")]
        assert read(cut, [5, 20], names=(name,))[1] == []
