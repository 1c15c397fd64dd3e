"""Conversations of coding agents, replayed turn by turn on templates of each strictness.

`agents/*.json` are written from the public formats of the agents; the texts are ours. Agents send
the whole history each time, so a recording has the places where its requests end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import strict_templates
from support.family_templates import say, talker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

RECORDINGS = {
    file.stem: json.loads(file.read_text("utf-8"))
    for file in sorted((Path(__file__).parent / "agents").glob("*.json"))
}
END_EVENTS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "event: response.completed",
    "/v1/messages?beta=true": "event: message_stop",
}
ANSWER = "Agreed."


@pytest.fixture(
    scope="module", params=["LENIENT", "FIRST_ALONE", "NO_SYSTEM", "WITH_LAST_QUESTION"]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Start a server whose model has this chat template, and always gives the same answer."""
    template = strict_templates.TEMPLATES[request.param]
    with talker(tmp_path_factory.mktemp("agents"), template) as started:
        say(started, ANSWER)
        yield started


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_turn_of_an_agent_is_answered(server: LiveServer, name: str) -> None:
    recording = RECORDINGS[name]
    path, history = recording["path"], recording["history"]
    ignored = set[str]()
    for end in recording["ends"]:
        body = recording["fields"] | {recording["history_field"]: history[:end]}
        response = server.http.post(path, json=body)
        assert response.status_code == 200, f"{end}: {response.text}"
        assert END_EVENTS[path] in response.text
        assert _text_of(response.text) == ANSWER
        ignored.update(response.headers.get("twostroke-ignored", "").split(", "))
    assert ignored >= set(recording["ignored"])


def _text_of(stream: str) -> str:
    """Return the text of a streamed response of any protocol."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: "]
    return "".join(_delta_of(json.loads(line)) for line in lines if line != "[DONE]")


def _delta_of(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text") or "")
    choices = event.get("choices") or [{"delta": {}}]
    return str(choices[0]["delta"].get("content") or "")
