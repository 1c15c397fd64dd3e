"""Text out of a stream of tokens: exact, never half a character, cut at stop strings."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

from twostroke.tokenize.preface import Part, PrefaceCutter
from twostroke.tokenize.stops import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.core.preface import Preface
    from twostroke.tokenize.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_NOTHING: Final[Mapping[int, str]] = {}


class StreamDecoder:
    """Turns the tokens of one answer into pieces of text, one call a token.

    The pieces joined are `tokenizer.decode` of all tokens, or, when a stop string was found, that
    text up to it (with it, if `include_stop`). A piece never ends inside a character, and text
    that may be the beginning of a stop string is held back until that is decided. A token costs
    time in proportion to its own text, whatever came before. `known` has the texts of
    tokens for which `feed` would only look them up.
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
        preface: Preface | None = None,
    ) -> None:
        """`min_tokens` tokens pass before their text is searched for stop strings.

        Nor is that of a `preface`. Special tokens are left out, but for `shown_ids`.
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
        self._strip_space = tokenizer.strip_space
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
        if self._strip_space and text:
            text = text.removeprefix(" ")
            self._strip_space = False
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
        """See whether tokens are just their texts, as mostly: then these can be looked up."""
        is_plain = not (self._partial or self._matcher or self._strip_space or self._finished)
        self.known = self._texts if is_plain else _NOTHING

    def _cut(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the text of the preface, which is not searched, and the text after it."""
        if self._cutter is None:
            return "", text
        found = self._cutter.feed(text) + (self._cutter.finish() if is_last else [])
        after = "".join([part for kind, part in found if kind is Part.AFTER])
        if self._cutter.place is Part.AFTER:
            self._cutter = None
        return "".join([part for kind, part in found if kind is not Part.AFTER]), after

    def _release(self, text: str) -> str:
        assert self._matcher is not None
        if not text:
            return ""
        found = self._matcher.feed(text)
        known = self._held + text
        if found is None:
            end = len(known) - self._matcher.held
            self._held = known[end:]
            return known[:end]
        end = len(self._held) + found[0]
        self.stop = found[1]
        self._finished = True
        self._held = ""
        return known[:end] if self._include_stop else known[: end - len(self.stop)]
