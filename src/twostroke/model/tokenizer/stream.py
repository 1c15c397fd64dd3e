"""Text from a stream of tokens: exact, without partial characters, cut at stop strings."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

from twostroke.model.tokenizer.preface import ReasoningSplitter, SegmentKind, partial_match_length

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.core.constraint import ReasoningSection
    from twostroke.model.tokenizer.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_NO_TEXTS: Final[Mapping[int, str]] = {}


class StreamDecoder:
    """Decodes the tokens of one answer to text, one token at a call.

    The joined results of all calls are the text of the answer. If a stop string was found, the text
    ends before the stop string, or after it if `include_stop`. A result never ends inside a
    character, and text that may be the start of a stop string is held back. The time for a token
    does not grow with the length of the text before it. `cached_texts` has the texts of tokens that
    `feed` would return unchanged, so that callers can skip the call.
    """

    cached_texts: Mapping[int, str]

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        shown_ids: Collection[int] = (),
        min_tokens: int = 0,
        preface: ReasoningSection | None = None,
        drops_space: bool = False,
    ) -> None:
        """Prepare to decode an answer that ends at one of `stop_strings`.

        Stop strings are not searched in the first `min_tokens` tokens, and not in the reasoning
        section that `preface` delimits. Special tokens are left out, except `shown_ids`. With
        `drops_space`, a space at the start of the text is left out: the tokenizer added it to the
        first token.
        """
        self._tokenizer = tokenizer
        specials = tokenizer.special_ids
        self._skipped = specials.difference(shown_ids) if shown_ids else specials
        self._include_stop = include_stop
        self._num_unsearched = min_tokens
        self._matcher = StopMatcher(stop_strings) if any(stop_strings) else None
        self._cutter = ReasoningSplitter(preface) if preface and self._matcher else None
        self._decoder = _UTF8("replace")
        self._partial = False  # the decoder holds the first bytes of a character
        self._held_text = ""
        self._drops_space = drops_space
        self._finished = False
        self.stop: str | None = None
        self._texts = tokenizer.ascii_texts
        self._update_cached_texts()

    def feed(self, token_id: int) -> str:
        """Add the answer's next token; return the text that can now be shown.

        The text is empty after a stop string.
        """
        if (text_of_token := self.cached_texts.get(token_id)) is not None:
            return text_of_token
        if self._finished or token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._partial or not data.isascii():
            text = self._decoder.decode(data)
            self._partial = bool(self._decoder.getstate()[0])
            self._update_cached_texts()
        else:
            text = data.decode("ascii")
            if token_id not in self._tokenizer.special_ids:
                self._texts[token_id] = text
        if self._drops_space and text:
            text = text.removeprefix(" ")
            self._drops_space = False
            self._update_cached_texts()
        if not self._matcher:
            return text
        preface_text, text = self._split_preface(text)
        if self._num_unsearched:
            self._num_unsearched -= 1
            return preface_text + text
        return preface_text + self._release(text)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer.

        An incomplete character becomes U+FFFD. The text is empty after a stop string, or at a
        second call.
        """
        if self._finished:
            return ""
        text = self._decoder.decode(b"", final=True)
        if self._matcher:
            preface_text, text = self._split_preface(text, is_last=True)
            text = preface_text + self._release(text)
            text = text if self.stop is not None else text + self._held_text
        self._finished = True
        self._held_text = ""
        self._update_cached_texts()
        return text

    def _update_cached_texts(self) -> None:
        """Update `cached_texts`, with which callers can skip calls of `feed`.

        While `feed` would return just the text of the fed token, it maps all tokens to their texts.
        Otherwise, for example while text is held back, it is empty.
        """
        is_plain = not (self._partial or self._matcher or self._drops_space or self._finished)
        self.cached_texts = self._texts if is_plain else _NO_TEXTS

    def _split_preface(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Divide new text into (reasoning, text after it).

        Stop strings are searched only in the text after the reasoning.
        """
        if self._cutter is None:
            return "", text
        segments = self._cutter.feed(text) + (self._cutter.finish() if is_last else [])
        after = "".join([part for kind, part in segments if kind is SegmentKind.AFTER])
        if self._cutter.segment is SegmentKind.AFTER:
            self._cutter = None
        return "".join([part for kind, part in segments if kind is not SegmentKind.AFTER]), after

    def _release(self, text: str) -> str:
        assert self._matcher is not None
        if not text:
            return ""
        match = self._matcher.feed(text)
        unreleased = self._held_text + text
        if match is None:
            end = len(unreleased) - self._matcher.num_held
            self._held_text = unreleased[end:]
            return unreleased[:end]
        end = len(self._held_text) + match[0]
        self.stop = match[1]
        self._finished = True
        self._held_text = ""
        return unreleased[:end] if self._include_stop else unreleased[: end - len(self.stop)]


class StopMatcher:
    """Finds the first of several stop strings in an answer's text, which arrives in pieces.

    The stop string that is complete first is found; if several end at the same character, the
    longest. The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Search for the stop strings `stops`; empty strings are ignored."""
        self._partial_by_stop = {
            stop: "" for stop in stops if stop
        }  # the beginning of each that the text ends with
        self.num_held = 0  # last characters that may begin a stop string

    def feed(self, text: str) -> tuple[int, str] | None:
        """Search the next piece of text for a stop string.

        Return (offset in `text` after the stop string, the stop string), or None while no stop
        string is complete. After a match no more text may be fed.
        """
        matches: list[tuple[int, int, str]] = []
        for stop, partial in self._partial_by_stop.items():
            searched = partial + text
            offset = searched.find(stop)
            if offset >= 0:
                matches.append((offset + len(stop) - len(partial), -len(stop), stop))
            self._partial_by_stop[stop] = searched[
                len(searched) - partial_match_length(searched, stop) :
            ]
        self.num_held = max(map(len, self._partial_by_stop.values()))
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop
