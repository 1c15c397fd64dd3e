"""LiteLLM, which speaks to us as to any OpenAI-compatible server."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices

import litellm
from checks import BASE_URL, MODEL, PERSON, QUESTION, TOOL, WEATHER_QUESTION, run

SETTINGS = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none", "temperature": 0}


def plain() -> None:
    answer = litellm.completion(messages=QUESTION, max_tokens=20, **SETTINGS)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 20


def stream() -> None:
    chunks = litellm.completion(messages=QUESTION, max_tokens=20, stream=True, **SETTINGS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools() -> None:
    answer = litellm.completion(
        messages=WEATHER_QUESTION, tools=[TOOL], tool_choice="required", max_tokens=100, **SETTINGS
    )
    call = answer.choices[0].message.tool_calls[0]
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}


def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    answer = litellm.completion(messages=QUESTION, response_format=form, max_tokens=60, **SETTINGS)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


def logprobs() -> None:
    answer = litellm.completion(
        messages=QUESTION, logprobs=True, top_logprobs=2, max_tokens=3, **SETTINGS
    )
    assert answer.choices[0].logprobs.content[0].logprob <= 0


def errors() -> None:
    try:
        litellm.completion(messages=QUESTION, **(SETTINGS | {"temperature": -1}))
    except litellm.BadRequestError:
        return
    raise AssertionError("a negative temperature was accepted")


def cancel() -> None:
    chunks = litellm.completion(messages=QUESTION, max_tokens=2000, stream=True, **SETTINGS)
    next(iter(chunks))
    del chunks
    plain()


run(plain, stream, tools, json_schema, logprobs, errors, cancel)
