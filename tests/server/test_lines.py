"""Each event and line of a stream is one line for every client, whatever the answer contains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

# All characters at which `str.splitlines` ends a line, but those that also stand for themselves.
TEXT = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei"
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
PROMPT = {"prompt": f"hello{TEXT}"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT | {"max_tokens": 64, "echo": True},
    "/v1/messages": CHAT | {"max_tokens": 64},
    "/v1/responses": {"input": TEXT},
    "/completion": PROMPT,
    "/api/chat": CHAT,
    "/api/generate": PROMPT,
    "/apply-template": CHAT,
    "/detokenize": {"tokens": []},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with talker(tmp_path_factory.mktemp("lines"), family_templates.LLAMA) as live:
        yield live


def texts_in(value: Any) -> str:
    """Return all texts inside a JSON value, joined."""
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "".join(map(texts_in, parts))


@pytest.mark.parametrize("path", [path for path in BODIES if path[1] in "vc" or "api/" in path])
def test_streams_are_read_alike_by_all_readers_of_lines(server: LiveServer, path: str) -> None:
    say(server, TEXT)
    response = server.http.post(path, json=BODIES[path] | {"stream": True})
    assert response.status_code == 200, response.text
    lines = response.text.splitlines()
    assert lines == response.text.removesuffix("\n").split("\n")
    text = ""
    for line in lines:
        data = line.removeprefix("data: ") if "api/" not in path else line
        if data.startswith("{"):
            text += texts_in(json.loads(data))
    assert all(character in text for character in TEXT)


@pytest.mark.parametrize("path", BODIES)
def test_whole_answers_are_one_line(server: LiveServer, path: str) -> None:
    tokens = say(server, TEXT)
    fields = {"tokens": tokens} if path == "/detokenize" else {"stream": False}
    response = server.http.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    assert response.text.splitlines() == [response.text]
    assert TEXT in texts_in(response.json())


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/detokenize"])
def test_errors_are_one_line(server: LiveServer, path: str) -> None:
    response = server.http.post(path, json=BODIES[path] | {"model": f"no{TEXT}"})
    assert response.status_code == 404
    assert response.text.splitlines() == [response.text]
