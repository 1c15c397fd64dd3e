"""Conversations in Python: several at once, streams, tools, constraints, template variables."""

from __future__ import annotations

import asyncio
import io
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Struct

import twostroke
from support.tiny import Tiny, write_tiny_gguf
from twostroke import LLM, AsyncLLM, Constraint, RequestError, SamplingParams, UsageError
from twostroke.engine.chat_answer import read_tools
from twostroke.engine.progress_bar import ProgressBar
from twostroke.model.loader import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = [{"role": "user", "content": "hello"}]
WORLD = [{"role": "user", "content": "world"}]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CALLING = SamplingParams(temperature=0, max_tokens=200)
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"],
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", Tiny(context_length=2048))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, backend="reference", memory_bytes=4_000_000) as llm:
        yield llm


def test_conversations_in_a_list_are_answered_in_order(llm: LLM) -> None:
    together = llm.chat([HELLO, WORLD], GREEDY)
    alone = [llm.chat(HELLO, GREEDY), llm.chat(WORLD, GREEDY)]
    assert [[answer.token_ids for answer in many] for many in together] == [
        [answer.token_ids for answer in many] for many in alone
    ]


def test_each_conversation_can_have_its_own_params(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, n=2, ignore_eos=True) for n in (1, 3)]
    counts = [[len(answer.token_ids) for answer in many] for many in llm.chat([HELLO, WORLD], each)]
    assert counts == [[1, 1], [3, 3]]
    with pytest.raises(UsageError, match="one entry for each prompt: 2, got 1"):
        llm.chat([HELLO, WORLD], each[:1])
    with pytest.raises(UsageError, match="one SamplingParams for one conversation"):
        llm.chat(HELLO, each)  # type: ignore[call-overload]


def test_a_streamed_answer_is_the_whole_answer(llm: LLM) -> None:
    chunks = list(llm.chat(HELLO, GREEDY, stream=True))
    [answer] = llm.chat(HELLO, GREEDY)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == answer.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 8


def test_a_stream_has_the_scores_of_its_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=0)
    chunks = list(llm.chat(HELLO, params, stream=True))
    num_scored = sum(len(chunk.prompt_logprobs) for chunk in chunks)
    assert num_scored == chunks[-1].usage.prompt_tokens - 1
    assert all(logprob is not None for chunk in chunks for logprob in chunk.logprobs)


def test_leaving_a_stream_cancels_the_answer(llm: LLM) -> None:
    stream = llm.chat(HELLO, SamplingParams(ignore_eos=True), stream=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.chat(HELLO, GREEDY)  # the engine has room again


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_forced_call_has_its_name_and_arguments(llm: LLM, choice: str) -> None:
    [answer] = llm.chat(HELLO, CALLING, tools=[WEATHER], tool_choice=choice)
    calls = answer.tool_calls
    assert {(call.name, call.arguments["city"]) for call in calls} == {("get_weather", "Paris")}
    assert answer.text == ""
    message = answer.message["tool_calls"][0]
    assert json.loads(message["function"]["arguments"]) == {"city": "Paris"}
    chunks = list(llm.chat(HELLO, CALLING, tools=[WEATHER], tool_choice=choice, stream=True))
    streamed = [call for chunk in chunks for call in chunk.tool_calls]
    assert [call.arguments for call in streamed] == [call.arguments for call in calls]


@pytest.mark.parametrize("named", [{"function": {"name": "get_time"}}, {"name": "get_time"}])
def test_a_function_to_call_can_be_named_as_in_openai_s_api(named: dict[str, Any]) -> None:
    choice = {"type": "function", **named}
    assert read_tools([TIME, WEATHER], choice) == read_tools([TIME, WEATHER], "get_time")
    for wrong in ({"function": 5}, {"function": {"name": "nobody"}}, {"name": ["get_time"]}):
        with pytest.raises(RequestError, match="tool_choice must be one of get_time, get_weather"):
            read_tools([TIME, WEATHER], wrong)


@pytest.mark.parametrize("mode", ["none", "auto", "required"])
def test_a_function_may_be_named_like_a_choice(mode: str) -> None:
    named: dict[str, Any] = {"type": "function", "function": {"name": mode}}
    with pytest.raises(RequestError, match="tool_choice must be one of get_time"):
        read_tools([TIME], named)
    tools = read_tools([TIME, named], named)
    assert tools is not None
    assert (tools.is_forced, tools.names) == (True, (mode,))


def test_a_call_that_is_cut_is_no_call(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=4)
    [answer] = llm.chat(HELLO, short, tools=[WEATHER], tool_choice="required")
    assert (answer.tool_calls, answer.finish_reason) == ((), "length")


def test_the_message_of_an_answer_continues_the_conversation(llm: LLM) -> None:
    [answer] = llm.chat(HELLO, CALLING, tools=[WEATHER, TIME], tool_choice="get_weather")
    [call] = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    short = SamplingParams(temperature=0, max_tokens=3)
    [after] = llm.chat([*HELLO, answer.message, result], short, tools=[WEATHER, TIME])
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_an_answer_keeps_to_its_form(llm: LLM) -> None:
    forms = {
        Constraint.choice(["yes", "no"]): ("yes", "no"),
        Constraint.regex("ab?c"): ("abc", "ac"),
        Constraint.json_schema({"const": 5}): ("5",),
        Constraint.json_schema('{"const": 5}'): ("5",),
        Constraint.grammar('start: "x"'): ("x",),
    }
    for form, texts in forms.items():
        [answer] = llm.chat(HELLO, SamplingParams(constraint=form, max_tokens=20))
        assert answer.text in texts


def test_a_class_that_describes_itself_is_a_schema() -> None:
    class Model(Struct):
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "integer"}

    assert Constraint.json_schema(Model) == Constraint("json_schema", '{"type": "integer"}')
    for wrong in (5, None, Struct, ["x"]):
        with pytest.raises(RequestError, match="json_schema must be a JSON schema"):
            Constraint.json_schema(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="json_schema is not JSON"):
        Constraint.json_schema({"type": object})
    with pytest.raises(RequestError, match="choice must be a list of texts"):
        Constraint.choice("yes")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tool": []}, "chat has no option 'tool'. Did you mean 'tools'?"),
        ({"tools": "x"}, "tools must be a list of functions."),
        ({"tools": [5]}, "tools[0] must be an object with a function's name."),
        ({"tools": [{"name": ""}]}, "tools[0].name must be a function's name."),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name has the name of an earlier tool."),
        ({"tools": [{"name": "f", "parameters": 5}]}, "tools[0].parameters must be a JSON schema."),
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools."),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object with variables."),
        ({"tools": [WEATHER], "tool_choice": "get_wether"}, "Did you mean 'get_weather'?"),
        ({"tools": [{"name": "f", "parameters": {"maximum": math.inf}}]}, "the number inf, which"),
        ({"chat_template_kwargs": {"messages": 5}}, "a name that the chat template itself uses."),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(
    llm: LLM, options: dict[str, Any], why: str
) -> None:
    with pytest.raises((UsageError, RequestError)) as refused:
        llm.chat(HELLO, GREEDY, **options)
    assert why in str(refused.value)


