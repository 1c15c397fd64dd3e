"""Errors about values that do not fit their fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, inspect

from twostroke.core.mismatch import type_of, union_members
from twostroke.server.body.explain import explain
from twostroke.server.routes import EMBEDDING_PROTOCOLS, GENERATION_PROTOCOLS, UTILITY_ENDPOINTS

FALLBACK = "is not valid: "


class Inner(msgspec.Struct):
    count: int
    word: Literal["a", "b"] = "a"


class Left(msgspec.Struct, tag="left", tag_field="side"):
    size: Annotated[float, Meta(ge=0, le=2)] = 1


class Right(msgspec.Struct, tag="right", tag_field="side"):
    pass


class Outer(msgspec.Struct):
    text: str | list[Inner] | None = None
    biases: dict[Annotated[str, Meta(max_length=3)], Annotated[float, Meta(ge=-1, le=1)]] = {}
    part: Left | Right | None = None
    flag: bool = False
    number: Annotated[int, Meta(ge=1)] = 1
    names: Annotated[list[str], Meta(max_length=2)] = []
    raw: msgspec.Raw = msgspec.Raw(b"null")
    anything: Any = None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("3", "The body must be an object, got an integer."),
        ('{"text": 3}', "text must be a string or a list, got an integer."),
        ('{"text": [{"count": 1}, {}]}', "text[1].count is missing."),
        ('{"text": [{"count": null}]}', "text[0].count is missing."),
        ('{"text": [{"count": 1.5}]}', "text[0].count must be an integer, got 1.5."),
        ('{"text": [{"count": 1, "word": "c"}]}', "text[0].word must be one of a, b, got 'c'."),
        ('{"text": [null]}', "text[0] must be an object, got null."),
        ('{"biases": {"abcd": 1}}', "A key of biases must have at most 3 characters."),
        ('{"biases": {"abc": 2}}', "biases[...] must be from -1 to 1, got 2."),
        ('{"part": {}}', "part.side is missing."),
        ('{"part": {"side": "rigth"}}', "part.side must be one of left, right, got 'rigth'."),
        ('{"part": {"side": "left", "size": 3}}', "part.size must be from 0 to 2, got 3."),
        ('{"flag": 1}', "flag must be a boolean, got an integer."),
        ('{"number": 0}', "number must be at least 1, got 0."),
        ('{"number": 1e999}', "number must be at least 1."),
        ('{"names": ["a", "b", "c"]}', "names must have at most 2 items, got 3."),
        ('{"names": ["a", true]}', "names[1] must be a string, got a boolean."),
        ('{"raw": {"a": 1e999}, "flag": 0}', "flag must be a boolean, got an integer."),
        ('{"anything": -1e999}', "anything must be a smaller number."),
        ('{"anything": {"a": [2, 1e999]}}', "anything[...][1] must be a smaller number."),
        ('{"text": 1, "text": [], "flag": 0}', "flag must be a boolean, got an integer."),
    ],
)
def test_first_value_that_does_not_fit_is_named(body: str, message: str) -> None:
    for text in (body.encode(), b" \n" * 50 + body.encode(), msgspec.Raw(body.encode())):
        error = explain("a library's words", Outer, text)
        assert str(error).startswith(message)


json_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | json_numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


REQUESTS = {
    entry.request for entry in (*GENERATION_PROTOCOLS.values(), *UTILITY_ENDPOINTS.values())
} | {Outer}
REQUESTS |= {entry.request for entry in EMBEDDING_PROTOCOLS.values()}


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=lambda kind: kind.__qualname__))
@settings(max_examples=30)  # for each of 20 kinds
@given(data=st.data())
def test_every_refused_body_has_an_error_of_our_own(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    fields = st.sampled_from(kind.__struct_fields__)
    body: dict[str, Any] = data.draw(st.dictionaries(fields, json_values, max_size=3))
    text = json.dumps(body).encode()
    reason = _msgspec_error(text, kind)
    if reason is not None:
        error = explain(reason, kind, text)
        assert FALLBACK not in str(error)
        assert str(error) == str(explain(reason, kind, body))


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=lambda kind: kind.__qualname__))
def test_a_number_that_no_float_holds_is_refused_by_name(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        for value in ("1e999", "-1e999", "[1e999]", '{"a": 1e999}', '[{"b": [1e999]}]'):
            text = f'{{"{field.encode_name}": {value}}}'.encode()
            reason = _msgspec_error(text, kind)
            if reason is not None:
                assert FALLBACK not in str(explain(reason, kind, text)), text
            elif kind is not Outer:  # a field of type Raw, which is decoded later
                assert inspect.RawType in map(type, union_members([type_of(field.type)])), text


def _msgspec_error(text: bytes, kind: type[msgspec.Struct]) -> str | None:
    """Return why msgspec refuses the values of a JSON text; None if they fit."""
    try:
        msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        return str(error)
    return None
