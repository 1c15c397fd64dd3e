"""Answers with many log-probabilities are encoded while other clients are served."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from support.waiting import wait_for
from twostroke.server.generation import responses
from twostroke.server.protocols.openai.chat_reply import ChatEncoder
from twostroke.server.protocols.openai.completions_reply import CompletionEncoder

if TYPE_CHECKING:
    from support.servers import LiveServer

MESSAGES = [{"role": "user", "content": "hello"}]
MANY: list[tuple[str, type, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        ChatEncoder,
        {"messages": MESSAGES, "n": 16, "max_tokens": 20, "logprobs": True, "top_logprobs": 20},
    ),
    (
        "/v1/completions",
        CompletionEncoder,
        {"prompt": ["hello " * 200] * 5, "echo": True, "logprobs": 5, "max_tokens": 0},
    ),
]


@pytest.mark.parametrize(("path", "encoder", "body"), MANY)
def test_others_are_served_while_an_answer_with_many_scores_is_written(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    encoder: Any,
    body: dict[str, Any],
) -> None:
    write, has_begun, may_go_on = encoder.whole_response, threading.Event(), threading.Event()

    def slow(self: Any, stream: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(60)
        return write(self, stream)

    body |= {"ignore_eos": True, "seed": 1}
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as threads:
        patched.setattr(encoder, "whole_response", slow)
        written = threads.submit(lambda: server.http.post(path, json=body).json())
        wait_for(has_begun.is_set)
        try:
            assert server.http.get("/health", timeout=5).status_code == 200
        finally:
            may_go_on.set()
        response = written.result()
    monkeypatch.setattr(responses, "_MAX_INLINE_LOGPROBS", 1 << 30)
    inline = server.http.post(path, json=body).json()
    assert tokens(response) == tokens(inline)


def tokens(answer: Any) -> list[list[str]]:
    results = [choice["logprobs"] for choice in answer["choices"]]
    return [
        result.get("tokens") or [token["token"] for token in result["content"]]
        for result in results
    ]
