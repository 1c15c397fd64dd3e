"""POST /tokenize and /detokenize: texts to token ids and back, in vLLM's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.serve.describe import field
from twostroke.serve.openai.chat import (
    ContinuesLast,
    Messages,
    OpensTurn,
    to_conversation,
    to_thinking,
)
from twostroke.serve.openai.fields import TemplateVariables
from twostroke.serve.tools import ToolBody, ToolsAs, to_tools

if TYPE_CHECKING:
    from twostroke.engine.client import ModelCard

# Fields that suit only one of the two ways to give a text.
_FIELDS_OF: Final = {
    "messages": (
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "tools",
    ),
    "prompt": ("add_special_tokens",),
}


class TokenizeRequest(field.RequestObject):
    """One of `prompt`, a text, and `messages`, a conversation for the chat template."""

    prompt: Annotated[str | None, field.doc("A text.")] = None
    messages: Annotated[Messages | None, field.doc("A conversation.")] = None
    model: field.ModelName = None
    add_special_tokens: Annotated[
        bool | None, field.doc("Add the tokens that begin every text; true if left out.")
    ] = None
    return_token_strs: Annotated[bool | None, field.doc("Return the tokens' texts, too.")] = None
    add_generation_prompt: OpensTurn = None
    continue_final_message: ContinuesLast = None
    chat_template_kwargs: TemplateVariables = None
    tools: ToolsAs[ToolBody] = None

    chat_template: field.Unsupported = None
    mm_processor_kwargs: Annotated[Any, field.unsupported({})] = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """The ids; `token_strs` are the tokens as the vocabulary spells them, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(field.RequestObject):
    """Token ids."""

    tokens: Annotated[list[field.TokenId], field.doc("Token ids.")]
    model: field.ModelName = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """The ids' text, including special tokens."""

    prompt: str


def tokenize(asked: TokenizeRequest, card: ModelCard) -> TokenizeBody:
    """Return the ids of a prompt or of messages.

    Raises:
        RequestError: both or neither are given, or the chat template refuses the messages.
    """
    ids = _encode(asked, card)
    texts = [card.tokenizer.token_text(id_) for id_ in ids] if asked.return_token_strs else None
    return TokenizeBody(len(ids), card.context_length, ids, texts)


def detokenize(asked: DetokenizeRequest, card: ModelCard) -> DetokenizeBody:
    """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

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
    other = "messages" if asked.messages is None else "prompt"
    for name in _FIELDS_OF[other]:
        if getattr(asked, name):
            raise RequestError(f"may only be set with {other}: leave it out.", field=name)
    if asked.prompt is not None:
        add_special = asked.add_special_tokens is not False
        return card.tokenizer.encode(asked.prompt, add_special=add_special)
    assert asked.messages is not None
    conversation = to_conversation(
        asked.messages,
        to_tools([tool.function for tool in asked.tools or ()], None, parallel=None),
        opens_turn=asked.add_generation_prompt,
        continues=asked.continue_final_message,
        thinking=to_thinking(asked.chat_template_kwargs),
    )
    return conversation.encode(card)
