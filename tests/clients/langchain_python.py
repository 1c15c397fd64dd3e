"""LangChain's OpenAI chat model."""

from __future__ import annotations

from typing import Literal

from checks import BASE_URL, MODEL, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

ASKED = {"base_url": BASE_URL, "api_key": "none", "model": MODEL, "temperature": 0}
model = ChatOpenAI(max_tokens=100, **ASKED)


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int


@tool
def get_weather(city: str, unit: Literal["C", "F"]) -> str:
    """Tell the weather of a city now."""
    return f"17 {unit} in {city}"


def plain() -> None:
    answer = model.invoke("Why is the sky blue? Answer in one sentence.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    assert "".join(chunk.text for chunk in model.stream("Say something."))


def completions() -> None:
    assert OpenAI(max_tokens=8, **ASKED).invoke("The capital of France is")


def tools() -> None:
    asked = [HumanMessage("What is the weather in Paris, in Celsius?")]
    answer = model.bind_tools([get_weather], tool_choice="any").invoke(asked)
    [call, *_] = answer.tool_calls
    result = get_weather.invoke(call["args"])
    results = [ToolMessage(result, tool_call_id=one["id"]) for one in answer.tool_calls]
    assert model.invoke([*asked, answer, *results]).content


def json_schema() -> None:
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke("Anna is 30.")
        assert isinstance(person, Person)


def logprobs() -> None:
    answer = model.bind(logprobs=True, top_logprobs=2).invoke("Say something.")
    assert answer.response_metadata["logprobs"]["content"][0]["logprob"] <= 0


def cancel() -> None:
    for _ in model.stream("Count to a thousand."):
        break
    plain()


run(plain, stream, completions, tools, json_schema, logprobs, cancel)