def test_a_stream_has_one_conversation(llm: LLM) -> None:
    with pytest.raises(UsageError, match="one conversation at a time"):
        llm.chat([HELLO, WORLD], stream=True)  # type: ignore[call-overload]


def test_an_answer_can_continue_the_last_message(llm: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hello wor"}]
    [answer] = llm.chat(messages, GREEDY, continue_final_message=True)
    rendered = llm.engine.card.chat_template.render(messages, continue_final_message=True)
    tokens = llm.engine.card.tokenizer.encode_prompt(rendered)
    assert answer.usage.prompt_tokens == len(tokens)


def test_options_of_the_engine_are_named_directly(path: Path) -> None:
    options: dict[str, Any] = {"override_generation_config": {"top_k": 3}}
    with LLM(path, backend="reference", context_length=64, **options) as llm:
        assert llm.engine.context_length == 64
        assert llm.get_default_sampling_params().top_k == 3
    with pytest.raises(UsageError, match=r"'contextlength'.* 'context_length'"):
        LLM(path, contextlength=64)
    with pytest.raises(UsageError, match="not beside it: num_threads"):
        LLM(path, twostroke.EngineOptions(), num_threads=1)


def test_an_asynchronous_model_is_made_as_a_blocking_one(path: Path) -> None:
    async def use() -> list[str]:
        options: Any = {"backend": "reference", "memory_bytes": 4_000_000}
        async with (
            AsyncLLM(path, **options) as async_model,
            await AsyncLLM.load(path, **options) as loaded,
        ):
            return [
                "".join([chunk.text async for chunk in async_llm.chat(HELLO, GREEDY)])
                for async_llm in (async_model, loaded)
            ]

    first, second = asyncio.run(use())
    assert first == second != ""


def test_asynchronous_chat_streams_calls(llm: LLM) -> None:
    async def use() -> list[dict[str, Any]]:
        chat = AsyncLLM(llm.engine).chat(HELLO, CALLING, tools=[WEATHER], tool_choice="required")
        return [call.arguments async for chunk in chat for call in chunk.tool_calls]

    assert {"city": "Paris"} in asyncio.run(use())


def test_objects_show_what_they_are(llm: LLM) -> None:
    assert repr(llm).startswith("<LLM tiny: llama, F32, ")
    assert repr(AsyncLLM(llm.engine)).startswith("<AsyncLLM tiny: ")
    [answer] = llm.chat(HELLO, GREEDY)
    assert repr(answer) == (
        f"Completion(text={answer.text!r}, finish_reason='length', "
        f"prompt_tokens={answer.usage.prompt_tokens}, completion_tokens=8)"
    )
    assert repr(SamplingParams(top_k=5)) == "SamplingParams(top_k=5)"
    assert repr(llm.embed("hello")[0]).startswith("Embedding(index=0, ")
    assert "finish_reason" not in repr(next(iter(llm.chat(HELLO, GREEDY, stream=True))))


def test_the_facts_of_a_model_are_short(llm: LLM, path: Path) -> None:
    """People print what they look at: no representation has each tensor or operation."""
    card, loaded = llm.engine.card, load(str(path))
    for shown in (card, card.cost, card.cost.program, loaded):
        assert len(repr(shown)) < 1000
        assert card.name in repr(shown)


def test_the_package_has_its_version_and_its_errors() -> None:
    assert twostroke.__version__[0].isdigit()
    assert issubclass(twostroke.ContextLengthError, twostroke.TwostrokeError)
    with pytest.raises(twostroke.ModelNotFoundError, match="no model 'smolm2'"):
        LLM("smolm2")


@pytest.mark.parametrize(("progress", "is_shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_as_asked(
    llm: LLM, progress: bool | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    llm.chat([HELLO, WORLD], GREEDY, progress=progress)
    assert ("2/2" in screen.getvalue()) is is_shown


def test_a_bar_of_bytes_counts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with ProgressBar(is_on=True, is_bytes=True) as bar:
        bar.show("Download", 1_000_000, 2_000_000)
    assert "Download" in screen.getvalue()
    assert "MB" in screen.getvalue()
