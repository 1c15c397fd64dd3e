"""Text out of a stream of tokens: exact, never half a character, cut at stop strings."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

from twostroke.model.tokenizer.preface import PrefaceCutter, SegmentKind, overlap

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.core.constraint import ReasoningSection
    from twostroke.model.tokenizer.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_NOTHING: Final[Mapping[int, str]] = {}


class StreamDecoder:
    """Turns the tokens of one answer into pieces of text, one call a token.

    The joined pieces are the text of all tokens. If a stop string was found, the text ends before
    the stop string, or after it if `include_stop`. A piece never ends inside a character, and text
    that may be the start of a stop string is held back. The time for a token does not grow with the
    text before it. `known` has the texts of tokens that `feed` only has to look up.
    """

    known: Mapping[int, str]

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
        """The first `min_tokens` tokens and a `preface` are not searched for stop strings.

        Special tokens are left out, except `shown_ids`. With `drops_space`, a space at the start of
        the text is left out: the tokenizer added it to the first token.
        """
        self._tokenizer = tokenizer
        specials = tokenizer.special_ids
        self._skipped = specials.difference(shown_ids) if shown_ids else specials
        self._include_stop = include_stop
        self._num_unsearched = min_tokens
        self._matcher = StopMatcher(stop_strings) if any(stop_strings) else None
        self._cutter = PrefaceCutter(preface) if preface and self._matcher else None
        self._decoder = _UTF8("replace")
        self._partial = False  # the decoder holds the first bytes of a character
        self._held = ""
        self._drops_space = drops_space
        self._finished = False
        self.stop: str | None = None
        self._texts = tokenizer.ascii_texts
        self._look()

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` makes safe to show; empty after a stop string."""
        if (known := self.known.get(token_id)) is not None:
            return known
        if self._finished or token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._partial or not data.isascii():
            text = self._decoder.decode(data)
            self._partial = bool(self._decoder.getstate()[0])
            self._look()
        else:
            text = data.decode("ascii")
            if token_id not in self._tokenizer.special_ids:
                self._texts[token_id] = text
        if self._drops_space and text:
            text = text.removeprefix(" ")
            self._drops_space = False
            self._look()
        if not self._matcher:
            return text
        before, text = self._cut(text)
        if self._num_unsearched:
            self._num_unsearched -= 1
            return before + text
        return before + self._release(text)

    def finish(self) -> str:
        """Return what was still held back: the answer is over.

        An unfinished character becomes U+FFFD. Empty after a stop string, or when called again.
        """
        if self._finished:
            return ""
        text = self._decoder.decode(b"", final=True)
        if self._matcher:
            before, text = self._cut(text, is_last=True)
            text = before + self._release(text)
            text = text if self.stop is not None else text + self._held
        self._finished = True
        self._held = ""
        self._look()
        return text

    def _look(self) -> None:
        """Set `known`: all texts while each token only adds its own text, else none."""
        is_plain = not (self._partial or self._matcher or self._drops_space or self._finished)
        self.known = self._texts if is_plain else _NOTHING

    def _cut(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the text of the preface, which is not searched, and the text after it."""
        if self._cutter is None:
            return "", text
        found = self._cutter.feed(text) + (self._cutter.finish() if is_last else [])
        after = "".join([part for kind, part in found if kind is SegmentKind.AFTER])
        if self._cutter.place is SegmentKind.AFTER:
            self._cutter = None
        return "".join([part for kind, part in found if kind is not SegmentKind.AFTER]), after

    def _release(self, text: str) -> str:
        assert self._matcher is not None
        if not text:
            return ""
        found = self._matcher.feed(text)
        known = self._held + text
        if found is None:
            end = len(known) - self._matcher.num_held
            self._held = known[end:]
            return known[:end]
        end = len(self._held) + found[0]
        self.stop = found[1]
        self._finished = True
        self._held = ""
        return known[:end] if self._include_stop else known[: end - len(self.stop)]


class StopMatcher:
    """Finds the first of several stop strings in text that arrives piece by piece.

    The first stop string to be complete wins; of several that end at the same character, the
    longest. So the answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty stop strings are ignored."""
        self._begun = {stop: "" for stop in stops if stop}  # the part of each that the text ends in
        self.num_held = 0  # how many of the last characters may begin a stop string

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read `text`; return the offset after a stop string and that string, or None.

        After a match nothing more may be fed.
        """
        found: list[tuple[int, int, str]] = []
        for stop, begun in self._begun.items():
            known = begun + text
            at = known.find(stop)
            if at >= 0:
                found.append((at + len(stop) - len(begun), -len(stop), stop))
            self._begun[stop] = known[len(known) - overlap(known, stop) :]
        self.num_held = max(map(len, self._begun.values()))
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop
