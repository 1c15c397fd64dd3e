"""Tool calls in the notations of model families: written, held by a grammar, and read back."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from support.byte_tokenizer import byte_tokenizer
from support.random_tools import random_answer, random_schema, random_value, snippets_of
from twostroke.core.errors import RequestError
from twostroke.engine.chat.call_forms import FORMS
from twostroke.engine.chat.call_reader import (
    ArgumentsPiece,
    CallBegin,
    CallReader,
    TextPiece,
)
from twostroke.engine.chat.tools import Function, ToolForm, Tools
from twostroke.engine.structured_output.grammar import Grammars

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROL, USER_DEFINED = 3, 4
NOTATIONS = [name for name, form in FORMS.items() if not form.has_json]
Call = tuple[str, Any]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
SCHEMAS = {"weather": CITY, "time": {"type": "object"}}
ARGUMENTS = {
    "city": 'Paris "x"\n\nof <b>',
    "days": 3,
    "unit": "f",
    "near": "nullable",
    "tags": ["a", "b\nc"],
    "exact": True,
}


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [("integer", "3", 3), ("string", "3", "3"), ("number", "3", 3), ("float", "0.5", 0.5),
     ("list", "[1]", [1]), ("str", "a b", "a b")],
)  # fmt: skip
def test_arguments_are_read_whatever_their_type_is_called(
    type_name: str, text: str, value: object
) -> None:
    call = FORMS["xtml"].write([("time", '{"n": "@"}')])
    call = call.replace('type="string"', f'type="{type_name}"').replace("@", text)
    for size in (1, 7, len(call)):
        reader = CallReader(("time",), FORMS["xtml"])
        pieces = [
            piece
            for start in range(0, len(call), size)
            for piece in reader.feed(call[start : start + size])
        ]
        pieces += reader.finish(is_cut=False)
        written = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
        assert json.loads(written) == {"n": value}


def functions(schemas: dict[str, Any]) -> tuple[Function, ...]:
    return tuple(Function.described(name, schema, "tools") for name, schema in schemas.items())


def tool_form(
    name: str,
    schemas: dict[str, Any],
    *,
    is_forced: bool,
    is_parallel: bool = True,
    kind: int | None = CONTROL,
) -> ToolForm:
    """Return tools in a form; `kind` is the type of its marks' tokens, None if they are text."""
    form = FORMS[name]
    marks = form.all_marks if kind is not None else ()
    tokenizer = byte_tokenizer(odd=tuple((mark, kind or CONTROL) for mark in marks))
    tools = Tools((), functions(schemas), is_forced=is_forced, is_parallel=is_parallel)
    return ToolForm(tools, form, tokenizer)


def checker(form: ToolForm) -> Callable[[str], bool]:
    """Return a function that tells whether the grammar of tools allows a text as an answer."""
    tokenizer = form.tokenizer
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(form.constraint())

    def is_allowed(text: str) -> bool:
        tokens = [*tokenizer.encode(text, parse_special=True), min(tokenizer.eos_ids)]
        return matcher.count_allowed((), tokens) == len(tokens)

    return is_allowed


def read(
    name: str, text: str, schemas: dict[str, Any], cuts: list[int] | None = None, **options: Any
) -> tuple[str, list[Call], bool]:
    """Return an answer's text, its calls, and whether they are whole."""
    described = {function.name: function.schema for function in functions(schemas)}
    reader = CallReader([*schemas], FORMS[name], schemas=described)
    edges = [0, *(cuts or []), len(text)]
    pieces = [piece for start, end in pairwise(edges) for piece in reader.feed(text[start:end])]
    pieces += reader.finish(**options)
    text_before, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text_before += piece.text
        elif isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, ArgumentsPiece)
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    is_whole = reader.has_whole_calls
    if not is_whole:
        return text_before, list(calls), is_whole
    return (
        text_before,
        [(function, json.loads(arguments)) for function, arguments in calls],
        is_whole,
    )


