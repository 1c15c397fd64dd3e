"""Encodes prompts: a text, token ids, or a conversation become token ids within the context."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.message_text import counted_noun
from twostroke.core.request import NO_HINTS, Hints
from twostroke.engine.chat.reasoning import Thinking
from twostroke.engine.scheduler.config import prompt_too_long
from twostroke.model.tokenizer import TooManyTokensError, encode_infill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.content_marks import ContentMarks
    from twostroke.engine.chat.conversation import Chat
    from twostroke.engine.model_card import ModelCard
    from twostroke.model.tokenizer import InfillTokens, Prompt

_MAX_TOKEN_CHARS: Final = 64  # a text beyond this many for each token of the context is cut
_MAX_QUOTED_CHARS: Final = 60  # of a wrong prompt, in an error


def encode_text(
    card: ModelCard,
    prompt: str | Sequence[int],
    *,
    field: str = "prompt",
    add_special: bool = True,
    parse_special: bool | None = None,
) -> list[int]:
    """Return the token ids of a prompt to continue. Token ids are returned unchanged.

    Args:
        card: the model.
        prompt: a text, or token ids.
        field: the name of the prompt in errors.
        add_special: whether to add the tokens that begin every text, unless the prompt has them.
        parse_special: whether the text of a special token becomes that token; None for the model's
            default.

    Raises:
        ContextLengthError: a text has more tokens than the context. It is not encoded to its end.
            The length of token ids is checked at submission.
    """
    if not isinstance(prompt, str):
        return _token_ids(prompt, field)
    with _within_context(card, field):
        return card.tokenizer.encode(
            prompt,
            add_special=add_special,
            parse_special=card.parses_special if parse_special is None else parse_special,
            max_tokens=card.context_length,
        )


def encode_beginning(
    card: ModelCard,
    prompt: str | Sequence[int],
    *,
    add_special: bool = True,
    parse_special: bool | None = None,
) -> list[int]:
    """Return the first token ids of a prompt, which may be longer than the context.

    At most the context length is returned. The options are as in `encode_text`.
    """
    num_tokens = card.context_length
    beginning = prompt[: num_tokens * _MAX_TOKEN_CHARS]
    if not isinstance(beginning, str):
        return _token_ids(beginning)[:num_tokens]
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
    """Return the token ids of a prompt that is a sequence of texts and token ids.

    The options are as in `encode_text`.

    Raises:
        ContextLengthError: the parts have more tokens than the context.
    """
    ids: list[int] = []
    parses = card.parses_special if parse_special is None else parse_special
    for index_of_part, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
            continue
        if len(ids) > card.context_length:  # before more text is encoded
            raise prompt_too_long(field, len(ids), card.context_length, is_exact=False)
        with _within_context(card, field):
            ids += card.tokenizer.encode(
                part,
                add_special=add_special and index_of_part == 0,
                parse_special=parses,
                max_tokens=card.context_length,
            )
    return ids


def encode_infill_prompt(card: ModelCard, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """Return the token ids of a fill-in-the-middle prompt, in the model's own form.

    The answer comes between `prefix`, a text or token ids, and the text `suffix`.

    Raises:
        RequestError: the model has no tokens for filling in the middle, or the suffix is no text.
        ContextLengthError: the prompt has more tokens than the context.
    """
    if not isinstance(suffix, str):
        raise RequestError("must be a text, got {value!r}.", field="suffix", value=suffix)
    tokens = _infill_tokens(card)
    prefix = prefix if isinstance(prefix, str) else _token_ids(prefix)
    with _within_context(card, "prompt"):
        return encode_infill(card.tokenizer, tokens, prefix, suffix, card.context_length)


def encode_rendered(card: ModelCard, prompt: Prompt, field: str = "messages") -> list[int]:
    """Return the token ids of a conversation that a chat template has rendered.

    Raises:
        ContextLengthError: the conversation has more tokens than the context.
    """
    with _within_context(card, field):
        return card.tokenizer.encode_prompt(prompt, max_tokens=card.context_length)


def with_infill_end_ids(card: ModelCard, params: SamplingParams) -> SamplingParams:
    """Return `params` with the tokens that end the answer to a fill-in-the-middle prompt.

    With `ignore_eos`, `params` are returned unchanged.

    Raises:
        RequestError: the model has no tokens for filling in the middle.
    """
    end_ids = _infill_tokens(card).end_ids
    return params if params.ignore_eos else replace(params, end_ids=end_ids)


def with_reasoning_budget(
    card: ModelCard, params: SamplingParams, thinking: Thinking
) -> SamplingParams:
    """Return `params` with the budget of a conversation's reasoning, if `thinking` has one.

    If the budget comes from a default instead of the request, it is lowered below the context
    length.
    """
    budget = thinking.budget
    if budget is None:
        return params
    if not thinking.sets_budget:
        budget = min(budget, card.context_length - 1)
    return replace(params, reasoning_budget=budget)


def to_hints(card: ModelCard, speculate: str, prediction: str | None) -> Hints:
    """Return the speculation hints of a request.

    `speculate` names the method; `prediction` is the text of the expected answer, empty or None
    without one.

    Raises:
        RequestError: an argument is not a text, or the prediction has more tokens than the context.
    """
    expected = "" if prediction is None else prediction
    for name, value in (("speculate", speculate), ("prediction", expected)):
        if not isinstance(value, str):
            raise RequestError("must be a text, got {value!r}.", field=name, value=value)
    if not prediction:
        return Hints(speculate)
    try:
        tokens = card.tokenizer.encode(prediction, max_tokens=card.context_length)
    except TooManyTokensError as error:
        reason = (
            f"has at least {counted_noun(error.num_tokens, 'token')}, which exceeds the context "
            f"length of {card.context_length}."
        )
        raise RequestError(reason, field="prediction") from None
    return Hints(speculate, tuple(tokens))


def with_shared_lengths(
    card: ModelCard,
    hints: Hints,
    prompt: Prompt,
    tokens: Sequence[int],
    *,
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[Sequence[Mapping[str, Any]]], Prompt],
) -> Hints:
    """Return hints with the lengths of the prefixes that later prompts of a chat will share.

    `hints` are returned unchanged for models without recurrent layers, which share prefixes of any
    length. `tokens` are the token ids of `prompt`, and `render` makes such a prompt of messages.
    """
    if not card.cost.program.state_layers:
        return hints
    from twostroke.engine.chat.shared_lengths import find_shared_lengths

    lengths = find_shared_lengths(card.tokenizer, prompt, tokens, messages, render)
    return replace(hints, shared_lengths=lengths)


def encode_chat(card: ModelCard, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the token ids of a conversation, up to where the model's answer begins.

    Raises:
        RequestError: the model has no chat template, or the template refuses the messages.
        ContextLengthError: the conversation has more tokens than the context.
    """
    return encode_rendered(card, chat_of(card).render(messages))


