"""Anthropic's SDK for Python."""

from __future__ import annotations

import time

import anthropic
from anthropic.types.messages import MessageBatch
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


def counted_tokens() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=QUESTION).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def continued() -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The sky is blue because"}]
    assert client.messages.create(model=MODEL, max_tokens=10, messages=begun).content[0].text


def tools() -> None:
    request = {"model": MODEL, "max_tokens": 100, "tools": [TOOL]}
    answer = client.messages.create(
        messages=WEATHER_QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **request
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
    assert client.messages.create(messages=messages, **request).content


def batches() -> None:
    params = {"model": MODEL, "max_tokens": 4, "messages": QUESTION}
    wrong = {**params, "model": "nobody"}
    batch_lines = [{"custom_id": f"n{i}", "params": params} for i in range(3)]
    batch_client = client.messages.batches
    batch = batch_client.create(requests=[*batch_lines, {"custom_id": "bad", "params": wrong}])
    while batch.processing_status != "ended":
        time.sleep(0.2)
        batch = batch_client.retrieve(batch.id)
    batch = MessageBatch.model_validate(batch.to_dict())  # which the SDK does not do by itself
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (3, 1)
    results = {line.custom_id: line.result for line in batch_client.results(batch.id)}
    assert all(results[f"n{i}"].message.content[0].text for i in range(3))
    assert results["bad"].error.error.type == "not_found_error"
    assert next(iter(batch_client.list(limit=1))).id == batch.id
    assert batch_client.delete(batch.id).type == "message_batch_deleted"
    try:
        batch_client.create(requests=[*batch_lines, batch_lines[0]])
    except anthropic.BadRequestError:
        return
    raise AssertionError("a doubled custom_id was accepted")


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


run(plain, stream, counted_tokens, continued, tools, batches, errors, cancel)
