"""Reasoning before answers, as clients of OpenAI's protocol see it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from support.refusals import refused
from support.servers import events
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

Fields = dict[str, Any]

THOUGHT = "Well.\n\nI <know> it: </thin"
REASONED_ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nIt is so.\n"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model begins with reasoning, unless a request turns it off."""
    with talker(tmp_path_factory.mktemp("thinks"), family_templates.THINKS) as live:
        yield live


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose chat template always opens the reasoning."""
    with talker(tmp_path_factory.mktemp("always"), family_templates.ALWAYS_THINKS) as live:
        yield live


def answer(server: LiveServer, **fields: Any) -> Fields:
    response = server.chat(temperature=0, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: LiveServer, **fields: Any) -> tuple[Fields, Fields]:
    """Return the message and the last choice of a stream, with its chunks joined, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events(server.chat(temperature=0, **options, **fields).text)
    message: Fields = {}
    for chunk in chunks:
        for key, value in chunk["choices"][0]["delta"].items():
            if key == "tool_calls":
                calls_so_far = message.setdefault(key, [])
                for call in value:
                    if call["index"] == len(calls_so_far):
                        calls_so_far.append(
                            {"function": {"name": call["function"]["name"], "arguments": ""}}
                        )
                    calls_so_far[-1]["function"]["arguments"] += call["function"]["arguments"]
            elif value:  # content begins empty, and there is no refusal
                message[key] = message.get(key, "") + value
    return message, {"finish_reason": chunks[-1]["choices"][0]["finish_reason"], **last}


def test_reasoning_is_separated_from_the_answer(thinking: LiveServer, always: LiveServer) -> None:
    for server, text in (
        (thinking, REASONED_ANSWER),
        (always, REASONED_ANSWER.removeprefix("<think>")),
    ):
        tokens = say(server, text)
        body = answer(server)
        [choice] = body["choices"]
        assert choice["message"]["reasoning_content"] == THOUGHT
        assert choice["message"]["reasoning"] == THOUGHT
        assert choice["message"]["content"] == "It is so.\n"
        assert choice["finish_reason"] == "stop"
        usage = body["usage"]
        assert usage["completion_tokens"] == len(tokens) + 1
        end = server.client.card.tokenizer.encode("\n\nIt is so.\n")
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert len(tokens) - reasoning in {len(end), len(end) - 1}
        message, last = streamed(server)
        assert message.pop("role") == "assistant"
        assert message == {key: choice["message"][key] for key in message}
        assert len(message) == 3
        assert last["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_reasoning_comes_while_it_is_written(thinking: LiveServer) -> None:
    say(thinking, REASONED_ANSWER)
    chunks = events(thinking.chat(stream=True).text)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    kinds = ["".join(sorted(delta)) for delta in deltas[1:-1]]
    assert set(kinds) == {"content", "reasoningreasoning_content"}
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count("reasoningreasoning_content") > 5


def test_answers_without_reasoning_are_answers(thinking: LiveServer) -> None:
    for text in ("It is so.", "So: <think>x</think>", "<thing>"):
        say(thinking, text)
        message = answer(thinking)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text, "refusal": None}
        joined, last = streamed(thinking)
        assert joined == {"role": "assistant", "content": text}
        assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_cut_off_reasoning_is_sent_without_an_answer(
    thinking: LiveServer, always: LiveServer
) -> None:
    for server, text, num_tokens in ((thinking, REASONED_ANSWER, 12), (always, THOUGHT, 10)):
        say(server, text)
        [choice] = answer(server, max_tokens=num_tokens)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == ""
        thought = choice["message"]["reasoning_content"]
        assert 0 < len(thought) < len(THOUGHT)
        assert THOUGHT.startswith(thought)
        message, last = streamed(server, max_tokens=num_tokens)
        assert (message["reasoning_content"], last["finish_reason"]) == (thought, "length")
        details = last["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == num_tokens


def test_stop_strings_end_the_answer_and_not_the_reasoning(thinking: LiveServer) -> None:
    say(thinking, REASONED_ANSWER)
    [choice] = answer(thinking, stop=["\n\n", "I", " so"])["choices"]
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == ""
    [choice] = answer(thinking, stop=[" so"])["choices"]
    assert choice["message"]["content"] == "It is"
    assert choice["finish_reason"] == "stop"


def test_logprobs_tell_of_every_token(thinking: LiveServer) -> None:
    tokens = say(thinking, REASONED_ANSWER)
    whole_logprobs = answer(thinking, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(whole_logprobs) == len(tokens)
    chunks = events(thinking.chat(stream=True, logprobs=True, temperature=0).text)[:-1]
    delta_logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(delta["content"]) for delta in delta_logprobs if delta) == len(tokens)


def test_switches_of_the_template_are_obeyed(thinking: LiveServer) -> None:
    say(thinking, REASONED_ANSWER)
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    counts = set()
    for fields in (kwargs, {"reasoning_effort": "none"}):
        body = answer(thinking, **fields)
        assert body["choices"][0]["message"]["content"] == REASONED_ANSWER  # it was not to reason
        counts.add(body["usage"]["prompt_tokens"])
    plain = answer(thinking, reasoning_effort="high")
    assert plain["choices"][0]["message"]["reasoning_content"] == THOUGHT
    assert len(counts) == 1
    assert counts.pop() > plain["usage"]["prompt_tokens"]
    request = {"messages": [{"role": "user", "content": "hello"}]}
    count = {"count": 0}
    for fields in ({}, kwargs):
        tokenized = thinking.http.post("/tokenize", json={**request, **fields}).json()
        assert tokenized["count"] > count["count"]
        count = tokenized


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"chat_template_kwargs": {"messages": []}}, None, "template itself uses"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
        (
            {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
            "messages[0].reasoning_content",
            "assistant",
        ),
    ],
)
def test_invalid_reasoning_options_are_refused(
    thinking: LiveServer, fields: Fields, param: str | None, word: str
) -> None:
    param = param or f"chat_template_kwargs.{next(iter(fields['chat_template_kwargs']))}"
    assert word in refused(thinking.chat(**fields), 400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ],
)
def test_reasoning_that_the_prompt_opens_can_be_switched_off(
    always: LiveServer, fields: Fields
) -> None:
    say(always, "x</think>y")
    response = always.chat(**fields)
    assert "twostroke-ignored" not in response.headers
    message = response.json()["choices"][0]["message"]
    assert message["content"] == "x</think>y"
    assert "reasoning_content" not in message


