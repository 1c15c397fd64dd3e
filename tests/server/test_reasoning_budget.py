"""Budgets of reasoning on all protocols, and the server's default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from support.refusals import refused
from support.servers import events
from twostroke.engine.chat.reasoning import EFFORT_BUDGETS
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

HELLO = [{"role": "user", "content": "hello"}]
DIGITS = "0123456789"  # a token each
CLOSING = "\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BUDGET_NAMES = (
    *("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget", "thinking_budget"),
)


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose chat template always opens the reasoning."""
    with talker(tmp_path_factory.mktemp("always"), family_templates.ALWAYS_THINKS) as live:
        yield live


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model begins with reasoning, unless a request turns it off."""
    with talker(tmp_path_factory.mktemp("thinks"), family_templates.THINKS) as live:
        yield live


def think_long(server: LiveServer, count: int, answer: str = "It is so.", begin: str = "") -> str:
    """Let the model think long, but answer after `count` tokens; return the reasoning till then."""
    digits = DIGITS * (count // 10 + 2)
    say(server, begin + digits, f"{begin}{digits[:count]}{CLOSING}{answer}")
    return digits[:count]


def post(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("name", BUDGET_NAMES)
def test_a_budget_ends_the_reasoning(always: LiveServer, name: str) -> None:
    thought = think_long(always, 6)
    response = always.chat(**{name: 6})
    body = response.json()
    assert "twostroke-ignored" not in response.headers
    [choice] = body["choices"]
    assert choice["message"]["reasoning_content"] == thought
    assert choice["message"]["content"] == "It is so."
    assert choice["finish_reason"] == "stop"
    tokenizer = always.client.card.tokenizer
    num_closing = len(tokenizer.encode_exact(CLOSING.rstrip()))
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 6 + num_closing
    *chunks, last, _ = events(
        always.chat(**{name: 6}, stream=True, stream_options={"include_usage": True}).text
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is so."
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == thought
    assert last["usage"]["completion_tokens_details"] == details


def test_a_model_that_opens_its_reasoning_has_a_budget(thinking: LiveServer) -> None:
    think_long(thinking, 4, begin="<think>\n")
    message = thinking.chat(reasoning_budget=5).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("0123", "It is so.")
    say(thinking, "It is so.")
    message = thinking.chat(reasoning_budget=5).json()["choices"][0]["message"]
    assert "reasoning_content" not in message


def test_budgets_of_other_protocols_end_the_reasoning(always: LiveServer) -> None:
    thought = think_long(always, 6)
    on = {"type": "enabled", "budget_tokens": 6}
    body = post(always, "/v1/messages", messages=HELLO, max_tokens=100, thinking=on).json()
    assert [block.get("thinking", block.get("text")) for block in body["content"]] == [
        thought,
        "It is so.",
    ]
    assert body["stop_reason"] == "end_turn"


def test_switches_of_other_clients_work_in_chats(always: LiveServer) -> None:
    say(always, "It is so.")
    plain = always.chat(reasoning_effort="none").json()["usage"]["prompt_tokens"]
    for off in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}):
        response = always.chat(**off)
        assert "twostroke-ignored" not in response.headers
        assert response.json()["usage"]["prompt_tokens"] == plain
        assert response.json()["choices"][0]["message"]["content"] == "It is so."
    thought = think_long(always, 6)
    thinking = {"type": "enabled", "budget_tokens": 6}
    message = always.chat(thinking=thinking).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, "It is so.")
    response = always.chat(thinking={"type": "much"}, enable_thinking="yes")
    assert response.headers["twostroke-ignored"] == "thinking, enable_thinking"
    refusal_text = refused(
        always.chat(thinking={"budget_tokens": -5}), 400, "thinking.budget_tokens"
    )
    assert "must be from -1" in refusal_text


def test_efforts_are_budgets_where_the_template_has_none(always: LiveServer) -> None:
    thought = think_long(always, EFFORT_BUDGETS["minimal"])
    message = always.chat(reasoning_effort="minimal").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, "It is so.")
    body = post(always, "/v1/responses", input="hello", reasoning={"effort": "minimal"}).json()
    assert body["output"][0]["content"][0]["text"] == thought
    body = post(always, "/api/chat", messages=HELLO, think="minimal", stream=False).json()
    assert (body["message"]["thinking"], body["message"]["content"]) == (thought, "It is so.")


def test_structured_answers_and_calls_follow_the_budget(always: LiveServer) -> None:
    thought = think_long(always, 6, answer='{"a": 1}')
    message = always.chat(reasoning_budget=6, response_format=FORM).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, '{"a": 1}')
    thought = think_long(always, 6, answer=CALL)
    for choice in ("auto", "required"):
        fields: Fields = {"tools": [TOOL], "tool_choice": choice, "reasoning_budget": 6}
        message = always.chat(**fields).json()["choices"][0]["message"]
        assert message["reasoning_content"] == thought
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_an_answer_has_room_within_max_tokens(always: LiveServer) -> None:
    num_closing = len(always.client.card.tokenizer.encode_exact(CLOSING))
    thought = think_long(always, 80 - 20 - num_closing, answer="It is so.")
    [choice] = always.chat(reasoning_budget=500, max_tokens=80).json()["choices"]
    assert choice["message"]["reasoning_content"] == thought
    assert choice["message"]["content"] == "It is so."
    [choice] = always.chat(max_tokens=30).json()["choices"]  # no budget: the answer is cut
    assert choice["message"]["content"] == ""


def test_budget_0_is_an_answer_at_once(always: LiveServer, thinking: LiveServer) -> None:
    say(always, "It is so.")
    prompts = []
    for fields in ({"reasoning_budget": 0}, {"reasoning_effort": "none"}):
        body = always.chat(**fields).json()
        assert body["choices"][0]["message"]["content"] == "It is so."
        prompts.append(body["usage"]["prompt_tokens"])
    assert prompts[0] == prompts[1]
    say(thinking, "It is so.")
    body = thinking.chat(reasoning_budget=0).json()
    off = thinking.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert body["usage"]["prompt_tokens"] == off["usage"]["prompt_tokens"]


def test_a_template_without_a_switch_is_closed_at_once(tmp_path: Any) -> None:
    template = family_templates.THINKS.replace("enable_thinking is false", "false")
    with talker(tmp_path, template.replace("enable_thinking is defined", "false")) as server:
        say(server, "<think>" + DIGITS, f"<think>{CLOSING}It is so.")
        response = server.chat(reasoning_budget=0)
        message = response.json()["choices"][0]["message"]
        assert "twostroke-ignored" not in response.headers
        assert message["content"] == "It is so."
        assert not message.get("reasoning_content")


def test_the_server_has_a_default_budget(tmp_path: Any) -> None:
    options = ServeOptions(drain_s=1, reasoning_budget=4)
    with talker(tmp_path, family_templates.ALWAYS_THINKS, options=options) as server:
        think_long(server, 4)
        message = server.chat().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("0123", "It is so.")
        think_long(server, 7)
        message = server.chat(reasoning_budget=7).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "0123456"
        say(server, DIGITS + "</think>It is so.")
        message = server.chat(reasoning_budget=-1).json()["choices"][0]["message"]
        assert message["reasoning_content"] == DIGITS


def test_a_default_of_0_leaves_requests_that_ask_for_reasoning(tmp_path: Any) -> None:
    options = ServeOptions(drain_s=1, reasoning_budget=0)
    with talker(tmp_path, family_templates.ALWAYS_THINKS, options=options) as server:
        say(server, DIGITS + "</think>It is so.")
        message = server.chat(reasoning_effort="high").json()["choices"][0]["message"]
        assert message["reasoning_content"] == DIGITS
        message = server.chat().json()["choices"][0]["message"]
        assert "reasoning_content" not in message


@pytest.mark.parametrize("value", [-2, 2**40, "many", 1.5])
def test_wrong_budgets_are_refused(always: LiveServer, value: Any) -> None:
    message = refused(always.chat(thinking_budget_tokens=value), 400, "thinking_budget_tokens")
    assert "must be" in message


def test_a_budget_beyond_the_context_is_refused_by_strict_limits(tmp_path: Any) -> None:
    options = ServeOptions(drain_s=1, strict_limits=True)
    with talker(tmp_path, family_templates.ALWAYS_THINKS, options=options) as server:
        message = refused(server.chat(thinking_token_budget=4096), 400, "thinking_token_budget")
        assert "must be less than the context length of 4096, got 4096" in message
