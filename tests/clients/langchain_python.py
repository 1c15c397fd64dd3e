"""LangChain's chat models and its agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from checks import BASE_URL, MODEL, ROOT_URL, run
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.language_models import BaseChatModel
    from langgraph.graph.state import CompiledStateGraph as Agent

SETTINGS = {"base_url": BASE_URL, "api_key": "none", "model": MODEL, "temperature": 0}
model = ChatOpenAI(max_tokens=100, **SETTINGS)


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int


class Weather(BaseModel):
    """The weather in a city."""

    city: Annotated[str, Field(max_length=40)]
    degrees: Annotated[int, Field(ge=-90, le=60)]


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
    assert OpenAI(max_tokens=8, **SETTINGS).invoke("The capital of France is")


def tools() -> None:
    messages = [HumanMessage("What is the weather in Paris, in Celsius?")]
    answer = model.bind_tools([get_weather], tool_choice="any").invoke(messages)
    [call, *_] = answer.tool_calls
    result = get_weather.invoke(call["args"])
    results = [ToolMessage(result, tool_call_id=tool_call["id"]) for tool_call in answer.tool_calls]
    assert model.invoke([*messages, answer, *results]).content


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


def _agent(chat_model: BaseChatModel, form: object) -> Agent:
    cities: list[str] = []

    @tool
    def weather(city: str) -> str:
        """Tell the weather of a city now."""
        cities.append(city)
        return "17 degrees"

    @wrap_model_call
    def once(request: ModelRequest, ask: Callable[[ModelRequest], object]) -> object:
        """Offer the tool until it ran: a small model calls again and again if it may."""
        return ask(request.override(tools=[] if cities else request.tools))

    return create_agent(chat_model, tools=[weather], middleware=[once], response_format=form)


def agents() -> None:
    """Let an agent use a tool, and answer in a form, over each protocol and streamed."""
    claude = ChatAnthropic(base_url=ROOT_URL, api_key="none", model=MODEL, max_tokens=100)
    responses = ChatOpenAI(max_tokens=100, use_responses_api=True, **SETTINGS)
    request = {"messages": [HumanMessage("What is the weather in Paris now?")]}
    for chat_model in (model, responses, claude):
        for form in (None, ProviderStrategy(Weather)):
            output = _agent(chat_model, form).invoke(request)
            assert any(isinstance(message, ToolMessage) for message in output["messages"])
            assert form is None or isinstance(output["structured_response"], Weather)
            assert list(_agent(chat_model, form).stream(request, stream_mode="messages"))


run(plain, stream, completions, tools, json_schema, logprobs, agents, cancel)
