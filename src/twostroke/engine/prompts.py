"""From a caller's prompt to token ids: a text, ids, or a conversation."""

from __future__ import annotations

from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.request import Hints
from twostroke.engine.scheduler.config import prompt_too_long
from twostroke.model.tokenizer import TooManyTokensError, encode_infill

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.conversation import Chat
    from twostroke.engine.model_card import ModelCard
    from twostroke.model.tokenizer import InfillTokens, Prompt

_MAX_TOKEN_LENGTH: Final = 64  # characters; a longer text is cut before it is encoded
_MAX_SHOWN: Final = 60  # characters of a wrong prompt that an error repeats


def encode_text(
    card: ModelCard,
    prompt: str | Sequence[int],
    *,
    field: str = "prompt",
    add_special: bool = True,
    parse_special: bool | None = None,
) -> list[int]:
    """Return the token ids of a prompt to be continued; ids pass through.

    `field` is what errors call it. `add_special` adds the tokens that begin every text, unless the
    prompt has them. `parse_special` says whether the texts of special tokens become these tokens;
    None leaves that to the card.

    Raises:
        ContextLengthError: a long text has more tokens than the context; it is not encoded to its
            end. The engine refuses other prompts that are too long.
    """
    if not isinstance(prompt, str):
        return _listed(prompt)
    with _within_context(card, field):
        return card.tokenizer.encode(
            prompt,
            add_special=add_special,
            parse_special=card.parses_special if parse_special is None else parse_special,
            most=card.context_length,
        )


def encode_beginning(
    card: ModelCard,
    prompt: str | Sequence[int],
    *,
    add_special: bool = True,
    parse_special: bool | None = None,
) -> list[int]:
    """Return as many of a prompt's first token ids as the context holds.

    Otherwise as `encode_text`.
    """
    num_tokens = card.context_length
    beginning = prompt[: num_tokens * _MAX_TOKEN_LENGTH]
    if not isinstance(beginning, str):
        return _listed(beginning)[:num_tokens]
    parses = card.parses_special if parse_special is None else parse_special
    ids = card.tokenizer.encode(beginning, add_special=add_special, parse_special=parses)
    return ids[:num_tokens]


def encode_parts(
    card: ModelCard,
    parts: Sequence[str | int],
    *,
    field: str = "prompt",
    add_special: bool = True,
    parse_special: bool | None = None,
) -> list[int]:
    """Return the token ids of texts and ids that follow each other.

    The options mean the same as in `encode_text`.

    Raises:
        ContextLengthError: as `encode_text`.
    """
    tokenizer, ids = card.tokenizer, list[int]()
    parses = card.parses_special if parse_special is None else parse_special
    for place, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
            continue
        if len(ids) > card.context_length:  # before more is encoded in vain
            raise prompt_too_long(field, len(ids), card.context_length, is_exact=False)
        with _within_context(card, field):
            ids += tokenizer.encode(
                part,
                add_special=add_special and place == 0,
                parse_special=parses,
                most=card.context_length,
            )
    return ids


def encode_gap(card: ModelCard, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """Return the prompt for an answer between `prefix`, a text or ids, and `suffix`.

    Raises:
        RequestError: the model has no tokens for this.
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
    """Return `params` for an answer between prefix and suffix, which has more end tokens.

    Raises:
        RequestError: the model has no tokens for this.
    """
    ends = _infill_tokens(card).end_ids
    return params if params.ignore_eos else replace(params, end_ids=ends)


def to_hints(card: ModelCard, speculate: str, prediction: str) -> Hints:
    """Return the hints of a request; `prediction` is the text of the expected answer.

    Raises:
        RequestError: the prediction has more tokens than the context.
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


def encode_chat(card: ModelCard, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Raises:
        RequestError: the model has no chat template, or it refuses the messages.
        ContextLengthError: as `encode_text`.
    """
    return encode_rendered(card, chat_of(card).render(messages))


def encode_turn(
    card: ModelCard, messages: Sequence[Mapping[str, object]], params: SamplingParams
) -> tuple[list[int], SamplingParams]:
    """Return the token ids of a conversation, and the parameters of its answer.

    Raises:
        RequestError: as `encode_chat`.
    """
    chat = chat_of(card)
    turn = chat.turn(chat.render(messages))
    return encode_rendered(card, turn.prompt), turn.constrained(params)


def chat_of(card: ModelCard) -> Chat:
    """Return the chat template of a model; RequestError if it has none."""
    if card.chat_template is None:
        reason = "The model {name} has no chat template: use plain completions instead."
        raise RequestError(reason, field="messages", name=card.name)
    return card.chat_template


@contextmanager
def _within_context(card: ModelCard, field: str) -> Iterator[None]:
    """Raise errors about too many tokens with the caller's name of the prompt."""
    try:
        yield
    except TooManyTokensError as error:
        raise prompt_too_long(
            field, error.num_tokens, card.context_length, is_exact=False
        ) from None


def _listed(prompt: Sequence[int]) -> list[int]:
    try:
        if not isinstance(prompt, (bytes, bytearray)):
            return list(map(index, prompt))
    except TypeError:
        pass
    shown = repr(prompt)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    reason = "must be a text or a list of token ids, got {value}."
    raise RequestError(reason, field="prompt", value=shown)


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
