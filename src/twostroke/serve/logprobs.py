"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import msgspec

from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.engine.output import Completion, Output
    from twostroke.tokenize import Tokenizer


_UTF8 = codecs.getincrementaldecoder("utf-8")


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens; `bytes` is the truth where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat answer, or of one piece of it."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion; `text_offset` counts characters from the text's start."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(tokenizer: Tokenizer, answer: Output | Completion) -> ChatLogprobs:
    """Return chat's form of an answer or of a piece of one."""
    content = []
    for token, found in _told(answer):
        data = tokenizer.token_bytes(token)
        top = [
            TopLogprob(_chat_name(spelled), logprob, list(spelled))
            for spelled, logprob in _top(tokenizer, found)
        ]
        content.append(TokenLogprob(_chat_name(data), found.logprob, list(data), top))
    return ChatLogprobs(content)


class Offsets:
    """Counts characters of one answer's text, so that each token knows where it begins.

    A token inside a character begins where that character does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin at the beginning."""
        self._decoder = _UTF8("replace")
        self._untold = tokenizer.special_ids  # which the text leaves out
        self._strip_space = tokenizer.strip_space
        self._offset = 0

    def place(self, token: int, data: bytes) -> int:
        """Return the offset of the next token, whose bytes are `data`."""
        offset = self._offset
        if token in self._untold:
            return offset
        text = self._decoder.decode(data)
        if self._strip_space and text:
            text = text.removeprefix(" ")
            self._strip_space = False
        self._offset += len(text)
        return offset


def completion_logprobs(
    tokenizer: Tokenizer, answer: Output | Completion, offsets: Offsets
) -> CompletionLogprobs:
    """Return completions' form of an answer or of a piece of one; `offsets` is the answer's."""
    body = CompletionLogprobs([], [], [], [])
    for token, found in _told(answer):
        data = tokenizer.token_bytes(token)
        name = _completion_name(data)
        top = {_completion_name(spelled): logprob for spelled, logprob in _top(tokenizer, found)}
        body.tokens.append(name)
        body.token_logprobs.append(found.logprob)
        body.top_logprobs.append(top | {name: found.logprob})
        body.text_offset.append(offsets.place(token, data))
    return body


def _told(answer: Output | Completion) -> Iterator[tuple[int, TokenLogprobs]]:
    """Yield the tokens that stand for text: all but the one that ended the answer."""
    tokens: Sequence[int] = answer.token_ids
    if answer.finish_reason is FinishReason.STOP and isinstance(answer.stop, int):
        tokens = tokens[:-1]
    for token, found in zip(tokens, answer.logprobs, strict=False):
        if found is not None:
            yield token, found


def _top(tokenizer: Tokenizer, found: TokenLogprobs) -> Iterator[tuple[bytes, float]]:
    for token, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        yield tokenizer.token_bytes(token), logprob


def _chat_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _escaped(data)


def _completion_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{_escaped(data)}"


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