@pytest.mark.parametrize("kind", [CONTROL, None])
@pytest.mark.parametrize(
    "id_", ["0", "b462b4f8", "call_000001", "chatcmpl-tool-1", "functions.f:0"]
)
def test_the_grammar_allows_every_id_that_the_model_makes_up(id_: str, kind: int | None) -> None:
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    is_allowed = checker(tool_form("solar", schemas, is_forced=True, kind=kind))
    call = FORMS["solar"].write([("f", '{"a": 1}')])
    own_id = FORMS["solar"].write([("f", "{}")]).split("|>")[2].split("<|")[0]
    text = call.replace(own_id, id_)
    assert is_allowed(text)
    assert read("solar", text, schemas) == ("", [("f", {"a": 1})], True)
    for damaged_id in ("", "a b", "a<b", "i" * 65):
        assert not is_allowed(call.replace(own_id, damaged_id))


def random_cuts(rng: random.Random, text: str) -> list[int]:
    return sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 30)))


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, None])
@pytest.mark.parametrize("name", NOTATIONS)
def test_grammars_allow_calls_that_fit_and_no_others(name: str, kind: int | None) -> None:
    form = FORMS[name]
    good = ("weather", json.dumps(ARGUMENTS))
    least_call = ("weather", '{"city": "", "days": 1}')
    free = ("time", "{}")
    one_call, two = form.write([good]), form.write([least_call, free])
    wrong = [
        form.write([("weather", '{"city": "x"}')]),  # a required argument is missing
        form.write([("weather", '{"city": "x", "days": "3 or 4"}')]),
        form.write([("weather", '{"city": "x", "days": 1, "unit": "k"}')]),
        form.write([("weather", '{"city": "x", "days": 1, "other": 1}')]),
        form.write([("weather", '{"city": "x", "days": 1, "exact": 1}')]),
        form.write([("weather", '{"city": "x", "days": 1, "tags": [1]}')]),
        form.write([("rain", "{}")]),
        form.write([("time", '{"zone": 1}')]),
        one_call[:-1],
    ]
    for is_forced in (True, False):
        for is_parallel in (True, False):
            form_of_tools = tool_form(
                name, SCHEMAS, is_forced=is_forced, is_parallel=is_parallel, kind=kind
            )
            is_allowed = checker(form_of_tools)
            assert is_allowed(one_call)
            assert is_allowed(two) is is_parallel
            for text in ("hello", "", "a {b} [c] <d>"):
                assert is_allowed(text) is not is_forced
            mark = form.mark if form.is_bare else ""
            assert is_allowed(f"Well.\n{mark}{one_call}") is not is_forced
            for text in wrong:
                is_text = form.is_bare and "rain" in text  # a list of an unknown function
                assert not is_allowed(text) or (is_text and not is_forced), text


@pytest.mark.parametrize("name", NOTATIONS)
def test_calls_are_read_back_however_the_stream_is_cut(name: str) -> None:
    form, rng = FORMS[name], random.Random(1)
    calls = [("weather", ARGUMENTS), ("time", {})]
    written = form.write((function, json.dumps(values)) for function, values in calls)
    for before, after in (("", ""), ("Let me look.\n", "\n"), ("a <b ", "\n\nDone.")):
        mark = form.mark if form.is_bare and before else ""
        text = before + mark + written + after
        expected = (before.strip() + after.strip(), calls, True)
        assert read(name, text, SCHEMAS) == expected
        assert read(name, text, SCHEMAS, [*range(1, len(text))]) == expected
        for _ in range(20):
            assert read(name, text, SCHEMAS, random_cuts(rng, text)) == expected


@pytest.mark.parametrize("name", NOTATIONS)
def test_random_tools_and_arguments_are_held_and_read_back(name: str) -> None:
    form, rng = FORMS[name], random.Random(name)
    for _ in range(50):
        schema = random_schema(rng)
        values = random_value(rng, schema)
        schemas = {"f": schema, "f_2": {"type": "object"}}
        text = form.write([("f", json.dumps(values)), ("f_2", "{}")])
        result = read(name, text, schemas)
        assert read(name, text, schemas, random_cuts(rng, text)) == result
        if _is_ambiguous(schema):  # `5` may be a number or a string
            assert [function for function, _ in result[1]] == ["f", "f_2"]
            continue
        assert checker(tool_form(name, schemas, is_forced=True, kind=None))(text)
        assert result == ("", [("f", values), ("f_2", {})], True)


