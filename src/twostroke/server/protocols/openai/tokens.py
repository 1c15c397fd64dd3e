"""The tokenizer's endpoints: /tokenize, /detokenize, /apply-template and /tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.routing import Route

from twostroke.core.errors import ContextLengthError, RequestError
from twostroke.core.message_text import counted_noun
from twostroke.model.tokenizer import TooManyTokensError
from twostroke.server.body import field
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.fields import TemplateVariables
from twostroke.server.protocols.common.prompts import (
    ChatMessage,
    ContinuesLast,
    Messages,
    OpensTurn,
    continues_in_llama_server,
    to_conversation,
    to_thinking,
)
from twostroke.server.protocols.common.tools import ToolBody, ToolsAs, to_tools

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.model_card import ModelCard
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.generation.job import Conversation
    from twostroke.server.models.registry import ModelRegistry

INFO_PATH: Final = "/tokenizer_info"
# The fields that hold a text to tokenize, each with the fields that may only be set with it.
_FIELDS_BY_INPUT: Final = {
    "messages": (
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "tools",
    ),
    "prompt": ("add_special_tokens",),
    "content": ("add_special", "with_pieces"),
}

# Texts of up to this many characters, and up to this many ids, are accepted for any context length.
MAX_SHORT_LENGTH: Final = 1 << 16
MaxTokens = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    field.doc(
        "More tokens are refused. Left out: the context length, or any number of tokens in a text "
        f"of up to {MAX_SHORT_LENGTH:,} characters."
    ),
]


class TemplateFields(field.RequestObject):
    """The request fields that decide how a conversation is rendered as a prompt."""

    model: field.ModelName = None
    add_generation_prompt: OpensTurn = None
    continue_final_message: ContinuesLast = None
    chat_template_kwargs: TemplateVariables = None
    tools: ToolsAs[ToolBody] = None

    chat_template: field.Unsupported = None


class TokenizeRequest(TemplateFields):
    """The body of a request to `/tokenize`, with exactly one of three fields.

    `prompt` is a text, `messages` a conversation for the chat template, and `content` is
    llama-server's field for a text.
    """

    prompt: Annotated[
        str | Messages | None,
        field.doc("A text; lm-evaluation-harness also sends conversations here."),
    ] = None
    messages: Annotated[Messages | None, field.doc("A conversation.")] = None
    content: Annotated[
        str | list[int | str] | None,
        field.doc("A text, or a list of texts and token ids that are joined."),
    ] = None
    add_special_tokens: field.AddSpecial = None
    return_token_strs: Annotated[bool | None, field.doc("Return the tokens' texts, too.")] = None
    add_special: Annotated[
        bool | None, field.doc("Add the tokens that begin every text; false if left out.")
    ] = None
    parse_special: field.ParseSpecial = None
    with_pieces: Annotated[bool | None, field.doc("Return each token with its text.")] = None
    max_tokens: MaxTokens = None

    mm_processor_kwargs: Annotated[Any, field.unsupported({})] = None

    def __post_init__(self) -> None:
        """Move chat messages that a client sent as `prompt` to `messages`."""
        if isinstance(self.prompt, list):
            self.messages = self.prompt
            self.prompt = self.add_special_tokens = None


class TokenPiece(msgspec.Struct, frozen=True):
    """An entry of `tokens` in the response of `/tokenize`, if the request sets `with_pieces`.

    It has the token's id and its text, or its bytes if they are not UTF-8.
    """

    id: int
    piece: str | list[int]


class TokenizeBody(msgspec.Struct, frozen=True):
    """The response of `/tokenize`: the token ids.

    `token_strs` has the tokens as the vocabulary spells them, if the request asks for them.
    """

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str | None] | None


class DetokenizeRequest(field.RequestObject):
    """The body of a request to `/detokenize`."""

    tokens: Annotated[list[field.TokenId], field.doc("Token ids.")]
    model: field.ModelName = None
    max_tokens: MaxTokens = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """The response of `/detokenize`: the text, with special tokens.

    The text is sent twice, under vLLM's name and under llama-server's.
    """

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The response of `/tokenizer_info`, named as in `tokenizer_config.json`; tokens are texts."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    add_bos_token: bool
    chat_template: str | None
    model_max_length: int
    vocab_size: int


class TemplateRequest(TemplateFields, kw_only=True):
    """The body of a request to `/apply-template`: a conversation."""

    messages: Messages


class TemplateBody(msgspec.Struct, frozen=True):
    """The response of `/apply-template`: the prompt's text, which the chat template made."""

    prompt: str


