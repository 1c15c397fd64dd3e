"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
from functools import partial
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.model.tokenizer import Tokenizer

    Scores = Iterable[tuple[int, TokenLogprobs]]

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens; `bytes` is exact even for a part of a character."""

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

    The first token of an echoed prompt has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(
    tokenizer: Tokenizer, scored: Scores, *, as_ids: bool = False
) -> list[TokenLogprob]:
    """Return chat's form of the log-probabilities of some tokens; `as_ids` names these by ids."""
    name_of = partial(_named, tokenizer, as_ids=as_ids)
    content = []
    for token, scores in scored:
        likely = [
            TopLogprob(name_of(id_), logprob, list(tokenizer.token_bytes(id_)))
            for id_, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
        ]
        data = list(tokenizer.token_bytes(token))
        content.append(TokenLogprob(name_of(token), scores.logprob, data, likely))
    return content


class CompletionScorer:
    """Collects the log-probabilities of one completion, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, echoed: Sequence[int], text: str, *, as_ids: bool = False
    ) -> None:
        """Begin with the `echoed` tokens of the prompt, if any, whose text is `text`.

        `as_ids` names tokens by their ids.
        """
        self._name_of = partial(_named, tokenizer, as_ids=as_ids, prefix="bytes:")
        self._tokenizer = tokenizer
        self._echoed = iter(echoed)
        self._prompt = TextOffsets(tokenizer, prompt=text)
        self._answer = TextOffsets(tokenizer, len(text), begins=False)
        self._body = CompletionLogprobs([], [], [], [])
        for token in echoed[:1]:
            next(self._echoed)
            self._add(token, None, self._prompt)

    def add_prompt(self, logprobs: Iterable[TokenLogprobs | None]) -> None:
        """Add the next tokens of the prompt."""
        for found in logprobs:
            self._add(next(self._echoed), found, self._prompt)

    def add(self, scored: Scores) -> None:
        """Add tokens of the answer."""
        for token, found in scored:
            self._add(token, found, self._answer)

    def take(self) -> CompletionLogprobs:
        """Return what was added since the last call."""
        body, self._body = self._body, CompletionLogprobs([], [], [], [])
        return body

    @property
    def has_news(self) -> bool:
        """Whether anything was added since the last `take`."""
        return bool(self._body.tokens)

    def _add(self, token: int, found: TokenLogprobs | None, offsets: TextOffsets) -> None:
        body, tokenizer = self._body, self._tokenizer
        data = tokenizer.token_bytes(token)
        name = self._name_of(token)
        body.tokens.append(name)
        body.text_offset.append(offsets.place(token, data))
        if found is None:
            body.token_logprobs.append(None)
            body.top_logprobs.append(None)
            return
        top = {
            self._name_of(id_): logprob
            for id_, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        }
        body.token_logprobs.append(found.logprob)
        body.top_logprobs.append(top | {name: found.logprob})


class TextOffsets:
    """Counts characters, to find where each token of an answer or a prompt begins.

    A token inside a character begins where that character does.
    """

    def __init__(
        self, tokenizer: Tokenizer, start: int = 0, prompt: str = "", *, begins: bool = True
    ) -> None:
        """Begin at `start`, or in the text of a `prompt`, which may contain special tokens.

        Tokens that `begins` a text may have a space that the text has not.
        """
        self._prompt = prompt
        self._decoder = _UTF8("replace")
        self._untold = tokenizer.special_ids  # absent from the text
        self._strip_space = begins and tokenizer.strip_space
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


def _named(tokenizer: Tokenizer, token: int, *, as_ids: bool, prefix: str = "") -> str:
    return f"token_id:{token}" if as_ids else _name(tokenizer.token_bytes(token), prefix)


def _name(data: bytes, prefix: str = "") -> str:
    """Return a token's text; the bytes of a part of a character are escaped after `prefix`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
