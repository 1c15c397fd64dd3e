"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import msgspec

from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    """Log-probabilities of a completion; `text_offset` counts characters from the text's start.

    The first token of a prompt that is repeated follows nothing and has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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
    """Counts characters of an answer or a prompt, so that each token knows where it begins.

    A token inside a character begins where that character does.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, prompt: str = "") -> None:
        """Begin at `start`, or in the text of a `prompt`, which may show special tokens, too."""
        self._prompt = prompt
        self._decoder = _UTF8("replace")
        self._untold = tokenizer.special_ids  # which the text leaves out
        self._strip_space = tokenizer.strip_space
        self._offset = start

    def place(self, token: int, data: bytes) -> int:
        """Return the offset of the next token, whose bytes are `data`."""
        offset = self._offset
        if token in self._untold:
            shown = data.decode(errors="replace")
            if self._prompt.startswith(shown, offset):
                self._offset += len(shown)
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
    _write(body, tokenizer, _told(answer), offsets)
    return body


class Echo:
    """Writes one answer's log-probabilities behind those of its prompt, which may come in parts."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> None:
        """Repeat a prompt of `tokens`, which stands before the answer as `text`."""
        self._tokenizer = tokenizer
        self._tokens = iter(tokens)
        self._is_first = True
        self._prompt = Offsets(tokenizer, prompt=text)
        self._answer = Offsets(tokenizer, len(text))

    def write(self, answer: Output | Completion) -> CompletionLogprobs:
        """Return completions' form of an answer or of a piece of one."""
        body, tokenizer = CompletionLogprobs([], [], [], []), self._tokenizer
        if self._is_first:
            self._is_first = False
            _write(body, tokenizer, [(next(self._tokens), None)], self._prompt)
        told = [(next(self._tokens), found) for found in answer.prompt_logprobs]
        _write(body, tokenizer, told, self._prompt)
        _write(body, tokenizer, _told(answer), self._answer)
        return body


def _write(
    body: CompletionLogprobs,
    tokenizer: Tokenizer,
    told: Iterable[tuple[int, TokenLogprobs | None]],
    offsets: Offsets,
) -> None:
    for token, found in told:
        data = tokenizer.token_bytes(token)
        name = _completion_name(data)
        body.tokens.append(name)
        body.text_offset.append(offsets.place(token, data))
        if found is None:
            body.token_logprobs.append(None)
            body.top_logprobs.append(None)
            continue
        top = {_completion_name(spelled): logprob for spelled, logprob in _top(tokenizer, found)}
        body.token_logprobs.append(found.logprob)
        body.top_logprobs.append(top | {name: found.logprob})


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
