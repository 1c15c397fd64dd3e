"""JSON bodies become structs, after a scan that limits their nesting."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.core.errors import RequestError
from twostroke.server.body.decode import BodyDecoder
from twostroke.server.http.body_limits import MAX_CONTAINERS, nesting_of
from twostroke.server.protocols.openai.chat import ChatRequest
from twostroke.server.protocols.openai.completions import CompletionRequest

DECODER = BodyDecoder(ChatRequest, 16)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(json_values)
def test_depth_is_counted_exactly(value: Any) -> None:
    body = json.dumps(value).encode()
    depth = _depth(value)
    nesting = nesting_of(body, 0)
    assert nesting.depth == depth
    assert nesting.num_containers == _num_containers(value)
    assert nesting_of(body, 10**9).depth <= 10**9


@pytest.mark.parametrize(
    "body", [b'"' + b"[" * 100, b'"\\"' + b"[" * 100, b'{"a":"' + b"]{" * 100 + b'"}']
)
def test_brackets_in_strings_do_not_count(body: bytes) -> None:
    assert nesting_of(body, 2).depth <= 2


@pytest.mark.parametrize("unit", [b'"', b'\\"', b'"\\', b"[]", b'"[', b"{", b"\\", b'["\\\\'])
def test_scan_is_linear_whatever_it_reads(unit: bytes) -> None:
    body = b"[[" + unit * (2_000_000 // len(unit))
    start_s = time.perf_counter()
    nesting_of(body, 10**9)
    nesting_of(body, 1)
    assert time.perf_counter() - start_s < 60  # quadratic work takes hours


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            rb'{"messages": "a\ud800"}',
            "The body is not valid JSON: a string has half of a surrogate",
        ),
        (rb'{"messages": "\ud83d\ude00', "The body is not valid JSON: "),
        (b'{"temperature": 1e999}', "temperature must be a smaller number."),
    ],
)
def test_error_has_the_reason_in_words(body: bytes, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        DECODER.decode(body)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("unit", ["[", "]", "a.", "[a", "[a]", "."])
def test_word_that_looks_like_a_place_is_read_in_linear_time(unit: str) -> None:
    word = "x` - at `$." + unit * (2_000_000 // len(unit))
    start_s = time.perf_counter()
    with pytest.raises(RequestError):
        DECODER.decode(json.dumps({word: 1}).encode())
    assert time.perf_counter() - start_s < 60  # quadratic work takes hours


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        DECODER.decode(body)


@given(st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__), json_values, max_size=4))
def test_any_values_are_decoded_or_refused(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    try:
        decoded, _ = DECODER.decode(body)
    except RequestError:
        return
    assert isinstance(decoded, ChatRequest)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_schema_can_be_made_of_the_structs(kind: type[msgspec.Struct]) -> None:
    """The OpenAPI document is derived from the structs of request bodies."""
    schema = msgspec.json.schema(kind)
    properties = schema["$defs"][kind.__name__]["properties"]
    assert properties.keys() == set(kind.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"tool_choice": "requird"},
            "required, got 'requird'. Did you mean 'required'?",
        ),
        ({"response_format": {"type": "xml"}}, "one of text, json_object, json_schema, got 'xml'."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "got 'image_url'. Models here read text only.",
        ),
        ({"tool_choice": "x" * 1_000_000}, f"auto, none, required, got '{'x' * 100}'."),
    ],
)
def test_unknown_word_is_refused_with_the_known_words(fields: dict[str, Any], why: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(RequestError) as refused:
        DECODER.decode(json.dumps(body).encode())
    assert str(refused.value).endswith(why)


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        (ChatRequest, b'{"prompt": "x"}', "Send 'messages' here; 'prompt' is for /v1/completions."),
        (
            CompletionRequest,
            b'{"messages": []}',
            "Send 'prompt' here; 'messages' is for /v1/chat/completions.",
        ),
    ],
)
def test_field_of_another_endpoint_names_that_endpoint(
    kind: type[msgspec.Struct], body: bytes, why: str
) -> None:
    with pytest.raises(RequestError) as refused:
        BodyDecoder(kind, 16).decode(body)
    assert str(refused.value).endswith(why)


def test_field_of_the_other_endpoint_inside_a_message_is_only_unknown() -> None:
    _, [ignored] = DECODER.decode(b'{"messages": [{"role": "user", "prompt": "x"}]}')
    assert ignored.refusal is not None
    assert "/v1/" not in str(ignored.refusal())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ('"priority": 1001', "priority must be from -1000 to 1000, got 1001."),
        ('"priority": 1001, "priority": 1002', "priority must be from -1000 to 1000, got 1002."),
        ('"messages": []', "messages must have from 1 to 10000 items, got 0."),
    ],
)
def test_value_out_of_bounds_is_refused_with_the_bounds(fields: str, sentence: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {fields}}}'
    with pytest.raises(RequestError) as refused:
        DECODER.decode(body.encode())
    assert str(refused.value) == sentence


@pytest.mark.parametrize("body", [b"", b" \r\n"])
def test_empty_body_is_refused_as_empty(body: bytes) -> None:
    with pytest.raises(RequestError, match="The body is empty: send a JSON object"):
        DECODER.decode(body)


def test_lists_and_objects_are_counted_across_the_parts_of_a_long_body() -> None:
    unit = b'{"a": ["[\\"", [[]], "\\\\"]},'
    body = b"[" + unit * 100_000 + b"1]"
    assert nesting_of(body, 0) == (5, 1 + 4 * 100_000)


def test_more_lists_and_objects_than_are_read_are_refused_with_the_limit() -> None:
    body = b'{"prompt": "a", "foreign": [' + b"[]," * MAX_CONTAINERS + b"1]}"
    with pytest.raises(RequestError, match=f"at most {MAX_CONTAINERS:,} are allowed"):
        BodyDecoder(CompletionRequest, 64).decode(body)


def _num_containers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(_num_containers, value)) if isinstance(value, list) else 0


def _depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 0
