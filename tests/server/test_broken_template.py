"""A model whose chat template does not compile can continue texts, and chats say why they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.family_templates import talker
from twostroke.cli.serve import _about_chat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": MESSAGES | {"max_tokens": 2},
    "/v1/messages/count_tokens": MESSAGES,
    "/api/chat": MESSAGES | {"model": "tiny"},
    "/api/generate": {"model": "tiny", "prompt": "hello"},
    "/apply-template": MESSAGES,
    "/tokenize": MESSAGES,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server with a template in another language (Go, as Ollama's templates are)."""
    with talker(tmp_path_factory.mktemp("broken"), "{{ .System }} {{ .Prompt }}") as started:
        yield started


@pytest.mark.parametrize("path", CHATS)
def test_each_chat_is_refused_with_the_reason(server: LiveServer, path: str) -> None:
    response = server.http.post(path, json=CHATS[path])
    assert response.status_code == 400
    assert "The chat template is not valid (line 1)" in response.text


def test_texts_are_continued(server: LiveServer) -> None:
    assert server.complete(max_tokens=2).status_code == 200
    raw = {"model": "tiny", "prompt": "hello", "raw": True, "stream": False}
    assert server.http.post("/api/generate", json=raw).status_code == 200


def test_the_model_says_that_it_cannot_chat(server: LiveServer) -> None:
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["capabilities"]["completion_chat"] is False
    card = server.client.card
    assert card.can_chat is False
    sentence = _about_chat({"tiny": card})
    assert sentence.startswith(" tiny cannot chat, only continue texts: The chat template is not")


def test_a_template_that_fails_on_every_conversation_is_named_at_the_start(tmp_path: Path) -> None:
    with talker(tmp_path, "{{ raise_exception('no conversation is good enough') }}") as server:
        sentence = _about_chat({"tiny": server.client.card})
    assert sentence.startswith(" tiny cannot chat, only continue texts: ")
    assert "no conversation is good enough" in sentence