def test_reasoning_options_that_the_template_ignores_are_named(thinking: LiveServer) -> None:
    for fields in (
        {"reasoning_effort": "much"},
        {"chat_template_kwargs": {"enable_thinkin": 1}},
    ):
        (name,) = fields
        response = thinking.chat(**fields)
        assert response.status_code == 200
        assert response.headers["twostroke-ignored"].startswith(name)


def test_a_form_of_the_answer_begins_behind_the_reasoning(
    thinking: LiveServer, always: LiveServer
) -> None:
    for server, text in (
        (thinking, '<think>{"b": </think>\n\n{"a": 1}'),
        (always, 'x</think>{"a": 1}'),
    ):
        say(server, text)
        message = answer(server, response_format=FORM)["choices"][0]["message"]
        assert message["content"] == '{"a": 1}'
        assert len(message["reasoning_content"]) in {1, 5}
    say(thinking, '{"a": 1}')
    message = answer(thinking, response_format=FORM)["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'
    say(thinking, '<think>x</think>{"b": 1}')
    message = answer(thinking, response_format=FORM)["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'


def test_a_sampled_answer_keeps_to_its_format(thinking: LiveServer, always: LiveServer) -> None:
    for server in (thinking, always):
        server.backend.script = ()
        for seed in range(4):
            body = server.chat(
                guided_regex="[0-9]{3}", seed=seed, max_tokens=60, chat_template_kwargs={}
            ).json()
            [choice] = body["choices"]
            content = choice["message"]["content"]
            assert content.isdigit() or not content
            assert choice["finish_reason"] == "length" or len(content) == 3


def test_calls_come_behind_the_reasoning(thinking: LiveServer, always: LiveServer) -> None:
    for server, begin in ((thinking, "<think>"), (always, "")):
        say(server, f"{begin}I call <tool_call> it.</think>\n\n{CALL}")
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            fields = {"tools": [TOOL], "tool_choice": choice}
            whole_choice = answer(server, **fields)["choices"][0]
            assert whole_choice["finish_reason"] == "tool_calls"
            assert whole_choice["message"]["content"] is None
            assert whole_choice["message"]["reasoning_content"] == "I call <tool_call> it."
            [call] = whole_choice["message"]["tool_calls"]
            assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
            message, last = streamed(server, **fields)
            assert message["reasoning_content"] == "I call <tool_call> it."
            assert message["tool_calls"] == [{"function": call["function"]}]
            assert last["finish_reason"] == "tool_calls"


def test_reasoning_after_a_call_is_reasoning(thinking: LiveServer) -> None:
    say(thinking, f"<think>\nI call.\n</think>\n\n{CALL}\n<think>\nIt is done.\n</think>\n\nDone.")
    fields: Fields = {"tools": [TOOL]}
    body = answer(thinking, **fields)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "I call.It is done."
    assert (message["content"], len(message["tool_calls"])) == ("Done.", 1)
    joined, last = streamed(thinking, **fields)
    assert joined["reasoning_content"] == message["reasoning_content"]
    assert joined["content"] == "Done."
    details = body["usage"]["completion_tokens_details"]
    assert last["usage"]["completion_tokens_details"] == details
    tokenizer = thinking.client.card.tokenizer
    num_later = len(tokenizer.encode("\n<think>\nIt is done.\n</think>"))
    num_first = len(tokenizer.encode("<think>\nI call.\n</think>"))
    assert num_first + num_later - 1 <= details["reasoning_tokens"] <= num_first + num_later + 1
    tool = {"type": "function", **TOOL["function"]}
    fields = {"input": "hello", "tools": [tool], "temperature": 0}
    items = thinking.http.post("/v1/responses", json=fields).json()["output"]
    assert [item["type"] for item in items] == [
        *("reasoning", "function_call", "reasoning", "message"),
    ]
    back = [*items[:2], {"type": "function_call_output", "call_id": items[1]["call_id"]}]
    back[-1]["output"] = "x"
    assert items[2]["content"][0]["text"] == "It is done."
    sent = {**fields, "input": [{"role": "user", "content": "a"}, *back, *items[2:]]}
    assert thinking.http.post("/v1/responses", json=sent).status_code == 200


def test_reasoning_can_be_sent_back(thinking: LiveServer) -> None:
    say(thinking, "ok")
    counts = []
    for fields in ({}, {"reasoning_content": "b c d"}, {"reasoning": "b c d"}):
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "x", **fields},
            {"role": "user", "content": "a"},
        ]
        counts.append(answer(thinking, messages=messages)["usage"]["prompt_tokens"])
    assert counts[0] < counts[1] == counts[2]
    message = {"role": "assistant", "content": None, "reasoning_content": "b"}
    both = [{"role": "user", "content": "a"}, message]
    assert answer(thinking, messages=both)["choices"][0]["message"]["content"] == "ok"


