"""The request fields that set the format of an answer."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import regex

from support.refusals import refused
from support.servers import events, live_server
from twostroke.server.http.limits import RequestLimits
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def text_of(server: LiveServer, **fields: object) -> str:
    all_fields: Fields = {"max_tokens": 100, "temperature": 1.5} | fields
    response = server.chat(**all_fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORM},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_answers_keep_to_a_schema(server: LiveServer, fields: Fields) -> None:
    for seed in range(5):
        value = json.loads(text_of(server, seed=seed, **fields))
        assert set(value) == {"ok", "n"}
        assert value["ok"] in {True, False}
        assert value["n"] in {1, 2}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{3}-[ab]+!"}, r"\d{3}-[ab]+!"),
        ({"structured_outputs": {"regex": r"\d{3}-[ab]+!"}}, r"\d{3}-[ab]+!"),
        ({"guided_choice": ["yes", "no (maybe)"]}, r"yes|no \(maybe\)"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, r"yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, "b*a"),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ],
)
def test_answers_keep_to_other_notations(server: LiveServer, fields: Fields, pattern: str) -> None:
    for seed in range(3):
        text = text_of(server, seed=seed, **fields)
        assert regex.fullmatch(pattern, text, partial=True), text


def test_streams_completions_and_several_answers_keep_to_it(server: LiveServer) -> None:
    response = server.chat(
        stream=True, n=3, seed=1, temperature=1.5, max_tokens=100, response_format=FORM
    )
    texts = ["", "", ""]
    for event in events(response.text)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert all(set(json.loads(text)) == {"ok", "n"} for text in texts)
    body = server.complete(prompt="a", max_tokens=100, seed=1, response_format=FORM).json()
    assert set(json.loads(body["choices"][0]["text"])) == {"ok", "n"}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        ({"guided_json": {"type": "strnig"}}, "guided_json", "strnig"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_regex": "("}, "guided_regex", "regular expression"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": [""]}, "guided_choice", "none of them empty"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "grammar"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs", "no form"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "combined"),
        ({"guided_regex": "a", "response_format": FORM}, "guided_regex", "combined"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "constraint"),
        ({"guided_json": {"not": {"title": "x"}}}, "guided_json", "no value fits"),
    ],
)
def test_formats_that_cannot_be_enforced_are_refused(
    server: LiveServer, fields: Fields, param: str, word: str
) -> None:
    assert word in refused(server.chat(**fields), 400, param)


def test_a_schema_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    options = ServeOptions(limits=RequestLimits(compile_timeout_s=0.0))
    with live_server(tmp_path, options=options) as server:
        response = server.chat(guided_regex="(a|b){3}")
        assert response.status_code == 400
        assert "took longer than 0 s" in response.json()["error"]["message"]


def test_long_chains_of_rules_do_no_harm(tmp_path: Path) -> None:
    """Recursion follows the chains, and must not exceed its stack."""
    options = ServeOptions(limits=RequestLimits(compile_timeout_s=600.0))
    rules = [f'r{i}: "a" r{i + 1}' for i in range(10_000)]
    grammar = "\n".join(["start: r0", *rules, 'r10000: "x"'])
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    schema = {"$defs": definitions | {"d5000": {"const": 1}}, "$ref": "#/$defs/d0"}
    with live_server(tmp_path, options=options) as server:
        assert set(text_of(server, guided_grammar=grammar, max_tokens=5)) == {"a"}
        assert text_of(server, guided_json=schema) == "1"


def test_other_streams_go_on_while_a_large_schema_is_compiled(tmp_path: Path) -> None:
    options = ServeOptions(limits=RequestLimits(compile_timeout_s=600.0))
    words = [f"word {i}" for i in range(12_000)]
    codes: list[int] = []
    with live_server(tmp_path, options=options) as server:
        server.client.grammars.prepare()

        def send_request() -> None:
            codes.append(server.chat(guided_json={"enum": words}, max_tokens=5).status_code)

        thread = threading.Thread(target=send_request)
        thread.start()
        while thread.is_alive():
            assert server.chat(max_tokens=1).status_code == 200
    assert codes == [200]