def _is_ambiguous(schema: Any) -> bool:
    """Whether an argument may be a string or another type: then not every string can be written."""
    return any(
        not inner or "enum" in inner or "anyOf" in inner or isinstance(inner.get("type"), list)
        for inner in schema["properties"].values()
    )


@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("name", NOTATIONS)
def test_what_the_grammar_allows_is_read_as_a_valid_call(name: str, *, is_forced: bool) -> None:
    form, rng = FORMS[name], random.Random(f"{name}{is_forced}")
    num_calls = 0
    for _ in range(12):
        schemas = {"f": random_schema(rng), "f_2": random_schema(rng)}
        form_of_tools = tool_form(
            name, schemas, is_forced=is_forced, kind=rng.choice((CONTROL, None))
        )
        tokenizer = form_of_tools.tokenizer
        grammars = Grammars(tokenizer, tokenizer.vocab_size)
        constraint = form_of_tools.constraint()
        snippets = [form.opening, form.loose_begin, form.middle, form.tail, form.between, form.end]
        snippets += [form.write([(function, "{}")]) for function in schemas]
        for schema in schemas.values():
            values = random_value(rng, schema)
            snippets += [form.write([("f", json.dumps(values))]), *snippets_of(schema)]
        snippets += _notation_snippets(name)
        for _ in range(6):
            matcher = grammars.matcher(constraint)
            mark = form.mark if form.is_bare and not is_forced else ""
            begin = rng.choice(("", mark + form.opening))
            text = random_answer(matcher, tokenizer, rng, [*filter(None, snippets)], begin)
            if text is None:
                continue
            text_before, calls, is_whole = read(name, text, schemas, random_cuts(rng, text))
            assert is_whole or not calls, text
            assert not is_forced or (calls and not text_before), text
            for function, values in calls:
                described = Function.described(function, schemas[function], "tools")
                if "Infinity" not in json.dumps(values):  # a number that Python does not have
                    jsonschema_rs.validate(described.schema, values)
                num_calls += 1
    assert num_calls > 10


def _notation_snippets(name: str) -> list[str]:
    texts = [value for value in _fields(FORMS[name].notation) if isinstance(value, str)]
    return [*texts, *texts, *texts]


def _fields(struct: Any) -> list[Any]:
    return [getattr(struct, name) for name in struct.__struct_fields__]


