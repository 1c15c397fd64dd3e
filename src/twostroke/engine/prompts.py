"""From what a caller says to token ids: plain text, ids, or a conversation."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from twostroke.core.errors import RequestError
from twostroke.core.request import Hints
from twostroke.engine.tool_prompt import with_tools_in_words
from twostroke.tokenize import encode_infill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import ModelCard
    from twostroke.tokenize import InfillTokens, Prompt, Tokenizer
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
        continue_final_message: bool = False,
    ) -> Prompt:
        """Return the prompt of a conversation, in which `tools` may be called.

        A template that knows nothing of tools is given them, and calls of them, in words. The last
        message may be one to be continued.

        Raises:
            RequestError: the messages are not as they should be, or do not suit the template.
            ModelFormatError: the model's template is not valid.
        """
        template, shown = self._template, tools or None
        has_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
        if not template.knows_tools:
            if tools or has_calls:
                messages = with_tools_in_words(messages, tools)
            shown = None
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shown,
        )


def encode_text(
    card: ModelCard, prompt: str | Sequence[int], *, add_special: bool = True
) -> list[int]:
    """Return the token ids of a prompt to be continued; ids pass through."""
    if isinstance(prompt, str):
        return card.tokenizer.encode(prompt, add_special=add_special)
    return _listed(prompt)


def encode_gap(card: ModelCard, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """Return the prompt whose answer stands between `prefix`, a text or ids, and `suffix`.

    Raises:
        RequestError: the model has no tokens for that.
    """
    tokens = _infill_tokens(card)
    prefix = prefix if isinstance(prefix, str) else _listed(prefix)
    return encode_infill(card.tokenizer, tokens, prefix, suffix)


def ending_gaps(card: ModelCard, params: SamplingParams) -> SamplingParams:
    """Return `params` for an answer between prefix and suffix, which has some more ends.

    Raises:
        RequestError: the model has no tokens for that.
    """
    ends = sorted(_infill_tokens(card).end_ids)
    if params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, *ends))


def to_hints(card: ModelCard, speculate: str, prediction: str) -> Hints:
    """Return what may make a request faster; `prediction` is the text of the expected answer."""
    return Hints(speculate, tuple(card.tokenizer.encode(prediction)) if prediction else ())


def encode_chat(
    card: ModelCard,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's turn or the rest of it.

    Raises:
        RequestError: the model has no chat template, or the messages do not suit it.
    """
    if card.chat_template is None:
        message = f"{card.name} has no chat template: use plain completions instead."
        raise RequestError(message, param="messages")
    prompt = card.chat_template.render(
        messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return card.tokenizer.encode_prompt(prompt)


def _listed(prompt: Sequence[int]) -> list[int]:
    try:
        return list(prompt)
    except TypeError:
        message = f"A prompt must be a text or a list of token ids, not {prompt!r}."
        raise RequestError(message, param="prompt") from None


def _infill_tokens(card: ModelCard) -> InfillTokens:
    tokens = card.tokenizer.infill
    if tokens is None:
        message = (
            f"{card.name} has no tokens for filling in the middle: leave suffix out, or take a "
            "model that has them, such as qwen2.5-coder-1.5b."
        )
        raise RequestError(message, param="suffix")
    return tokens