def test_begun_answers_go_on_where_they_are(thinking: LiveServer) -> None:
    say(thinking, "x</think>y")
    for begun, thought in (("<think>well", "x"), ("The answer", None), ("", None)):
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": begun},
        ]
        fields = {"messages": messages, "continue_final_message": True}
        fields["add_generation_prompt"] = False
        message = answer(thinking, **fields)["choices"][0]["message"]
        assert message.get("reasoning_content") == thought
        assert message["content"] == ("x</think>y" if thought is None else "y")


def test_a_request_may_leave_reasoning_in_the_text(thinking: LiveServer) -> None:
    say(thinking, REASONED_ANSWER)
    for name in ("auto", "deepseek"):
        message = answer(thinking, reasoning_format=name)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "It is so.\n")
    for message in (
        answer(thinking, reasoning_format="none")["choices"][0]["message"],
        streamed(thinking, reasoning_format="none")[0],
    ):
        assert message["content"] == REASONED_ANSWER
        assert "reasoning_content" not in message


def test_reasoning_may_be_left_in_the_text(tmp_path: Any) -> None:
    options = ServeOptions(drain_s=1, splits_reasoning=False)
    with talker(tmp_path, family_templates.THINKS, options=options) as server:
        say(server, REASONED_ANSWER)
        body = answer(server)
        message = body["choices"][0]["message"]
        assert message == {"role": "assistant", "content": REASONED_ANSWER, "refusal": None}
        assert (
            answer(server, stop=["It"])["choices"][0]["message"]["content"] == REASONED_ANSWER[:-10]
        )
        say(server, '<think>a</think>{"a": 1}')
        text = answer(server, response_format=FORM)["choices"][0]["message"]["content"]
        assert json.loads(text.partition("</think>")[2]) == {"a": 1}
        separated = answer(server, reasoning_format="deepseek")["choices"][0]["message"]
        assert separated["reasoning_content"] == "a"


def test_marks_that_are_control_tokens_are_seen(tmp_path: Any) -> None:
    marks = ("[THINK]", "[/THINK]")
    with talker(tmp_path, family_templates.GRADES, marks) as server:
        say(server, "hm[/THINK]yes")
        fields: Fields = {"reasoning_effort": "low"}
        message = answer(server, **fields)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        message = answer(server, guided_choice=["yes", "no"], **fields)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        message = answer(server, stop=["m"], **fields)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        say(server, "no[/THINK]ise")  # none of it is reasoning: it was switched off
        assert answer(server)["choices"][0]["message"]["content"] == "noise"
