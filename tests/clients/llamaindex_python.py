"""LlamaIndex: its OpenAI-like model, and an agent with a tool and a form."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from checks import BASE_URL, MODEL, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.objects import ObjectRetriever
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from llama_index.core.agent.workflow import AgentOutput

SETTINGS = {"model": MODEL, "api_base": BASE_URL, "api_key": "none", "temperature": 0}
LIMITS = {"max_tokens": 200, "max_retries": 0, "context_window": 32768}
KINDS = {"is_chat_model": True, "is_function_calling_model": True}
model = OpenAILike(**SETTINGS, **LIMITS, **KINDS)
forms = OpenAILike(**SETTINGS, **LIMITS, **KINDS, should_use_structured_outputs=True)
LOOP = asyncio.new_event_loop()
QUESTION = "What is the weather in Paris now?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Annotated[str, Field(max_length=40)]
    degrees: Annotated[int, Field(ge=-90, le=60)]


def plain() -> None:
    messages = [ChatMessage("Why is the sky blue? Answer in one sentence.")]
    assert model.chat(messages).message.content


def stream() -> None:
    assert "".join(chunk.delta for chunk in model.stream_chat([ChatMessage("Say something.")]))


def completions() -> None:
    writer = OpenAILike(**SETTINGS, max_tokens=8)
    assert writer.complete("The capital of France is").text


def form() -> None:
    for llm in (model, forms):  # as a tool, and as a JSON schema
        output = llm.structured_predict(Weather, PromptTemplate("In Paris it is 17 degrees."))
        assert isinstance(output, Weather)


def form_streamed() -> None:
    for llm in (model, forms):
        prompt = PromptTemplate("In Paris it is 17 degrees.")
        *_, prediction = llm.stream_structured_predict(Weather, prompt)
        assert Weather.model_validate(prediction.model_dump())


def _agent(*, streamed: bool, has_form: bool) -> AgentOutput:
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """Tell the weather in a city now."""
        cities.append(city)
        return "17 degrees"

    class Once(ObjectRetriever):
        """Offers the tool until it ran: a small model calls again and again if it may."""

        def __init__(self) -> None:
            self.tool = FunctionTool.from_defaults(get_weather)

        async def aretrieve(self, _: object) -> list[FunctionTool]:
            return [] if cities else [self.tool]

    async def run_client() -> AgentOutput:
        agent = FunctionAgent(
            tool_retriever=Once(),
            llm=model,
            output_cls=Weather if has_form else None,
            streaming=streamed,
        )
        handler = agent.run(QUESTION)
        async for _ in handler.stream_events():
            pass
        return await handler

    answer = LOOP.run_until_complete(run_client())
    assert cities
    return answer


def tool() -> None:
    assert _agent(streamed=False, has_form=False).response.content


def tool_streamed() -> None:
    assert _agent(streamed=True, has_form=False).response.content


def tool_and_form() -> None:
    assert _agent(streamed=False, has_form=True).get_pydantic_model(Weather)


def tool_and_form_streamed() -> None:
    assert _agent(streamed=True, has_form=True).get_pydantic_model(Weather)


run(
    *(plain, stream, completions, form, form_streamed),
    *(tool, tool_streamed, tool_and_form, tool_and_form_streamed),
)
