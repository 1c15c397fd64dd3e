"""From what a caller says to token ids: plain text, ids, or a conversation."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from twostroke.core.errors import RequestError
from twostroke.core.request import Hints
from twostroke.engine.tool_prompt import with_tools_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.engine.client import ModelCard
    from twostroke.tokenize import Prompt, Tokenizer
    from twostroke.tokenize.templates import ChatTemplate


class Chat:
    """A model's chat template, compiled when it is first used: the compiler is slow to import."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        from twostroke.tokenize.templates import ChatTemplate

        return ChatTemplate.for_tokenizer(self._tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Return the prompt of a conversation, in which `tools` may be called.

        A template that knows nothing of tools is given them, and calls of them, in words.

        Raises:
            RequestError: the messages are not as they should be, or do not suit the template.
            ModelFormatError: the model's template is not valid.
        """
        template = self._template
        if template.knows_tools:
            shown = tools or None
            return template.render(
                messages, add_generation_prompt=add_generation_prompt, tools=shown
            )
        has_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
        if tools or has_calls:
            messages = with_tools_in_words(messages, tools)
        return template.render(messages, add_generation_prompt=add_generation_prompt)


def encode_text(card: ModelCard, prompt: str | Sequence[int]) -> list[int]:
    """Return the token ids of a prompt to be continued; ids pass through."""
    if isinstance(prompt, str):
        return card.tokenizer.encode(prompt, add_special=True)
    try:
        return list(prompt)
    except TypeError:
        message = f"A prompt must be a text or a list of token ids, not {prompt!r}."
        raise RequestError(message, param="prompt") from None


def to_hints(card: ModelCard, speculate: str, prediction: str) -> Hints:
    """Return what may make a request faster; `prediction` is the text of the expected answer."""
    return Hints(speculate, tuple(card.tokenizer.encode(prediction)) if prediction else ())


def encode_chat(
    card: ModelCard,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] = (),
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's turn.

    Raises:
        RequestError: the model has no chat template, or the messages do not suit it.
    """
    if card.chat_template is None:
        message = f"{card.name} has no chat template: use plain completions instead."
        raise RequestError(message, param="messages")
    return card.tokenizer.encode_prompt(card.chat_template.render(messages, tools))
