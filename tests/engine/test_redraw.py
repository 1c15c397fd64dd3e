"""Answers that break their JSON schema are generated again in Python, or reported."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from twostroke.core.constraint import Constraint
from twostroke.core.errors import SchemaMissError
from twostroke.core.request import FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine import settling
from twostroke.engine.llm import LLM, AsyncLLM
from twostroke.engine.settling import MAX_REDRAWS, is_complete_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

TALK = [{"role": "user", "content": "hello"}]
TAGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["title", "tags"],
    "additionalProperties": False,
}
WRONG = '{"title": "One", "tags": ["One", "Ones", "One"]}'
DUPLICATES = '{"title": "One", "tags": ["One", "Ones", "Ones"]}'
RIGHT = '{"title": "One", "tags": ["One", "Ones", "Onesie"]}'
# As many wrong answers as are drawn at most: each repeats an item that is not excluded yet.
_ITEMS = ("One", "Ones", "Onesie", "Onto", "Oak", "Two", "Axe", "Bee", "Cap")
WRONGS = [json.dumps({"title": "One", "tags": [*_ITEMS, item]}) for item in _ITEMS]
MISS = "uniqueItems (/properties/tags)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with talker(tmp_path_factory.mktemp("redraw"), family_templates.HERMES) as live:
        yield live


class Shared(LLM):
    """An `LLM` on a server's engine, whose answers a test chooses."""

    def __init__(self, server: LiveServer) -> None:
        self.engine: Any = SimpleNamespace(card=server.client.card, client=server.client)


class AsyncShared(AsyncLLM):
    """An `AsyncLLM` on a server's engine, whose answers a test chooses."""

    def __init__(self, server: LiveServer) -> None:
        self.engine: Any = SimpleNamespace(card=server.client.card, client=server.client)


def all_ways(server: LiveServer, params: SamplingParams) -> Iterator[tuple[str, str]]:
    """Yield the text and the broken rule of an answer, for each way to request it."""
    llm = Shared(server)
    [[answer]] = llm.generate("hello", params)
    yield answer.text, answer.schema_miss
    [answer] = llm.chat(TALK, params)
    yield answer.text, answer.schema_miss
    outputs = list(llm.stream("hello", params))
    yield "".join(output.text for output in outputs), outputs[-1].schema_miss
    chunks = list(llm.chat(TALK, params, stream=True))
    yield "".join(chunk.text for chunk in chunks), chunks[-1].schema_miss

    async def read() -> list[Any]:
        return [output async for output in AsyncShared(server).generate("hello", params)]

    async def read_chat() -> list[Any]:
        return [chunk async for chunk in AsyncShared(server).chat(TALK, params)]

    for reading in (read(), read_chat()):
        outputs = asyncio.run(reading)
        yield "".join(output.text for output in outputs), outputs[-1].schema_miss


def asking(*, is_strict: bool = False, **fields: Any) -> SamplingParams:
    form = Constraint.json_schema(TAGS, is_strict=is_strict)
    return SamplingParams(temperature=0, max_tokens=200, constraint=form, **fields)


def test_a_wrong_answer_is_generated_again(server: LiveServer) -> None:
    say(server, WRONG, DUPLICATES, RIGHT)
    assert list(all_ways(server, asking(is_strict=True))) == [(RIGHT, "")] * 6


def test_an_answer_that_stays_wrong_has_its_rule(server: LiveServer) -> None:
    say(server, *WRONGS)
    results = list(all_ways(server, asking()))
    assert results == [(WRONGS[MAX_REDRAWS], MISS)] * 6


def test_a_strict_answer_that_stays_wrong_is_an_error(server: LiveServer) -> None:
    say(server, *WRONGS)
    llm = Shared(server)
    with pytest.raises(SchemaMissError, match="uniqueItems"):
        llm.generate(["hello", "hello"], asking(is_strict=True))
    sent = list[str]()
    stream = llm.stream("hello", asking(is_strict=True))
    with pytest.raises(SchemaMissError, match="uniqueItems"):
        sent.extend(output.text for output in stream)
    assert "".join(sent) == WRONG[: WRONG.index('"tags"')]  # the array was never shown


def test_a_stream_goes_on_until_the_first_value_that_may_change(server: LiveServer) -> None:
    say(server, WRONG, DUPLICATES, RIGHT)
    pieces = [output.text for output in Shared(server).stream("hello", asking())]
    first_held = RIGHT.index('"tags"')
    assert len(pieces) > 10
    assert "".join(pieces[:-1]).startswith(RIGHT[:first_held])
    assert "".join(pieces) == RIGHT


