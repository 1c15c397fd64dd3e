"""Pydantic AI, through each of its models that can reach us; and types of Pydantic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from checks import BASE_URL, MODEL, ROOT_URL, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_constructs import constructs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic_ai.tools import ToolDefinition

ours = OpenAIProvider(base_url=BASE_URL, api_key="none")
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=ours),
    "responses": OpenAIResponsesModel(MODEL, provider=ours),
    "anthropic": AnthropicModel(
        MODEL,
        provider=AnthropicProvider(base_url=ROOT_URL, api_key="none"),
        profile={"supports_json_schema_output": True},  # unknown names have it not
    ),
}
SETTINGS = {"temperature": 0, "max_tokens": 200}
QUESTION = "What is the weather in Paris now?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Annotated[str, Field(max_length=40)]
    degrees: Annotated[int, Field(ge=-90, le=60)]


FORMS = {
    "text": (str, "Why is the sky blue? Answer in one sentence.", False),
    "a tool": (str, QUESTION, True),
    "a form": (NativeOutput(Weather), "In Paris it is 17 degrees.", False),
    "a form as a tool": (ToolOutput(Weather), "In Paris it is 17 degrees.", False),
    "a tool and a form": (NativeOutput(Weather), QUESTION, True),
}


def hello() -> Iterator[Callable[[], None]]:
    for model in MODELS:
        for form in FORMS:
            for streamed in (False, True):
                yield _model_case(model, form, streamed=streamed)


def _model_case(model: str, form: str, *, streamed: bool) -> Callable[[], None]:
    output, question, has_tool = FORMS[form]
    agent = Agent(MODELS[model], output_type=output, model_settings=SETTINGS)
    cities = []

    async def once(_: object, tool: ToolDefinition) -> ToolDefinition | None:
        return None if cities else tool  # a small model calls again and again if it may

    if has_tool:

        @agent.tool_plain(prepare=once)
        def get_weather(city: str) -> str:
            """Tell the weather in a city now."""
            cities.append(city)
            return "17 degrees"

    async def stream() -> object:
        async with agent.run_stream(question, usage_limits=LIMITS) as result:
            async for _ in result.stream_output():
                pass
            return await result.get_output()

    def check() -> None:
        answer = (
            asyncio.run(stream())
            if streamed
            else agent.run_sync(question, usage_limits=LIMITS).output
        )
        assert isinstance(answer, str if output is str else Weather)
        assert answer
        assert bool(cities) == has_tool

    check.__name__ = f"{model}: {form}{', streamed' * streamed}"
    return check


LIMITS = UsageLimits(request_limit=5)


def fill_in(form: type[BaseModel], prompt: str) -> BaseModel:
    agent = Agent(
        MODELS["chat"], output_type=NativeOutput(form), model_settings=SETTINGS, retries=0
    )
    return agent.run_sync(prompt).output


run(*hello(), *constructs(fill_in))
