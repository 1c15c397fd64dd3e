"""OpenAI's SDK for Python."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import openai
from checks import BASE_URL, MODEL, PERSON, QUESTION, TOOL, WEATHER_QUESTION, run
from openai.types import Batch
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

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


def embeddings() -> None:
    texts = ["The cat sleeps.", "A kitten naps."]
    answer = client.embeddings.create(model=MODEL, input=texts)  # in base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.embedding for item in answer.data] == [item.embedding for item in plain.data]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=32).data[0].embedding
    assert len(short) == 32
    assert abs(sum(x * x for x in short) - 1) < 1e-5


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
    request = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.create(
        messages=WEATHER_QUESTION, tool_choice="required", parallel_tool_calls=False, **request
    )
    message = answer.choices[0].message
    [call] = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "17 degrees, cloudy"}
    messages = [*WEATHER_QUESTION, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(messages=messages, **request).choices


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
    request = {"model": MODEL, "messages": question, "max_tokens": 60, "temperature": 0}
    answer = client.chat.completions.create(response_format=form, **request)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
    parsed = client.chat.completions.parse(response_format=Person, **request)
    assert isinstance(parsed.choices[0].message.parsed, Person)


def responses() -> None:
    request = {"model": MODEL, "max_output_tokens": 20, "temperature": 0}
    answer = client.responses.create(instructions="Be brief.", input=QUESTION, **request)
    Response.model_validate(answer.to_dict())  # which the SDK does not do by itself
    assert answer.output_text
    assert answer.status in {"completed", "incomplete"}
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    second_answer = client.responses.create(
        input="And at night?", previous_response_id=answer.id, **request
    )
    assert second_answer.previous_response_id == answer.id
    assert second_answer.usage.input_tokens > answer.usage.output_tokens
    messages = [
        item.role
        for item in client.responses.input_items.list(second_answer.id, order="asc", limit=2)
    ]
    assert messages == ["user", "assistant", "user"]
    resent_answer = client.responses.create(input=[*QUESTION, *answer.output, *QUESTION], **request)
    assert resent_answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    for method in (client.responses.retrieve, client.responses.cancel):
        error = refusal(method, response_id=answer.id)
        assert isinstance(error, openai.NotFoundError)
        assert answer.id in error.message


def streamed_responses() -> None:
    request = {"model": MODEL, "input": QUESTION, "max_output_tokens": 20, "temperature": 0}
    include = ["message.output_text.logprobs"]
    events = list(client.responses.create(stream=True, include=include, top_logprobs=2, **request))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(event.delta for event in deltas) == last.output_text
    tokens = [token for event in deltas for token in event.logprobs]
    assert [t.logprob for t in tokens] == [t.logprob for t in last.output[0].content[0].logprobs]
    question = "Answer with the word yes, and nothing else."
    with client.responses.stream(
        model=MODEL, input=question, max_output_tokens=30, temperature=0
    ) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(texts)


def tools_in_responses() -> None:
    function = {"type": "function", "strict": True, **TOOL["function"]}
    request = {"model": MODEL, "tools": [function], "temperature": 0, "max_output_tokens": 100}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(input=WEATHER_QUESTION, **forced, **request)
    [call] = answer.output
    assert (answer.status, call.type, call.status) == ("completed", "function_call", "completed")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "17 degrees"}
    stored_answer = client.responses.create(
        input=[result], previous_response_id=answer.id, **request
    )
    resent = client.responses.create(input=[*WEATHER_QUESTION, call, result], **request)
    assert stored_answer.usage.input_tokens == resent.usage.input_tokens
    assert stored_answer.output_text == resent.output_text
    person = {"type": "function", "name": "tell", "parameters": PERSON, "strict": True}
    with client.responses.stream(
        input="Describe Anna, who is 30.", **forced, **request | {"tools": [person]}
    ) as stream:
        kinds = {event.type for event in stream}
        Response.model_validate(stream.get_final_response().to_dict())
        [call] = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert set(call.parsed_arguments) == {"name", "age"}


def forms_in_responses() -> None:
    request = {"model": MODEL, "input": "Describe Anna, who is 30, as JSON.", "temperature": 0}
    form = {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}
    answer = client.responses.create(text={"format": form}, max_output_tokens=60, **request)
    assert set(json.loads(answer.output_text)) == {"name", "age"}
    parsed = client.responses.parse(text_format=Person, max_output_tokens=60, **request)
    assert isinstance(parsed.output_parsed, Person)


def errors_of_responses() -> None:
    for wrong, param in (
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ):
        error = refusal(client.responses.create, model=MODEL, input="hello", **wrong)
        assert isinstance(error, openai.BadRequestError)
        assert error.param == param


def batches() -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
    path = "/v1/chat/completions"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": {**body, "seed": number}}
        for number in range(3)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(text)
    assert client.files.content(file.id).read() == text
    batch = client.batches.create(
        input_file_id=file.id, endpoint=path, completion_window="24h", metadata={"a": "b"}
    )
    while batch.status in {"validating", "in_progress", "finalizing"}:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    Batch.model_validate(batch.to_dict())  # which the SDK does not do by itself
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert batch.request_counts.completed == 3
    results = client.files.content(batch.output_file_id).text.splitlines()
    assert [json.loads(line)["custom_id"] for line in results] == ["0", "1", "2"]
    assert next(iter(client.batches.list(limit=1))).id == batch.id
    assert {file.id for file in client.files.list(limit=1)} == {file.id, batch.output_file_id}
    assert isinstance(refusal(client.batches.cancel, batch_id=batch.id), openai.BadRequestError)
    assert client.files.delete(file.id).deleted
    assert isinstance(refusal(client.files.retrieve, file_id=file.id), openai.NotFoundError)


def errors() -> None:
    for wrong, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "nobody"}, openai.NotFoundError),
        ({"top_p": 2}, openai.BadRequestError),
    ):
        request = {"model": MODEL, "messages": QUESTION} | wrong
        error = refusal(client.chat.completions.create, **request)
        assert isinstance(error, kind)
        assert error.body["message"]
        assert error.request_id


def refusal(call: Callable[..., Any], **fields: Any) -> openai.APIStatusError | None:
    try:
        call(**fields)
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
    embeddings,
    models,
    logprobs,
    tools,
    streamed_tools,
    json_schema,
    responses,
    streamed_responses,
    tools_in_responses,
    forms_in_responses,
    errors_of_responses,
    batches,
    errors,
    cancel,
)