def test_each_of_several_answers_is_settled(server: LiveServer) -> None:
    say(server, WRONG, RIGHT)
    [answers] = Shared(server).generate("hello", asking(n=3))
    assert [(answer.index, answer.text) for answer in answers] == [(n, RIGHT) for n in range(3)]
    texts = ["", "", ""]
    for output in Shared(server).stream("hello", asking(n=3)):
        texts[output.index] += output.text
    assert texts == [RIGHT] * 3


def test_arguments_of_calls_are_generated_again_or_reported(server: LiveServer) -> None:
    call = '<tool_call>\n{{"name": "note", "arguments": {}}}\n</tool_call>'.format
    params = SamplingParams(temperature=0, max_tokens=300)
    llm = Shared(server)
    for is_strict in (False, True):
        tools = [{"name": "note", "parameters": TAGS, "strict": is_strict}]
        say(server, call(WRONG), call(DUPLICATES), call(RIGHT))
        [answer] = llm.chat(TALK, params, tools=tools)
        assert [tool_call.arguments for tool_call in answer.tool_calls] == [json.loads(RIGHT)]
        assert not answer.schema_miss
        chunks = list(llm.chat(TALK, params, stream=True, tools=tools))
        calls = [tool_call.arguments for chunk in chunks for tool_call in chunk.tool_calls]
        assert calls == [json.loads(RIGHT)]
        assert asyncio.run(chat_calls(server, params, tools)) == [json.loads(RIGHT)]
        say(server, *map(call, WRONGS))
        if is_strict:
            with pytest.raises(SchemaMissError):
                llm.chat(TALK, params, tools=tools)
            with pytest.raises(SchemaMissError):
                asyncio.run(chat_calls(server, params, tools))
        else:
            [answer] = llm.chat(TALK, params, tools=tools)
            assert answer.schema_miss == MISS


async def chat_calls(server: LiveServer, params: SamplingParams, tools: Any) -> list[Any]:
    """Return the arguments of the tool calls that an asynchronous caller gets."""
    chunks = AsyncShared(server).chat(TALK, params, tools=tools)
    return [call.arguments async for chunk in chunks for call in chunk.tool_calls]


def test_an_answer_that_was_cut_is_not_generated_again(server: LiveServer) -> None:
    say(server, WRONG, RIGHT)
    form = Constraint.json_schema(TAGS, is_strict=True)
    params = SamplingParams(temperature=0, max_tokens=len(WRONG) - 2, constraint=form)
    [[answer]] = Shared(server).generate("hello", params)
    assert WRONG.startswith(answer.text)
    assert answer.finish_reason.value == "length"


CALL = '<tool_call>\n{{"name": "note", "arguments": {}}}\n</tool_call>'.format


def test_a_complete_value_is_checked_though_the_limit_leaves_no_token_for_the_end(
    server: LiveServer,
) -> None:
    say(server, WRONG, DUPLICATES)
    num_tokens = len(server.client.card.tokenizer.encode(WRONG))
    form = Constraint.json_schema(TAGS, is_strict=True)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, constraint=form)
    [[answer]] = Shared(server).generate("hello", params)
    assert (answer.text, answer.finish_reason) == (DUPLICATES[: len(WRONG)], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("text", "is_complete"),
    [
        ('{"a": 1}', True),
        (" [1]\n", True),
        ('"a"', True),
        ("true", True),
        ("12", False),
        ('{"a": 1', False),
        ('{"a": "b"', False),
        ("", False),
        ("[" * 9999 + "]", False),
    ],
)
def test_only_values_that_cannot_go_on_are_complete(text: str, *, is_complete: bool) -> None:
    assert is_complete_json(text) is is_complete


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_call_before_the_cut_is_generated_again(
    server: LiveServer, stream: bool
) -> None:
    begun = '\n<tool_call>\n{"name": "note", "arguments": {"title": "One", "ta'
    say(server, CALL(WRONG) + CALL(RIGHT), CALL(DUPLICATES), CALL(RIGHT) + CALL(RIGHT))
    tools = [{"name": "note", "parameters": TAGS}]
    params = SamplingParams(temperature=0, max_tokens=len(CALL(WRONG) + begun))
    result = Shared(server).chat(TALK, params, tools=tools, stream=stream)
    answers = list(result)
    calls = [call.arguments for answer in answers for call in answer.tool_calls]
    assert calls == [json.loads(RIGHT)]
    assert answers[-1].finish_reason is FinishReason.LENGTH
    assert not answers[-1].schema_miss


def test_a_slow_machine_generates_an_answer_again_as_often_as_a_fast_one(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by minutes each time it is read."""
    now_s = itertools.count(0.0, 120.0)
    monkeypatch.setattr(settling, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    right = json.dumps({"title": "One", "tags": [*_ITEMS, "Dog"]})
    say(server, *WRONGS[:MAX_REDRAWS], right)
    [[answer]] = Shared(server).generate("hello", asking(is_strict=True))
    assert answer.text == right