def encode_turn(
    card: ModelCard, messages: Sequence[Mapping[str, object]], params: SamplingParams
) -> tuple[list[int], SamplingParams, Hints, ContentMarks | None]:
    """Return the token ids of a conversation, and the parameters and hints of its answer.

    Also returns the marks around the text of the answer; None without marks. For a model that
    reasons before it answers, the returned parameters have a constraint on the reasoning.

    Raises:
        RequestError: the model has no chat template, or the template refuses the messages.
        ContextLengthError: the conversation has more tokens than the context.
    """
    chat = chat_of(card)
    render = partial(chat.render, thinking=Thinking(budget=params.reasoning_budget))
    turn = chat.prepare_answer(render(messages))
    tokens = encode_rendered(card, turn.prompt)
    hints = with_shared_lengths(
        card, NO_HINTS, turn.prompt, tokens, messages=messages, render=render
    )
    return tokens, turn.constrained(params), hints, turn.content_marks


def chat_of(card: ModelCard) -> Chat:
    """Return the chat templates of a model.

    Raises:
        RequestError: the model has no chat template.
    """
    if card.chat_template is None:
        reason = "The model {name} has no chat template: use plain completions instead."
        raise RequestError(reason, field="messages", name=card.name)
    return card.chat_template


@contextmanager
def _within_context(card: ModelCard, field: str) -> Iterator[None]:
    """Return a context manager whose ContextLengthError names the prompt's field.

    The tokenizer's error, raised in the `with` block for a prompt that is too long, names no field,
    so it is replaced.
    """
    try:
        yield
    except TooManyTokensError as error:
        raise prompt_too_long(
            field, error.num_tokens, card.context_length, is_exact=False
        ) from None


def _token_ids(prompt: Sequence[int], field: str = "prompt") -> list[int]:
    try:
        if not isinstance(prompt, (bytes, bytearray)):
            return list(map(index, prompt))
    except TypeError:
        pass
    quoted = repr(prompt)
    if len(quoted) > _MAX_QUOTED_CHARS:
        quoted = f"{quoted[:_MAX_QUOTED_CHARS]}..."
    reason = "must be a text or a list of token ids, got {value}."
    raise RequestError(reason, field=field, value=quoted)


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
