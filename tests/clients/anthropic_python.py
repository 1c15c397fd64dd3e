"""Anthropic's SDK for Python."""

from __future__ import annotations

import anthropic
from checks import MODEL, QUESTION, ROOT_URL, WEATHER, WEATHER_QUESTION, run

client = anthropic.Anthropic(base_url=ROOT_URL, api_key="none", max_retries=0)
TOOL = {"name": "get_weather", "description": "The weather now.", "input_schema": WEATHER}


def plain() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=QUESTION)
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 20


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=20, messages=QUESTION) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().content[0].text == text


def counted() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=QUESTION).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def continued() -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The sky is blue because"}]
    assert client.messages.create(model=MODEL, max_tokens=10, messages=begun).content[0].text


def tools() -> None:
    asked = {"model": MODEL, "max_tokens": 100, "tools": [TOOL]}
    answer = client.messages.create(
        messages=WEATHER_QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **asked
    )
    assert answer.stop_reason == "tool_use"
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert set(call.input) == {"city", "unit"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "17 degrees, cloudy"}
    messages = [
        *WEATHER_QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(messages=messages, **asked).content


def errors() -> None:
    for wrong, kind in (
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"model": "nobody"}, anthropic.NotFoundError),
    ):
        try:
            client.messages.create(
                **({"model": MODEL, "max_tokens": 5, "messages": QUESTION} | wrong)
            )
        except kind:
            continue
        raise AssertionError(f"{wrong} was accepted")


def cancel() -> None:
    with client.messages.stream(model=MODEL, max_tokens=2000, messages=QUESTION) as events:
        for _ in events:
            break
    plain()


run(plain, stream, counted, continued, tools, errors, cancel)
