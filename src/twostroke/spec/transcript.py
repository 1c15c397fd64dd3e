"""A request's text in the tokens of a draft model with another vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.tokenize import Translation

_UNSETTLED = 2  # tokens at the end of a text that more of it may change
_STRIDE = 2048  # tokens of a prompt that are translated at once, so that no step waits for long


@dataclass(frozen=True, slots=True)
class Words:
    """Translates the target's tokens into the draft's, and back."""

    to_draft: Translation
    to_target: Translation

    def before(self, request: Request) -> list[int]:
        """Return the tokens that the draft wants before a text that does not begin with them."""
        prefix = self.to_draft.target.prefix_ids
        said = self.to_draft.say(request.tokens[: len(prefix)]).tokens
        return [] if said == prefix else prefix


@dataclass(slots=True, eq=False)
class Transcript:
    """What a request says, in the draft's tokens.

    The first `num_settled` of `tokens` say what the first `num_read` of the request's do, and will
    stay; the others say the rest as well as can be known by now.
    """

    words: Words
    stride: int = _STRIDE
    tokens: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_prompt: int = 0  # settled tokens of the request's prompt
    num_read: int = 0
    is_behind: bool = True  # there is more of the request to translate
    is_ready: bool = False  # a guess may follow `tokens`
    _is_new: bool = True  # the prompt was not translated to its end yet
    _span: int = 0  # tokens beyond `stride` that must be translated at once

    def follow(self, request: Request) -> None:
        """Translate some more of what the request has become."""
        if not self.tokens:
            self.tokens += self.words.before(request)
            self.num_settled = len(self.tokens)
        first = self.num_settled
        end = self.num_read + self.stride + self._span
        said, is_whole = self._translate(request.tokens[self.num_read : end])
        self.is_behind = end < len(request.tokens)
        if self._is_new:
            self.num_prompt = self.num_settled
        if self.is_behind:
            # What follows a cut may change what is before it; where that is all, take a longer one.
            self._span = self.stride + 2 * self._span if self.num_settled == first else 0
            said = said[: self.num_settled - first]
        self.tokens[first:] = said
        self._is_new &= self.is_behind
        self.is_ready = is_whole and not self.is_behind and bool(self.tokens)

    def _translate(self, new: list[int]) -> tuple[list[int], bool]:
        """Return the draft's tokens, and whether they are whole; settle all but the last ones."""
        translation = self.words.to_draft
        said = translation.say(new)
        breaks, ends = translation.breaks(new), said.ends
        for count in range(len(said.tokens) - _UNSETTLED, 0, -1):
            if ends[count - 1] in breaks and ends[count - 1] < ends[count]:
                self.num_read += breaks[ends[count - 1]]
                self.num_settled += count
                break
        return said.tokens, said.is_whole
