"""`serve --stable-prefix`: prompts that differ in changing lines share all their cached tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.tiny import Tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

Fields = dict[str, Any]

PAGE = 16  # tokens
RULES = "Read the file before you change it. " * 20
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("stable")
    with live_server(folder, tiny=Tiny(context_length=4096), stable_prefix=True) as live:
        yield live


def header(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=fa69{number};"


def env(number: int) -> str:
    return f"<env>\nDirectory: /src\nToday's date: 2026-11-0{number}\n</env>\n"


def anthropic(number: int, rules: str) -> tuple[str, Fields]:
    blocks = (header(number), "You are an agent.", env(number) + rules)
    system = [{"type": "text", "text": text} for text in blocks]
    return "/v1/messages", {"system": system, "messages": HELLO, "max_tokens": 1}


def responses(number: int, rules: str) -> tuple[str, Fields]:
    context = {"role": "user", "content": [{"type": "input_text", "text": env(number)}]}
    fields = {"instructions": f"{header(number)}\n{rules}", "input": [context, *HELLO]}
    return "/v1/responses", {**fields, "max_output_tokens": 1}


def chat(number: int, rules: str) -> tuple[str, Fields]:
    system = {"role": "system", "content": f"{header(number)}\n{env(number)}{rules}"}
    return "/v1/chat/completions", {"messages": [system, *HELLO], "max_tokens": 1}


def tokens_of(path: str, body: Fields) -> tuple[int, int]:
    """Return the prompt tokens of a response, and those that were in the prefix cache."""
    usage = body["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    if path == "/v1/responses":
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("make", [anthropic, responses, chat])
def test_requests_that_differ_in_changing_lines_share_the_whole_prompt(
    server: LiveServer, shared_server: LiveServer, make: Any
) -> None:
    rules = f"{make.__name__}: {RULES}"
    for number in (1, 2):
        path, fields = make(number, rules)
        response = server.http.post(path, json=fields)
        assert response.status_code == 200, response.text
        num_prompt, num_cached = tokens_of(path, response.json())
        assert response.headers["twostroke-removed-lines"] == "billing, date"
    assert num_cached == (num_prompt - 1) // PAGE * PAGE
    for number in (1, 2):  # off by default
        path, fields = make(number, make.__name__)
        response = shared_server.http.post(path, json=fields)
        assert "twostroke-removed-lines" not in response.headers
    assert tokens_of(path, response.json())[1] < PAGE * 6  # the header has that many tokens


def test_tokens_are_counted_as_the_prompt_is_made(server: LiveServer) -> None:
    path, fields = anthropic(1, RULES)
    body = server.http.post(path, json=fields).json()
    del fields["max_tokens"]
    num_counted = server.http.post("/v1/messages/count_tokens", json=fields).json()["input_tokens"]
    assert num_counted == tokens_of(path, body)[0]


def test_prompts_without_such_lines_are_unchanged(
    server: LiveServer, shared_server: LiveServer
) -> None:
    fields = {"messages": [{"role": "system", "content": "Say the date 2026."}, *HELLO]}
    bodies = []
    for live in (server, shared_server):
        response = live.chat(**fields, max_tokens=1)
        assert "twostroke-removed-lines" not in response.headers
        bodies.append(response.json()["usage"]["prompt_tokens"])
    assert bodies[0] == bodies[1]


def test_removed_lines_are_counted(server: LiveServer) -> None:
    path, fields = chat(1, "x")
    server.http.post(path, json=fields)
    metrics = server.http.get("/metrics").text
    assert 'twostroke_removed_lines_total{kind="billing"}' in metrics