def tokenizer_routes(models: ModelRegistry) -> list[Route]:
    """Return the HTTP route of GET /tokenizer_info.

    `?model=NAME` in a request selects a model, by default the first.
    """

    async def tokenizer_info(request: Request) -> Response:
        _, model = models.find(request.query_params.get("model"))
        return to_json(describe_tokenizer(model.card))

    return [Route(INFO_PATH, tokenizer_info, name=INFO_PATH)]


def describe_tokenizer(card: ModelCard) -> TokenizerInfo:
    """Return a tokenizer's special tokens and sizes, which `/tokenizer_info` reports."""
    tokenizer = card.tokenizer
    texts: dict[str, Any] = {
        name: text
        for name, text in tokenizer.named_texts.items()
        if name in TokenizerInfo.__struct_fields__
    }
    if "eos_token" not in texts and tokenizer.eos_ids:
        texts["eos_token"] = tokenizer.token_text(min(tokenizer.eos_ids))
    return TokenizerInfo(
        **texts,
        add_bos_token=tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.prefix_ids,
        chat_template=tokenizer.chat_templates.get("default"),
        model_max_length=card.context_length,
        vocab_size=card.cost.program.vocab_size,
    )


def tokenize(request: TokenizeRequest, card: ModelCard) -> TokenizeBody:
    """Answer POST /tokenize with the token ids of a text or of chat messages.

    Raises:
        RequestError: not exactly one of `prompt`, `messages` and `content` is set, the
            vocabulary lacks an id, or the chat template refuses the messages.
        ContextLengthError: there are more tokens than the request or the context allows.
    """
    tokenizer = card.tokenizer
    max_tokens = request.max_tokens or card.context_length
    try:
        ids = _encode(request, card, max_tokens)
    except TooManyTokensError as error:
        raise _too_many_tokens(
            request, num_tokens=error.num_tokens, max_tokens=max_tokens, card=card
        ) from None
    if request.max_tokens is not None and len(ids) > max_tokens:
        raise _too_many_tokens(request, num_tokens=len(ids), max_tokens=max_tokens, card=card)
    texts = [tokenizer.token_text(id_) for id_ in ids] if request.return_token_strs else None
    tokens = [_piece(tokenizer, id_) for id_ in ids] if request.with_pieces else ids
    return TokenizeBody(
        count=len(ids), max_model_len=card.context_length, tokens=[*tokens], token_strs=texts
    )


def detokenize(request: DetokenizeRequest, card: ModelCard) -> DetokenizeBody:
    """Answer POST /detokenize with the text of token ids.

    Bytes that are not UTF-8 become U+FFFD.

    Raises:
        RequestError: the vocabulary lacks an id, or there are too many ids.
    """
    tokenizer = card.tokenizer
    num_tokens = len(request.tokens)
    max_tokens = request.max_tokens or max(card.context_length, MAX_SHORT_LENGTH)
    if num_tokens > max_tokens:
        reason = (
            f"has {counted_noun(num_tokens, 'id')}, at most {max_tokens} are read: set max_tokens "
            "for more."
        )
        raise RequestError(reason, field="tokens")
    for index, id_ in enumerate(request.tokens):
        _check_id(id_, tokenizer, f"tokens[{index}]")
    text = tokenizer.decode(request.tokens, skip_special=False)
    return DetokenizeBody(text, text)


def apply_template(request: TemplateRequest, card: ModelCard) -> TemplateBody:
    """Answer POST /apply-template with the prompt that the chat template makes of messages.

    Raises:
        RequestError: the chat template is missing, or refuses the messages.
    """
    conversation = _conversation(request, request.messages)
    continues = bool(continues_in_llama_server(request))
    return TemplateBody(replace(conversation, continues=continues).render(card).text)


