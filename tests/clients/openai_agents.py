"""OpenAI's Agents SDK, over chat completions and over responses; and types of Pydantic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, MODEL, run
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_constructs import constructs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

set_tracing_disabled(True)
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
SETTINGS = ModelSettings(temperature=0, max_tokens=200)
QUESTION = "What is the weather in Paris now?"
LOOP = asyncio.new_event_loop()
client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
cities: list[str] = []


class Weather(BaseModel):
    """The weather in a city."""

    city: Annotated[str, Field(max_length=40)]
    degrees: Annotated[int, Field(ge=-90, le=60)]


# A small model calls again and again if it may.
@function_tool(is_enabled=lambda *_: not cities)
def get_weather(city: str) -> str:
    """Tell the weather in a city now."""
    cities.append(city)
    return "17 degrees"


FORMS = {
    "text": (None, "Why is the sky blue? Answer in one sentence.", []),
    "a tool": (None, QUESTION, [get_weather]),
    "a form": (Weather, "In Paris it is 17 degrees.", []),
    "a tool and a form": (Weather, QUESTION, [get_weather]),
}


def hello() -> Iterator[Callable[[], None]]:
    for kind in KINDS:
        for form in FORMS:
            for streamed in (False, True):
                yield _agent_case(kind, form, streamed=streamed)


def _agent_case(kind: str, form: str, *, streamed: bool) -> Callable[[], None]:
    output, question, tools = FORMS[form]

    async def run_client() -> object:
        agent = _agent(kind, output_type=output, tools=tools)
        if not streamed:
            return (await Runner.run(agent, question, max_turns=5)).final_output
        result = Runner.run_streamed(agent, question, max_turns=5)
        assert [event async for event in result.stream_events()]
        return result.final_output

    def check() -> None:
        cities.clear()
        answer = LOOP.run_until_complete(run_client())
        assert answer
        assert isinstance(answer, output or str)
        assert bool(cities) == bool(tools)

    check.__name__ = f"{kind}: {form}{', streamed' * streamed}"
    return check


def _agent(kind: str, **asked_for: object) -> Agent:
    model = KINDS[kind](model=MODEL, openai_client=client)
    return Agent("Ours", model=model, model_settings=SETTINGS, **asked_for)


def fill_in(asked_for: type[BaseModel], prompt: str) -> BaseModel:
    # The SDK itself refuses dictionaries in its strict mode.
    output = AgentOutputSchema(asked_for, strict_json_schema=False)
    answer = Runner.run(_agent("responses", output_type=output), prompt)
    return LOOP.run_until_complete(answer).final_output


run(*hello(), *constructs(fill_in))
