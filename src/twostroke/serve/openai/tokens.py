"""POST /tokenize and /detokenize: texts to token ids and back, as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.serve.openai.chat import Message, to_conversation, to_thinking
from twostroke.serve.openai.fields import refuse_all_but
from twostroke.serve.tools import ToolBody, to_tools

if TYPE_CHECKING:
    from twostroke.engine.client import ModelCard

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
_ONLY_WITH: Final = {
    "prompt": (
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "tools",
    ),
    "messages": ("add_special_tokens",),
}


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation for the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None

    # Refused unless neutral.
    chat_template: Any = None
    mm_processor_kwargs: Any = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """The ids; `token_strs` are the tokens as the vocabulary spells them, where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Their text, that of special tokens included."""

    prompt: str


def tokenize(asked: TokenizeRequest, card: ModelCard) -> TokenizeBody:
    """Return the ids that a request with this prompt or these messages has.

    Raises:
        RequestError: not one of them is given, or the messages do not suit the chat template.
    """
    refuse_all_but(asked, NEUTRAL)
    ids = _encode(asked, card)
    texts = [card.tokenizer.token_text(id_) for id_ in ids] if asked.return_token_strs else None
    return TokenizeBody(len(ids), card.context_length, ids, texts)


def detokenize(asked: DetokenizeRequest, card: ModelCard) -> DetokenizeBody:
    """Return the text of ids; bytes that are no UTF-8 become U+FFFD.

    Raises:
        RequestError: the vocabulary has no such id.
    """
    tokenizer = card.tokenizer
    last = tokenizer.vocab_size - 1
    for place, id_ in enumerate(asked.tokens):
        if not 0 <= id_ <= last or tokenizer.token_text(id_) is None:
            reason = f"is not a token of this model, whose ids go from 0 to {last}."
            raise RequestError(reason, field=f"tokens[{place}]")
    return DetokenizeBody(tokenizer.decode(asked.tokens, skip_special=False))


def _encode(asked: TokenizeRequest, card: ModelCard) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("Give either prompt or messages.", field="prompt")
    given = "messages" if asked.prompt is None else "prompt"
    for name in _ONLY_WITH[given]:
        if getattr(asked, name):
            other = "prompt" if given == "messages" else "messages"
            raise RequestError(f"may only be set with {other}: leave it out.", field=name)
    if asked.prompt is not None:
        add_special = asked.add_special_tokens is not False
        return card.tokenizer.encode(asked.prompt, add_special=add_special)
    assert asked.messages is not None
    conversation = to_conversation(
        asked.messages,
        to_tools(asked.tools, None, parallel=None),
        has_turn=asked.add_generation_prompt,
        continues=asked.continue_final_message,
        thinking=to_thinking(asked.chat_template_kwargs),
    )
    return conversation.encode(card)
