"""From what a caller says to token ids: plain text, ids, or a conversation."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Final

from twostroke.chat.reasoning import AS_IT_IS
from twostroke.core.errors import RequestError
from twostroke.core.request import Hints
from twostroke.schedule.config import too_long
from twostroke.tokenize import TooManyTokensError, encode_infill

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.chat.conversation import Chat
    from twostroke.chat.reasoning import Thinking
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import ModelCard
    from twostroke.tokenize import InfillTokens, Prompt

_MOST_SHOWN: Final = 60  # characters of what is no prompt


def encode_text(
    card: ModelCard, prompt: str | Sequence[int], *, field: str = "prompt"
) -> list[int]:
    """Return the token ids of a prompt to be continued; ids pass through.

    `field` is what errors call it.

    Raises:
        ContextLengthError: a long text surely has more tokens than the context; it is not encoded
            to its end. The engine refuses others that are too long.
    """
    if not isinstance(prompt, str):
        return _listed(prompt)
    with _within_context(card, field):
        return card.tokenizer.encode(prompt, add_special=True, most=card.context_length)


def encode_gap(card: ModelCard, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """Return the prompt whose answer stands between `prefix`, a text or ids, and `suffix`.

    Raises:
        RequestError: the model has no tokens for that.
        ContextLengthError: as `encode_text`.
    """
    tokens = _infill_tokens(card)
    prefix = prefix if isinstance(prefix, str) else _listed(prefix)
    with _within_context(card, "prompt"):
        return encode_infill(card.tokenizer, tokens, prefix, suffix, card.context_length)


def encode_rendered(card: ModelCard, prompt: Prompt, field: str = "messages") -> list[int]:
    """Return the token ids of a conversation that a chat template has rendered.

    Raises:
        ContextLengthError: as `encode_text`.
    """
    with _within_context(card, field):
        return card.tokenizer.encode_prompt(prompt, most=card.context_length)


def ending_gaps(card: ModelCard, params: SamplingParams) -> SamplingParams:
    """Return `params` for an answer between prefix and suffix, which has some more ends.

    Raises:
        RequestError: the model has no tokens for that.
    """
    ends = _infill_tokens(card).end_ids
    return params if params.ignore_eos else replace(params, end_ids=ends)


def to_hints(card: ModelCard, speculate: str, prediction: str) -> Hints:
    """Return what may make a request faster; `prediction` is the text of the expected answer.

    Raises:
        RequestError: that is long, and surely has more tokens than the context.
    """
    if not prediction:
        return Hints(speculate)
    try:
        tokens = card.tokenizer.encode(prediction, most=card.context_length)
    except TooManyTokensError as error:
        reason = (
            f"has at least {error.num_tokens} tokens, which exceeds the context length of "
            f"{card.context_length}."
        )
        raise RequestError(reason, field="prediction") from None
    return Hints(speculate, tuple(tokens))


def encode_chat(
    card: ModelCard,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    thinking: Thinking = AS_IT_IS,
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's turn or the rest of it.

    Raises:
        RequestError: the model has no chat template, or the messages do not suit it.
        ContextLengthError: as `encode_text`.
    """
    prompt = chat_of(card).render(
        messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        thinking=thinking,
    )
    return encode_rendered(card, prompt)


def encode_turn(
    card: ModelCard, messages: Sequence[Mapping[str, object]], params: SamplingParams
) -> tuple[list[int], SamplingParams]:
    """Return the token ids of a conversation, and how to answer it.

    Raises:
        RequestError: as `encode_chat`.
    """
    chat = chat_of(card)
    turn = chat.turn(chat.render(messages))
    return encode_rendered(card, turn.prompt), turn.constrained(params)


def chat_of(card: ModelCard) -> Chat:
    """Return the chat template of a model.

    Raises:
        RequestError: it has none.
    """
    if card.chat_template is None:
        reason = "The model {name} has no chat template: use plain completions instead."
        raise RequestError(reason, field="messages", name=card.name)
    return card.chat_template


@contextmanager
def _within_context(card: ModelCard, field: str) -> Iterator[None]:
    """Say in a caller's words that a prompt surely has too many tokens."""
    try:
        yield
    except TooManyTokensError as error:
        raise too_long(field, error.num_tokens, card.context_length, is_counted=False) from None


def _listed(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, (bytes, bytearray)):
        raise _no_prompt(prompt)
    try:
        return list(map(index, prompt))
    except TypeError:
        raise _no_prompt(prompt) from None


def _no_prompt(prompt: object) -> RequestError:
    shown = repr(prompt)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    reason = "must be a text or a list of token ids, got {value}."
    return RequestError(reason, field="prompt", value=shown)


def _infill_tokens(card: ModelCard) -> InfillTokens:
    tokens = card.tokenizer.infill
    if tokens is None:
        raise RequestError(
            "is not supported by {name}, which has no tokens for filling in the middle: leave it "
            "out, or use a model that has them, such as qwen2.5-coder-1.5b.",
            field="suffix",
            name=card.name,
        )
    return tokens
