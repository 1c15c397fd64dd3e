"""Ollama's Python package, with its ordinary calls: chat, tools, forms, vectors, models."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import ollama
from checks import MODEL, ROOT_URL, run
from pydantic import BaseModel, ConfigDict

CLIENT = ollama.Client(host=ROOT_URL)
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
SHORT = {"num_predict": 40, "temperature": 0}


class Country(BaseModel):
    """A form for an answer."""

    model_config = ConfigDict(extra="forbid")

    name: str
    capital: str


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The name of the city.
    """
    return f"rain in {city}"


def chat() -> None:
    """A whole answer, and the same in pieces."""
    answer = CLIENT.chat(MODEL, QUESTION, options=SHORT)
    assert answer.done
    assert answer.eval_count
    chunks = list(CLIENT.chat(MODEL, QUESTION, options=SHORT, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].done_reason in {"stop", "length"}


def tools() -> None:
    """A call of a Python function, and the answer to its result."""
    messages = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    options = {"num_predict": 100, "temperature": 0}
    first = CLIENT.chat(MODEL, messages, tools=[get_weather], options=options)
    [call] = first.message.tool_calls or []
    assert "Paris" in call.function.arguments["city"]
    result = {
        "role": "tool",
        "tool_name": call.function.name,
        "content": get_weather(**call.function.arguments),
    }
    talk = [*messages, first.message, result]
    second_answer = CLIENT.chat(MODEL, talk, tools=[get_weather], options=SHORT).message
    assert second_answer.content or second_answer.tool_calls  # a small model may call again


def form() -> None:
    """An answer that matches a Pydantic model's schema."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    schema = Country.model_json_schema()
    answer = CLIENT.chat(
        MODEL, messages, format=schema, options={"num_predict": 80, "temperature": 0}
    )
    assert Country.model_validate_json(answer.message.content or "").name


def generate() -> None:
    """An answer to a prompt, and one that goes on from it."""
    first = CLIENT.generate(MODEL, "Say hello.", options=SHORT)
    assert first.response
    continuation = CLIENT.generate(MODEL, "Again.", context=first.context, options=SHORT)
    assert continuation.prompt_eval_count > len(first.context or ())
    gap = CLIENT.generate(MODEL, "def add(a, b):\n    ", suffix="\n", options=SHORT)
    assert gap.response


def embed() -> None:
    """Vectors of texts."""
    body = CLIENT.embed(MODEL, ["The sky is blue.", "Grass is green."])
    assert len(body.embeddings) == 2
    assert CLIENT.embeddings(MODEL, "The sky is blue.").embedding


def models() -> None:
    """The lists of models, the model's facts, a pull of it, and one that is not there."""
    [listed] = CLIENT.list().models
    assert listed.model.startswith(MODEL)
    assert "completion" in (CLIENT.show(listed.model).capabilities or [])
    [running] = CLIENT.ps().models
    assert running.model == listed.model
    assert [status.status for status in CLIENT.pull(MODEL, stream=True)] == ["success"]
    with suppress(ollama.ResponseError):
        CLIENT.chat("no-such-model", QUESTION)
        raise AssertionError


def from_another_loop() -> None:
    """The asynchronous client, which streams."""

    async def run_client() -> str:
        client = ollama.AsyncClient(host=ROOT_URL)
        stream = await client.chat(MODEL, QUESTION, options=SHORT, stream=True)
        return "".join([chunk.message.content or "" async for chunk in stream])

    assert asyncio.run(run_client())


def separators() -> None:
    """The package splits its lines with `str.splitlines`, which ends them at more than \\n."""
    text = "".join(f"a{chr(code)}b" for code in (0x85, 0x2028, 0x2029, 0x0B, 0x0C, 0x1C, 0x1E))
    form = {"type": "object", "properties": {"text": {"const": text}}, "required": ["text"]}
    chunks = CLIENT.chat(MODEL, QUESTION, format=form, stream=True)
    answer = "".join(chunk.message.content or "" for chunk in chunks)
    assert json.loads(answer) == {"text": text}


run(chat, tools, form, separators, generate, embed, models, from_another_loop)
