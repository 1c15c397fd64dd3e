"""instructor: forms as tools and as JSON schemas, streamed too; and types of Pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import instructor
from checks import BASE_URL, MODEL, run
from openai import OpenAI
from pydantic import BaseModel, Field
from pydantic_constructs import constructs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

openai = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
SETTINGS = {"model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0}
MODES = {
    mode: instructor.from_openai(openai, mode=mode)
    for mode in (
        instructor.Mode.TOOLS,
        instructor.Mode.TOOLS_STRICT,
        instructor.Mode.JSON,
        instructor.Mode.JSON_SCHEMA,
        instructor.Mode.RESPONSES_TOOLS,
    )
}


class Person(BaseModel):
    """Somebody."""

    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=150)]


def hello() -> Iterator[Callable[[], None]]:
    for mode in MODES:
        for streamed in (False, True):
            yield _construct_case(mode, streamed=streamed)


def _construct_case(mode: instructor.Mode, *, streamed: bool) -> Callable[[], None]:
    messages = [{"role": "user", "content": "Anna is 30 years old."}]

    def check() -> None:
        if streamed:
            *_, answer = MODES[mode].create_partial(
                response_model=Person, messages=messages, **SETTINGS
            )
        else:
            answer = MODES[mode].create(response_model=Person, messages=messages, **SETTINGS)
        assert (answer.name, answer.age) == ("Anna", 30)

    check.__name__ = f"{mode.name}{', streamed' * streamed}"
    return check


def fill_in(form: type[BaseModel], prompt: str) -> BaseModel:
    messages = [{"role": "user", "content": prompt}]
    return MODES[instructor.Mode.JSON_SCHEMA].create(
        response_model=form, messages=messages, **SETTINGS
    )


run(*hello(), *constructs(fill_in))