@pytest.mark.parametrize("name", NOTATIONS)
def test_every_notation_is_read_in_linear_time(name: str) -> None:
    form = FORMS[name]
    value = {"city": "a <b </para" * 500, "days": 1, "tags": ["x"] * 500}
    text = form.write([("weather", json.dumps(value))] * 20)
    hostile = [text, (form.opening + "weather" + form.middle) * 500, form.mark * 2000]
    hostile += [form.opening + "weather" + form.middle + sign * 20_000 for sign in (" ", "<", "a")]
    for texts in (hostile, [part[: len(part) // 2] for part in hostile]):
        for part in texts:
            CountedText.num_chars = 0
            reader = CallReader([*SCHEMAS], form, schemas=SCHEMAS)
            for start in range(0, len(part), 40):
                reader.feed(CountedText(part[start : start + 40]))
            assert CountedText.num_chars < 80 * len(part) + 10_000


class CountedText(str):
    """A string that counts the characters that are copied by slices and searched."""

    __slots__ = ()
    num_chars = 0

    def __getitem__(self, key: Any) -> CountedText:
        part = CountedText(super().__getitem__(key))
        CountedText.num_chars += len(part)
        return part

    def __radd__(self, before: str) -> CountedText:
        CountedText.num_chars += len(before)
        return CountedText(before + str(self))

    def __add__(self, after: str) -> CountedText:
        CountedText.num_chars += len(self)
        return CountedText(str(self) + after)

    def find(self, part: str, start: int = 0, *ends: int) -> int:  # type: ignore[override]
        CountedText.num_chars += len(self) - start
        return super().find(part, start, *ends)


@pytest.mark.parametrize("name", NOTATIONS)
def test_garbage_is_read_the_same_however_it_is_cut(name: str) -> None:
    form, rng = FORMS[name], random.Random(name)
    parts = [*_notation_snippets(name), *form.all_marks, form.opening, form.tail, form.middle]
    parts += ["weather", "city", "<", "\n", " " * 499, "x", "</", *"{}[]()", '"', "'", "=", ","]
    parts += [form.write([("weather", json.dumps(ARGUMENTS))])]
    for _ in range(200):
        text = ""
        for _ in range(rng.randint(1, 10)):
            part = rng.choice(parts)
            text += part[: rng.choice((len(part), rng.randint(0, len(part))))]
        for is_cut in (False, True):
            expected = read(name, text, SCHEMAS, [*range(1, len(text))], is_cut=is_cut)
            assert read(name, text, SCHEMAS, is_cut=is_cut) == expected, text
            assert read(name, text, SCHEMAS, random_cuts(rng, text), is_cut=is_cut) == expected


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_cut_call_is_no_text_and_is_whole_only_after_its_arguments(name: str) -> None:
    form = FORMS[name]
    text = form.write([("weather", json.dumps(ARGUMENTS))])
    name_end = text.index("weather") + len("weather") + len(form.middle)
    for cut in range(len(text)):
        text_before, calls, is_whole = read(name, text[:cut], SCHEMAS, is_cut=True)
        assert not text_before.strip() or cut < name_end
        if is_whole:
            assert calls == [("weather", ARGUMENTS)]
    assert read(name, text, SCHEMAS, is_cut=True) == ("", [("weather", ARGUMENTS)], True)


@pytest.mark.parametrize("name", NOTATIONS)
def test_marks_at_the_end_may_be_missing(name: str) -> None:
    form = FORMS[name]
    text = form.write([("weather", json.dumps(ARGUMENTS))])
    tail = form.tail + form.end
    for length in range(len(tail)):
        shorter = text[: len(text) - len(tail) + length]
        assert read(name, shorter, SCHEMAS) == ("", [("weather", ARGUMENTS)], True)


@pytest.mark.parametrize("kind", [CONTROL, None])
@pytest.mark.parametrize(
    "text",
    ["a < b", "R&D", "two\nlines", "é</param></function>", '<param name="city">', "<![CDATA["],
)
def test_a_text_with_signs_of_xml_is_in_cdata_and_may_have_the_closing_tag(
    text: str, kind: int | None
) -> None:
    values = {"city": text, "days": 1, "near": "5"}
    schemas = {"weather": {**CITY, "properties": {**CITY["properties"], "near": {}}}}
    written = FORMS["params"].write([("weather", json.dumps(values))] * 2)
    assert written.count(f'<param name="city"><![CDATA[{text}]]></param>') == 2
    expected = ("", [("weather", {**values, "near": 5})] * 2, True)
    assert read("params", written, schemas) == expected
    assert read("params", written, schemas, [*range(1, len(written))]) == expected
    is_allowed = checker(tool_form("params", schemas, is_forced=True, kind=kind))
    if kind is None or "param" not in text:  # a text cannot have special tokens
        assert is_allowed(written)
    assert not is_allowed(written.replace("]]>", "]]&gt;"))
    as_text = written.replace(">5<", "><![CDATA[5]]><")
    assert read("params", as_text, schemas) == ("", [("weather", values)] * 2, True)


def test_xtml_names_the_type_of_each_value() -> None:
    values = {"a": "1", "b": 1, "c": None, "d": [True], "e": {"f": "g"}, "h": False, "i": 1.5}
    written = FORMS["xtml"].write([("f", json.dumps(values)), ("f", "{}")])
    types = ("string", "number", "null", "array", "object", "boolean", "number")
    for key, name in zip(values, types, strict=True):
        assert f'<|open|>argument key="{key}" type="{name}"<|sep|>' in written
    assert 'call tool="f" index="1"' in written
    assert 'call tool="f" index="2"' in written
    for schema in ({"type": "object", "additionalProperties": True}, {}):
        schemas = {"f": schema}
        assert read("xtml", written, schemas) == ("", [("f", values), ("f", {})], True)
    is_allowed = checker(tool_form("xtml", {"f": {"additionalProperties": True}}, is_forced=True))
    assert is_allowed(written)
    assert not is_allowed(written.replace('type="null"', 'type="number"'))
    assert not is_allowed(written.replace('type="array"', 'type="object"'))
    assert not is_allowed(written.replace('type="array"', 'type="list"'))


LOOSE = (
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>"
)


def test_a_call_without_the_mark_before_its_function_is_held_and_read() -> None:
    calls = [("weather", {"city": "Oslo", "days": 2})]
    for kind in (CONTROL, None):
        is_allowed = checker(tool_form("tags", SCHEMAS, is_forced=False, kind=kind))
        for before in ("", "Well.\n"):
            for after in ("", "\n</tool_call>"):
                text = f"{before}{LOOSE}{after}"
                assert is_allowed(text)
                assert read("tags", text, SCHEMAS) == (before.strip(), calls, True)
            assert not is_allowed(f"{before}{LOOSE}".replace("2", "two"))
        for text in ("<function=rain>\n", f"See <function=x>: {LOOSE}", "a <function= b"):
            assert is_allowed(text)
    assert read("tags", "<function=rain>\n", SCHEMAS) == ("<function=rain>\n", [], False)


def nested_lists(depth: int) -> dict[str, Any]:
    """Return the schema of an argument that is a list of lists of lists and so on."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"properties": {"a": schema}}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("tags", {"properties": {"a>b": {}}, "required": ["a>b"]}),
        (
            "tags",
            {"properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": {}},
        ),
        ("pairs", {"properties": {"a": {"const": "</arg_value>"}}, "required": ["a"]}),
        ("keywords", {"properties": {"a b": {}}, "required": ["a b"]}),
        ("gemma", {"properties": {"a": {"const": '<|"|>'}}, "required": ["a"]}),
        ("gemma", nested_lists(300)),
    ],
)
def test_a_schema_that_a_notation_cannot_hold_is_refused_if_it_is_strict(
    name: str, schema: dict[str, Any]
) -> None:
    form = tool_form(name, {"f": schema}, is_forced=True)
    grammars = Grammars(form.tokenizer, form.tokenizer.vocab_size)
    relaxed = form.without_refused(grammars.refusal)
    assert relaxed is not form
    text = FORMS[name].write([("f", '{"a": "x"}')])
    assert checker(relaxed)(text)
    strict = Function("f", schema, "tools", is_strict=True)
    tools = Tools((), (strict,), is_forced=True, is_parallel=True)
    with pytest.raises(RequestError, match=r"(form|used)"):
        ToolForm(tools, form.form, form.tokenizer).without_refused(grammars.refusal)


def test_values_are_read_by_the_types_of_their_schemas() -> None:
    schema = {
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "number"},
            "maybe": {"type": ["string", "null"]},
            "either": {"$ref": "#/$defs/either"},
            "flag": {"allOf": [{"type": ["boolean", "string"]}, {"type": "boolean"}]},
            "any": {},
        },
        "$defs": {"either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
    }
    for name, text, value in (
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("number", "5", 5),
        ("number", " 5.5\n", 5.5),
        ("number", "five", "five"),
        ("number", "[1]", [1]),
        ("maybe", "None", None),
        ("maybe", "none", "none"),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "5.5", "5.5"),
        ("either", "null", "null"),
        ("flag", "True", True),
        ("flag", "yes", "yes"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", '{"a": 1', '{"a": 1'),
        ("any", "[link](x)", "[link](x)"),
        ("any", '"quoted"', '"quoted"'),
        ("other", "7", 7),
    ):
        call = f"<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
        assert read("tags", call, {"f": schema}) == ("", [("f", {name: value})], True)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("f(a='x', b=\"y\")", {"a": "x", "b": "y"}),
        (r"f(a='it\'s \n \u00e9 \x41 \d')", {"a": "it's \n é A \\d"}),
        ("f(a=[1, 'b', {'c': None, \"d\": true}], e=False,)", None),
        ("f( a = 'x' ,b= 1 )", {"a": "x", "b": 1}),
        ("f(a=two words, b=-1e3)", {"a": "two words", "b": -1000.0}),
        ("f()", {}),
    ],
)
def test_literals_are_read_as_models_write_them(text: str, values: Any) -> None:
    if values is None:
        values = {"a": [1, "b", {"c": None, "d": True}], "e": False}
    answer = f"<|tool_call_start|>[{text}]<|tool_call_end|>"
    expected = ("", [("f", values)], True)
    for cuts in ([], [*range(1, len(answer))]):
        assert read("keywords", answer, {"f": {}}, cuts) == expected
