"""A text in the tokens of one vocabulary, said in those of another one."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.tokenize.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_CONTINUES, _BEGINS = 0x80, 0xC0  # first bytes of the rest of a character, and of others
_EVERY = 16  # how many tokens of a vocabulary there are to each that is looked at


@dataclass(slots=True)
class Said:
    """Tokens, and how far each gets: `ends[i]` bytes of the text, `tokens[i]` included."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Translation:
    """Says in tokens of `target` what tokens of `source` say.

    Text is tokenized as the target's own tokenizer does it. Control tokens become those with the
    same text; any end of a text that has no namesake is the target's first. A control token that
    the target does not have is left out.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        """Look at the control tokens."""
        self.source = source
        self.target = target
        names = {target.token_text(token): token for token in target.special_ids}
        end = min(target.eos_ids, default=None)
        self._special = {
            token: names.get(source.token_text(token), end if token in source.eos_ids else None)
            for token in source.special_ids
        }

    def say(self, ids: Iterable[int]) -> Said:
        """Return the same text in the target's tokens; half a character at its end waits."""
        said, text, at = Said(), bytearray(), 0
        for token in ids:
            data = self.source.token_bytes(token)
            if token not in self._special:
                text += data
                continue
            at = self._add_text(said, text, at) + len(data)
            text.clear()
            if (namesake := self._special[token]) is not None:
                said.tokens.append(namesake)
                said.ends.append(at)
        self._add_text(said, text, at)
        return said

    def ends(self, ids: Iterable[int]) -> list[int]:
        """Return how many bytes of the text the source's tokens make, each with those before."""
        return list(accumulate(len(self.source.token_bytes(token)) for token in ids))

    def breaks(self, ids: Sequence[int]) -> dict[int, int]:
        """Return how many of the source's tokens make how many bytes of whole characters."""
        found, end = {}, 0
        for count, token in enumerate(ids):
            data = self.source.token_bytes(token)
            if data and not _CONTINUES <= data[0] < _BEGINS:
                found[end] = count
            end += len(data)
        found[end] = len(ids)
        return found

    def share_known(self) -> float:
        """Return about which share of the source's tokens of whole text are one here, too."""
        source = self.source
        some = (i for i in range(0, source.vocab_size, _EVERY) if i not in self._special)
        texts = [source.token_bytes(token).decode("utf-8", "replace") for token in some]
        known = [len(self._encode(text)) == 1 for text in texts if "\ufffd" not in text]
        return sum(known) / max(1, len(known))

    def _add_text(self, said: Said, text: bytearray, start: int) -> int:
        """Add the tokens of a text that begins at byte `start`; return where it ends."""
        decoder = _UTF8("replace")
        tokens = self._encode(decoder.decode(bytes(text)))
        num_waiting = len(decoder.getstate()[0])
        ends = [start + end for end in accumulate(map(self._num_bytes, tokens))]
        end = start + len(text) - num_waiting
        if ends and ends[-1] != end:  # some of it is spelled otherwise: only the whole is the same
            ends = [end] * len(ends)
        said.tokens += tokens
        said.ends += ends
        return start + len(text)

    def _num_bytes(self, token: int) -> int:
        return len(self.target.token_bytes(token))

    def _encode(self, text: str) -> Sequence[int]:
        return self.target.encode(text) if text else ()
