"""Finished answers are checked against the whole JSON schema, also hostile schemas."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from typing import Any

import pytest

from twostroke.engine.structured_output.schema import verify
from twostroke.engine.structured_output.schema.spans import wrong_span
from twostroke.engine.structured_output.schema.verify import (
    MAX_ANSWER_CHARS,
    SchemaViolation,
    UncheckedError,
    Verifier,
)

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier()


@pytest.mark.parametrize(
    ("schema", "answer", "keyword"),
    [
        ({"type": "object", "minProperties": 2}, '{"a": 1, "a": 2}', "repeated member"),
        ({"properties": {"role": {"const": "user"}}}, '{"r\\u006fle": "admin"}', "const"),
        ({"items": {"properties": {"a": {}}}}, '[{"a": 1, "\\u0061": 2}]', "repeated member"),
        ({"format": "date"}, '"2021-02-29"', "format"),
        ({"uniqueItems": True}, "[1, 1.0]", "uniqueItems"),
        ({"multipleOf": 0.01}, "19.995", "multipleOf"),
        ({"maximum": 10**30}, f"{10**30 + 1}", "maximum"),
        ({"maximum": 5}, f"1e{'9' * 30}", "maximum"),
        ({"$schema": DRAFT_7, "format": "duration"}, '"x"', "format"),
        ({"dependencies": {"a": ["b"]}}, '{"a": 1}', "required"),
        ({"items": [{"type": "integer"}]}, '["a"]', "type"),  # draft 7's, unnamed
        ({"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a"}, "1", "type"),
        ({"$schema": "http://example.com/mine", "type": "null"}, "1", "type"),
        ({"unevaluatedProperties": False}, '{"a": 1}', "unevaluatedProperties"),
    ],
)
def test_wrong_answer_is_reported(verifier: Verifier, schema: Any, answer: str, keyword: str):
    result = verifier.fault(json.dumps(schema), answer)
    assert result is not None
    assert result.keyword == keyword


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "integer"}, "1.0"),
        ({"multipleOf": 0.01}, "19.99"),
        ({"format": "a vendor's"}, '"x"'),
        ({"$schema": DRAFT_7, "contentMediaType": "application/json"}, '"{"'),
        (
            {"$schema": DRAFT_7, "$ref": "#/definitions/a", "maximum": 1, "definitions": {"a": {}}},
            "2",
        ),
        ({"discriminator": {"propertyName": "a"}, "nullable": True, "x-order": 1}, "{}"),
    ],
)
def test_right_answer_is_not_reported(verifier: Verifier, schema: Any, answer: str):
    assert verifier.fault(json.dumps(schema), answer) is None


def test_location_is_the_keywords(verifier: Verifier):
    schema = {"properties": {"tags": {"items": {"maxLength": 1}}}}
    result = verifier.fault(json.dumps(schema), '{"tags": ["a", "bc"]}')
    assert result == SchemaViolation("maxLength", "/properties/tags/items/maxLength", ("tags", 1))


@pytest.mark.parametrize("reference", ["http://127.0.0.1:{}/x", "https://127.0.0.1:{}/x#/a"])
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_references_are_never_fetched(verifier: Verifier, reference: str, keyword: str):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        schema = json.dumps({keyword: reference.format(listener.getsockname()[1])})
        with pytest.raises(UncheckedError, match="registry"):
            verifier.fault(schema, "1")
        with pytest.raises(TimeoutError):
            listener.accept()


def test_files_are_not_read(verifier: Verifier, tmp_path: Any):
    (tmp_path / "schema.json").write_text("true")
    with pytest.raises(UncheckedError, match="registry"):
        verifier.fault(json.dumps({"$ref": (tmp_path / "schema.json").as_uri()}), "1")


def deep(count: int) -> str:
    return "[" * count + "]" * count


def branching(limits: dict[str, int]) -> str:
    """Return a schema whose check takes twice the time for each level of a nested answer."""
    tree = {"items": {"$ref": "#/$defs/tree"}} | limits
    alternatives = {"anyOf": [tree | {"minItems": 1}, tree | {"type": "array"}]}
    return json.dumps({"$defs": {"tree": alternatives | limits}, "$ref": "#/$defs/tree"})


def test_long_check_ends_and_lets_other_threads_run(verifier: Verifier):
    results = []
    schema, answer = branching({"maxItems": 1, "minItems": 1}), deep(60)
    checking = threading.Thread(target=lambda: results.append(verifier.fault(schema, answer)))
    checking.start()
    count = 0
    while checking.is_alive():
        time.sleep(0.001)
        count += 1
    assert count > 10
    assert results == [SchemaViolation("unknown")]  # the reason is what took too long
    assert verifier.fault('{"type": "null"}', "null") is None  # by a new process


def test_hostile_schemas_end(verifier: Verifier):
    patterns = ["^(a+)+$", r"^(a|aa)+\1$", "(?=(a+)+b)", "a{4000}{4000}{4000}", "(" * 5000]
    for pattern in patterns:
        schema = json.dumps({"pattern": pattern, "not": {"pattern": pattern}})
        try:
            result = verifier.fault(schema, json.dumps("a" * 20_000 + "!"))
        except UncheckedError:
            continue
        assert result is not None
    with pytest.raises(UncheckedError):
        verifier.fault('{"not": ' * 20_000 + "{}" + "}" * 20_000, "1")
    with pytest.raises(UncheckedError):
        verifier.fault("{}", deep(100_000))
    with pytest.raises(UncheckedError, match="surrogates"):
        verifier.fault('{"maxLength": 1}', '"\\ud83d"')
    with pytest.raises(UncheckedError, match="characters"):
        verifier.fault("{}", f'"{"a" * MAX_ANSWER_CHARS}"')
    assert verifier.fault('{"type": "null"}', "1") == SchemaViolation("type", "/type")


def test_schema_can_be_checked_alone(verifier: Verifier):
    verifier.check_schema('{"uniqueItems": true}')
    with pytest.raises(UncheckedError):
        verifier.check_schema('{"pattern": "(?<n>"}')


def test_process_ends_with_its_owner():
    verifier = Verifier()
    verifier.check_schema("{}")
    process = verifier._process
    assert process is not None
    del verifier
    assert process.poll() is not None


def test_process_that_ended_or_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch):
    verifier = Verifier()
    verifier.check_schema("{}")
    first = verifier._process
    assert first is not None
    first.kill()
    first.wait()
    assert verifier.fault('{"type": "null"}', "1") == SchemaViolation("type", "/type")
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdin.closed
    assert first.stdout.closed
    second = verifier._process
    assert second is not None
    second.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(verify, "_CHECK_TIMEOUT_S", 0.2)
    with pytest.raises(UncheckedError, match="time"):
        verifier.fault("{}", "1")
    monkeypatch.undo()
    assert verifier.fault("{}", "1") is None


@pytest.mark.parametrize(
    ("schema", "answer", "value"),
    [
        ({"properties": {"tags": {"uniqueItems": True}}}, '{"a": 1, "tags": ["x", "y", "x"]}', 2),
        ({"items": {"pattern": "^a"}}, '["a", {"b": "\\n]"}, "bc", 1]', '"bc"'),
        ({"items": {"required": ["a"]}}, '["a", {"b": "\\n]"}, 1]', '{"b": "\\n]"}'),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "3", "3"),
        ({}, '[{"x": [{"k": 1, "m": {"k": 2}, "k": 3}]}]', '"k"'),
        ({"uniqueItems": True}, "[1, 2, 1.0]", "1.0"),
        ({}, f'{{"m": {{"k": 1, "k": 2}}, "n": {"1" * 5000}}}', '"k"'),  # beyond Python's limit
    ],
)
def test_wrong_value_is_found_in_the_text(
    verifier: Verifier, schema: Any, answer: str, value: Any
) -> None:
    fault = verifier.fault(json.dumps(schema), answer)
    assert fault is not None
    start, end = wrong_span(answer, fault)
    if isinstance(value, int):
        assert (answer[start:end], fault.path[-1]) == ('"x"', value)
    else:
        assert answer[start:end] == value
    assert answer.index(answer[start:end]) <= start
    if fault.name:
        assert start == answer.rindex('"k"')
