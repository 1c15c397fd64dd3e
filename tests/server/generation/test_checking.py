"""Answers whose grammar is weaker than their schema are checked when they are finished."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from support.waiting import wait_for
from twostroke.engine.settling import MAX_REDRAWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.servers import LiveServer

    Fields = dict[str, Any]

# Names may repeat in a grammar's text, so that two members need not be two.
TWO: Fields = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
RIGHT = '{"a": 1, "b": 2}'
# As many wrong answers as are drawn at most: each repeats a name that is not excluded yet.
_NAMES = ("One", "Ones", "Onesie", "Onto", "Oak", "Two", "Axe", "Bee", "Cap")
_MEMBERS = ", ".join(f'"{name}": 1' for name in _NAMES)
WRONGS = [f'{{{_MEMBERS}, "{name}": 2}}' for name in _NAMES]
WRONG = WRONGS[0]
TALK = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "count", "parameters": TWO}}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": TWO}}}
CHAT = "/v1/chat/completions"
PROTOCOLS: dict[str, Fields] = {
    CHAT: {"messages": TALK, **FORM},
    "/v1/completions": {"prompt": "hello", "guided_json": TWO, "max_tokens": 400},
    "/v1/responses": {
        "input": "hello",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": TWO}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model answers as the test says, if the grammar allows it."""
    with talker(tmp_path_factory.mktemp("checks"), family_templates.HERMES) as live:
        yield live


def counts(server: LiveServer) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    results = [line.rsplit(" ", 1) for line in lines if line.startswith("twostroke_constraint")]
    return {name: float(value) for name, value in results if "_created" not in name}


def check_counts(
    server: LiveServer, path: str, answers: Sequence[str], body: Fields
) -> dict[str, float]:
    """Return what the metrics count for the check of an answer and of its replacements."""
    before = counts(server)
    say(server, *answers)
    response = server.http.post(path, json=body | {"temperature": 0})
    assert response.status_code == 200, response.text
    wait_for(lambda: counts(server) != before)
    after = counts(server)
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


MISSED = {
    'twostroke_constraint_checks_total{result="invalid"}': MAX_REDRAWS + 1,
    'twostroke_constraint_misses_total{keyword="repeated member"}': MAX_REDRAWS + 1,
    "twostroke_constraint_redraws_total": MAX_REDRAWS,
}
VALID_COUNT = {'twostroke_constraint_checks_total{result="valid"}': 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PROTOCOLS)
def test_wrong_answer_is_counted_and_a_right_one_is_not(
    server: LiveServer, path: str, stream: bool
):
    body = PROTOCOLS[path] | {"stream": stream}
    assert check_counts(server, path, WRONGS, body) == MISSED
    assert check_counts(server, path, [RIGHT], body) == VALID_COUNT


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_of_calls_are_checked(server: LiveServer, stream: bool):
    body = {"messages": TALK, "tools": [TOOL], "stream": stream}
    for texts, expected in ((WRONGS, MISSED), ([RIGHT], VALID_COUNT)):
        calls = [
            f'<tool_call>\n{{"name": "count", "arguments": {text}}}\n</tool_call>' for text in texts
        ]
        assert check_counts(server, CHAT, calls, body) == expected


def test_log_names_keyword_and_request_but_no_content(
    server: LiveServer, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "twostroke.serve"):
        check_counts(server, CHAT, WRONGS, PROTOCOLS[CHAT])
        wait_for(lambda: caplog.records)
    [record] = caplog.records
    figures = record.figures  # type: ignore[attr-defined]
    assert figures["keyword"] == "repeated member"
    assert figures["request_id"]
    assert '"a"' not in json.dumps(figures)


def test_answer_that_was_cut_or_that_the_grammar_holds_is_not_checked(server: LiveServer):
    before = counts(server)
    object_schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for answer, body in (
        (WRONG, {"guided_json": TWO, "max_tokens": 3}),
        (WRONG, {"guided_json": TWO, "stop": ', "Ones'}),
        ('{"a": 1}', {"guided_json": object_schema}),
    ):
        say(server, answer)
        assert server.chat(temperature=0, **body).status_code == 200
    assert check_counts(server, CHAT, [RIGHT], PROTOCOLS[CHAT]) == VALID_COUNT
    assert sum(counts(server).values()) == sum(before.values()) + 1


def test_schema_that_can_be_neither_held_nor_checked_is_refused(server: LiveServer):
    schema = {"type": "string", "pattern": r"^(?<letter>a)\k<letter>$"}
    response = server.chat(guided_json=schema)
    assert response.status_code == 400
    assert "guided_json" in response.text