def _too_many_tokens(
    request: TokenizeRequest, num_tokens: int, max_tokens: int, card: ModelCard
) -> ContextLengthError:
    """Return the error that a `/tokenize` request has more than `max_tokens` tokens.

    `num_tokens` counts the tokens found before tokenization stopped.
    """
    input_name = next(
        input_name for input_name in _FIELDS_BY_INPUT if getattr(request, input_name) is not None
    )
    whose = "the context holds" if request.max_tokens is None else "max_tokens allows"
    return ContextLengthError(
        "has at least {num_prompt} tokens, and {whose} {limit}: set max_tokens to have more.",
        field=input_name,
        least="at least ",
        num_prompt=num_tokens,
        limit=max_tokens,
        whose=whose,
        context_length=card.context_length,
    )


def _encode(request: TokenizeRequest, card: ModelCard, max_tokens: int) -> list[int]:
    """Return the token ids of a `/tokenize` request's text or messages.

    Raises:
        RequestError: the fields contradict each other, or the chat template refuses the
            messages.
        TooManyTokensError: there are more than `max_tokens` tokens, noticed early.
    """
    input_names = [
        input_name for input_name in _FIELDS_BY_INPUT if getattr(request, input_name) is not None
    ]
    if len(input_names) != 1:
        raise RequestError("Give one of prompt, messages and content.", field="prompt")
    for input_name, field_names in _FIELDS_BY_INPUT.items():
        for name in field_names:
            if input_name not in input_names and getattr(request, name):
                raise RequestError(f"may only be set with {input_name}: leave it out.", field=name)
    if request.messages is not None and request.parse_special is not None:
        reason = "may only be set with prompt or content, as messages have no special tokens."
        raise RequestError(reason, field="parse_special")
    tokenizer = card.tokenizer
    parse_special = request.parse_special
    if parse_special is None:
        parse_special = card.parses_special
    if isinstance(request.prompt, str):
        add_special = request.add_special_tokens is not False
        return tokenizer.encode(
            request.prompt,
            add_special=add_special,
            parse_special=parse_special,
            max_tokens=max_tokens,
        )
    if request.messages is not None:
        rendered = _conversation(request, request.messages).render(card)
        return tokenizer.encode_prompt(rendered, max_tokens=max_tokens)
    assert request.content is not None
    parts = [request.content] if isinstance(request.content, str) else request.content
    ids: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            _check_id(part, tokenizer, f"content[{index}]")
            ids.append(part)
            continue
        ids += tokenizer.encode(
            part,
            add_special=bool(request.add_special) and index == 0,
            parse_special=parse_special,
            max_tokens=max_tokens,
        )
        if index < len(parts) - 1 and len(ids) > max(max_tokens, MAX_SHORT_LENGTH):
            raise TooManyTokensError(len(ids))
    return ids


def _check_id(id_: int, tokenizer: Tokenizer, field_name: str) -> None:
    """Check that the vocabulary has the token `id_`.

    Raises:
        RequestError: the vocabulary lacks it; the error names the field `field_name`.
    """
    last = tokenizer.vocab_size - 1
    if not 0 <= id_ <= last or tokenizer.token_text(id_) is None:
        reason = f"is not a token of this model, whose ids go from 0 to {last}."
        raise RequestError(reason, field=field_name)


def _conversation(request: TemplateFields, messages: list[ChatMessage]) -> Conversation:
    return to_conversation(
        messages,
        to_tools([tool.function for tool in request.tools or ()], None, parallel=None),
        opens_turn=request.add_generation_prompt,
        continues=request.continue_final_message,
        thinking=to_thinking(request.chat_template_kwargs),
    )


def _piece(tokenizer: Tokenizer, id_: int) -> TokenPiece:
    data = tokenizer.token_bytes(id_)
    try:
        return TokenPiece(id_, data.decode())
    except UnicodeDecodeError:
        return TokenPiece(id_, list(data))
