"""Chats on llama-server's own paths, and llama-server's further fields of chats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.servers import events

if TYPE_CHECKING:
    from support.servers import LiveServer

PATH = "/chat/completions"
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
USER = {"role": "user", "content": "a"}
BEGUN = {"role": "assistant", "content": "the world"}


def post(server: LiveServer, path: str, *messages: Any, **fields: Any) -> Any:
    response = server.http.post(path, json={"messages": [*messages], **SHORT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("content", ["the world", [{"type": "text", "text": "the world"}]])
def test_a_last_answer_is_continued(server: LiveServer, content: Any) -> None:
    last = BEGUN | {"content": content}
    continued = post(server, f"/v1{PATH}", USER, last, continue_final_message=True)
    result = post(server, PATH, USER, last)
    assert result["choices"] == continued["choices"]
    assert result["usage"]["prompt_tokens"] == continued["usage"]["prompt_tokens"]


def test_a_last_answer_is_not_continued_where_the_request_says_so(server: LiveServer) -> None:
    usual = post(server, f"/v1{PATH}", USER, BEGUN)["usage"]["prompt_tokens"]
    for fields in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        result = post(server, PATH, USER, BEGUN, **fields)
        assert result["usage"]["prompt_tokens"] == usual
    closed = post(server, PATH, USER, BEGUN, add_generation_prompt=False)["usage"]
    assert closed["prompt_tokens"] < usual


def test_an_answer_with_calls_is_not_continued(server: LiveServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": "so", "tool_calls": [call]}
    assert post(server, PATH, USER, called)["choices"]


@pytest.mark.parametrize("path", [PATH, "/apply-template"])
def test_two_last_answers_are_refused(server: LiveServer, path: str) -> None:
    response = server.http.post(path, json={"messages": [USER, BEGUN, BEGUN]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("messages must not end with two messages")


def test_verbose_answers_show_the_prompt_and_the_raw_answer(server: LiveServer) -> None:
    tokenizer = server.client.card.tokenizer
    bodies = {
        f"/v1{PATH}": {"messages": [USER]},
        PATH: {"messages": [USER]},
        "/v1/completions": {"prompt": "a"},
    }
    for path, body in bodies.items():
        verbose_answer = server.http.post(path, json=body | SHORT | {"verbose": True}).json()
        verbose_fields = verbose_answer["__verbose"]
        prompt = "a"
        if "messages" in body:
            prompt = server.http.post("/apply-template", json=body).json()["prompt"]
        assert verbose_fields["prompt"] == prompt
        assert (verbose_fields["tokens_predicted"], verbose_fields["stop_type"]) == (4, "limit")
        assert verbose_fields["content"] == tokenizer.decode(
            verbose_fields["tokens"], skip_special=False
        )
        assert verbose_fields["generation_settings"]["n_predict"] == 4
        options = SHORT | {"verbose": True, "stream": True}
        *chunks, _ = events(server.http.post(path, json=body | options).text)
        *others, last = [chunk.get("__verbose") for chunk in chunks]
        assert not any(others)
        assert (last["prompt"], last["content"]) == (prompt, verbose_fields["content"])
        plain = server.http.post(path, json=body | SHORT).json()
        assert "__verbose" not in plain
        assert plain["choices"] == verbose_answer["choices"]
