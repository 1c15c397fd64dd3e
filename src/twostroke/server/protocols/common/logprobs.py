"""Log-probabilities of tokens in the two forms of OpenAI's API: of chat and of completions."""

from __future__ import annotations

import codecs
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.model.tokenizer import Tokenizer

    Scores = Iterable[tuple[int, TokenLogprobs]]

_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_SHIFT: Final = 4  # characters by which normalization moves a token in the prompt


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position of a chat answer.

    `bytes` is exact even if the token ends inside a character.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of a chat answer, with its log-probability and the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a chat answer, or of one chunk of its stream."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The field `logprobs` of a text completion: parallel lists with an entry for each token.

    `text_offset` has the offset of each token in the completion's text, in characters. The first
    token of an echoed prompt has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(
    tokenizer: Tokenizer, scored: Scores, *, as_ids: bool = False
) -> list[TokenLogprob]:
    """Return scored tokens as the entries of `logprobs.content` in OpenAI's chat responses.

    With `as_ids`, tokens are written as `token_id:ID` instead of their text.
    """
    name_of = partial(_token_name, tokenizer, as_ids=as_ids)
    content = []
    for token, scores in scored:
        likely = [
            TopLogprob(token=name_of(id_), logprob=logprob, bytes=list(tokenizer.token_bytes(id_)))
            for id_, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
        ]
        data = list(tokenizer.token_bytes(token))
        content.append(
            TokenLogprob(
                token=name_of(token), logprob=scores.logprob, bytes=data, top_logprobs=likely
            )
        )
    return content


class CompletionScorer:
    """Collects the log-probabilities of a text completion, and returns them chunk by chunk."""

    def __init__(
        self, tokenizer: Tokenizer, echoed: Sequence[int], text: str, *, as_ids: bool = False
    ) -> None:
        """Begin a completion whose tokens are added later.

        Args:
            tokenizer: the model's tokenizer.
            echoed: the prompt's token ids if the answer repeats the prompt, else empty.
            text: the text of the echoed tokens.
            as_ids: whether to write tokens as `token_id:ID` instead of their text.
        """
        self._name_of = partial(_token_name, tokenizer, as_ids=as_ids, prefix="bytes:")
        self._tokenizer = tokenizer
        self._echoed = iter(echoed)
        self._prompt = TextOffsets(tokenizer, prompt=text)
        self._answer = TextOffsets(tokenizer, len(text))
        self._body = _no_logprobs()
        for token in echoed[:1]:
            next(self._echoed)
            self._add(token, None, self._prompt)

    def add_prompt(self, logprobs: Iterable[TokenLogprobs | None]) -> None:
        """Add log-probabilities of the next tokens of the echoed prompt.

        None stands for a token whose log-probability is unknown.
        """
        for scores in logprobs:
            self._add(next(self._echoed), scores, self._prompt)

    def add(self, scored: Scores) -> None:
        """Add tokens of the answer, with their log-probabilities."""
        for token, scores in scored:
            self._add(token, scores, self._answer)

    def take(self) -> CompletionLogprobs:
        """Return the log-probabilities of the tokens added since the last call, for one chunk."""
        body = self._body
        self._body = _no_logprobs()
        return body

    @property
    def has_news(self) -> bool:
        """Whether tokens were added since the last call of `take`."""
        return bool(self._body.tokens)

    def _add(self, token: int, scores: TokenLogprobs | None, offsets: TextOffsets) -> None:
        """Add one token of the echoed prompt or of the answer.

        `scores` has the token's log-probabilities; None if they are unknown. `offsets` computes the
        offsets of the text to which the token belongs: the prompt or the answer.
        """
        body = self._body
        data = self._tokenizer.token_bytes(token)
        name = self._name_of(token)
        body.tokens.append(name)
        body.text_offset.append(offsets.advance(token, data))
        if scores is None:
            body.token_logprobs.append(None)
            body.top_logprobs.append(None)
            return
        top = {
            self._name_of(id_): logprob
            for id_, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
        }
        body.token_logprobs.append(scores.logprob)
        body.top_logprobs.append(top | {name: scores.logprob})


def _no_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


class TextOffsets:
    """Computes where each token of a text begins, as an offset in characters.

    A token that begins inside a character has the offset of that character. The tokens of a prompt
    are found in its text, since a tokenizer may add spaces to the text or normalize it.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, prompt: str = "") -> None:
        """Prepare to compute offsets, starting with the first token of a text.

        Args:
            tokenizer: the model's tokenizer.
            start: the offset of the first token.
            prompt: the text of the tokens; empty for an answer, whose tokens spell it exactly.
        """
        self._prompt = prompt
        self._decoder = _UTF8("replace")
        self._special_ids = tokenizer.special_ids  # answers leave their text out
        self._adds_space = bool(prompt) and tokenizer.adds_space
        self._offset = start
        self._last_offset = start

    def advance(self, token: int, data: bytes) -> int:
        """Return the offset at which `token` begins, and move past the token.

        `data` has the token's bytes.
        """
        offset = self._offset
        if token in self._special_ids:
            special_text = data.decode(errors="replace")
            if self._prompt.startswith(special_text, offset):
                self._offset += len(special_text)
            self._last_offset = self._offset
            return offset
        text = self._decoder.decode(data)
        if not self._prompt:
            self._offset += len(text)
        elif text:
            offset = self._find(text)
        self._last_offset = offset
        return offset

    def _find(self, text: str) -> int:
        """Return where a token's text begins in the prompt, and move past it.

        That is where the previous token ends, or near it in a text that the tokenizer normalizes.
        Of two equally near places the later one counts, since most normalizers shorten texts.
        """
        prompt, offset = self._prompt, self._offset
        if self._adds_space and text[0] == " " != prompt[offset : offset + 1]:
            text = text[1:]  # without the space that the tokenizer has added
        first_offset = max(self._last_offset, offset - _MAX_SHIFT)
        shifted_offsets = range(first_offset, offset + _MAX_SHIFT + 1)
        for start in sorted(shifted_offsets, key=lambda start: (abs(start - offset), -start)):
            if prompt.startswith(text, start):
                self._offset = start + len(text)
                return start
        self._offset = min(offset + len(text), len(prompt))
        return offset


def _token_name(tokenizer: Tokenizer, token: int, *, as_ids: bool, prefix: str = "") -> str:
    return f"token_id:{token}" if as_ids else _printable(tokenizer.token_bytes(token), prefix)


def _printable(data: bytes, prefix: str = "") -> str:
    """Return a token's bytes as text.

    Bytes that are not UTF-8 are written in hexadecimal, after `prefix`.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
