"""OpenAI's SDK for Python."""

from __future__ import annotations

import json
from typing import Any

import openai
from checks import BASE_URL, MODEL, PERSON, QUESTION, TOOL, WEATHER_QUESTION, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int


def plain() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=20, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 20 or chunks[-2].choices[0].finish_reason == "stop"


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["1 + 1 =", "2 + 2 ="], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]


def suffix() -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="def add(a, b):\n    ",
        suffix="\n\nprint(add(1, 2))\n",
        max_tokens=16,
        temperature=0,
    )
    assert "return" in answer.choices[0].text


def models() -> None:
    assert MODEL in {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).id == MODEL


def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=3, logprobs=True, top_logprobs=2
    )
    for token in answer.choices[0].logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert bytes(token.bytes)


def tools() -> None:
    asked = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.create(
        messages=WEATHER_QUESTION, tool_choice="required", parallel_tool_calls=False, **asked
    )
    message = answer.choices[0].message
    [call] = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "17 degrees, cloudy"}
    messages = [*WEATHER_QUESTION, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(messages=messages, **asked).choices


def streamed_tools() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=WEATHER_QUESTION,
        tools=[openai.pydantic_function_tool(Person)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=150,
    ) as events:
        kinds = {event.type for event in events}
        call = events.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert isinstance(call.function.parsed_arguments, Person)


def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    question = [{"role": "user", "content": "Describe Anna, who is 30, as JSON."}]
    asked = {"model": MODEL, "messages": question, "max_tokens": 60, "temperature": 0}
    answer = client.chat.completions.create(response_format=form, **asked)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
    parsed = client.chat.completions.parse(response_format=Person, **asked)
    assert isinstance(parsed.choices[0].message.parsed, Person)


def errors() -> None:
    for wrong, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "nobody"}, openai.NotFoundError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
    ):
        error = error_of({"model": MODEL, "messages": QUESTION} | wrong)
        assert isinstance(error, kind)
        assert error.body["message"]
        assert error.request_id


def error_of(asked: dict[str, Any]) -> openai.APIStatusError | None:
    try:
        client.chat.completions.create(**asked)
    except openai.APIStatusError as error:
        return error
    return None


def cancel() -> None:
    events = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2000, stream=True
    )
    for count, _ in enumerate(events):
        if count == 3:
            break
    events.close()
    plain()


run(
    plain,
    stream,
    completions,
    suffix,
    models,
    logprobs,
    tools,
    streamed_tools,
    json_schema,
    errors,
    cancel,
)
