"""Byte-pair encoding: words into tokens, by merging neighbours in the order of their rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError
from twostroke.tokenize.alphabets import byte_level_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_IDS = 1 << 24  # far above any vocabulary: a table of texts has one place for each id
_MAX_CACHED_WORDS = 20_000
_MAX_CACHED_LENGTH = 64
# Up to this many symbols it is quicker to look at all of them for each merge.
_SHORT_WORD = 128


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How a word becomes its first symbols, and what stands for what the vocabulary lacks.

    `byte_level` spells a word's bytes as characters (GPT-2); without it the symbols are the
    word's own characters. `ignore_merges` takes a word that is a token as it stands. A character
    that is no token becomes its bytes (`byte_fallback`, as tokens `<0xAB>`), else the token
    `unknown` (one for a whole run with `fuse_unknown`), else nothing.
    """

    byte_level: bool = True
    ignore_merges: bool = False
    byte_fallback: bool = False
    unknown: str | None = None
    fuse_unknown: bool = False


class Merges:
    """A vocabulary and its ranked merges; the ids are those of Hugging Face's `tokenizers`.

    Of all neighbours that some merge names, those of the lowest rank are merged first, and the
    leftmost of equals (Sennrich et al., arXiv:1508.07909). Words met before are remembered, up to
    a bound. Safe to share between threads.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        merges: Iterable[tuple[str, str]],
        options: MergeOptions,
    ) -> None:
        """`merges` in order of rank. Raises ModelFormatError for one that names no tokens."""
        ids = vocabulary
        self._ids = ids
        self._options = options
        if any(type(id_) is not int or not 0 <= id_ < _MAX_IDS for id_ in ids.values()):
            raise ModelFormatError(
                f"The tokenizer's token ids are not whole numbers below {_MAX_IDS}."
            )
        if options.unknown is not None and options.unknown not in ids:
            raise ModelFormatError(
                f"The tokenizer's unknown token '{options.unknown}' is no token."
            )
        self._texts: list[str | None] = [None] * (max(ids.values(), default=-1) + 1)
        for text, id_ in ids.items():
            self._texts[id_] = text
        self._ranks: dict[int, int] = {}  # of the two ids, the first 32 bits further left
        self._made: list[int] = []  # the token that the merge of each rank makes
        try:
            for rank, (left, right) in enumerate(merges):
                self._made.append(ids[left + right])
                self._ranks[ids[left] << 32 | ids[right]] = rank
        except KeyError as error:
            raise ModelFormatError(
                f"The tokenizer's merges do not fit its tokens: '{left} {right}' needs {error}."
            ) from error
        self._words: dict[str, list[int]] = {}

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words, one after the other."""
        known = self._words
        ids: list[int] = []
        for word in words:
            ids += known.get(word) or self._learn(word)
        return ids

    def text_of(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None for an id that it lacks."""
        return self._texts[token_id] if 0 <= token_id < len(self._texts) else None

    def id_of(self, token_text: str) -> int | None:
        """Return the id of the token that the vocabulary spells `token_text`, or None."""
        return self._ids.get(token_text)

    def _learn(self, word: str) -> list[int]:
        found = self._encode_word(word)
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self._words) >= _MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word] = found
        return found

    def _encode_word(self, word: str) -> list[int]:
        spelled = byte_level_text(word) if self._options.byte_level else word
        if self._options.ignore_merges and (whole := self._ids.get(spelled)) is not None:
            return [whole]
        try:
            symbols = [self._ids[char] for char in spelled]
        except KeyError:
            symbols = self._symbols(spelled)
        return (
            self._merge_short(symbols) if len(symbols) <= _SHORT_WORD else self._merge_long(symbols)
        )

    def _symbols(self, spelled: str) -> list[int]:
        """Return the first symbols of a word with characters that the vocabulary lacks."""
        ids, options = self._ids, self._options
        unknown = [] if options.unknown is None else [ids[options.unknown]]
        symbols: list[int] = []
        waiting: list[int] = []  # an unknown token, which bytes pass by as in `tokenizers`
        for char in spelled:
            id_ = ids.get(char)
            if id_ is not None:
                symbols += [*waiting, id_]
                waiting = []
                continue
            if options.byte_fallback:
                tokens = [ids.get(f"<0x{value:02X}>") for value in char.encode()]
                known = [token for token in tokens if token is not None]
                if len(known) == len(tokens):
                    symbols += known
                    continue
            if not options.fuse_unknown:
                symbols += waiting
            waiting = unknown
        return symbols + waiting

    def _merge_short(self, symbols: list[int]) -> list[int]:
        get, none = self._ranks.get, len(self._made)
        ranks = [get(a << 32 | b, none) for a, b in pairwise(symbols)]
        while ranks and (rank := min(ranks)) < none:
            at = ranks.index(rank)
            made = symbols[at] = self._made[rank]
            del symbols[at + 1], ranks[at]
            if at:
                ranks[at - 1] = get(symbols[at - 1] << 32 | made, none)
            if at < len(ranks):
                ranks[at] = get(made << 32 | symbols[at + 1], none)
        return symbols

    def _merge_long(self, symbols: list[int]) -> list[int]:
        """Do the same in n log n steps, rank by rank over a linked list.

        All places of one rank are merged from left to right, which walks through memory in order.
        A merge can make a pair of the same or a lower rank, which is then more urgent.
        """
        get, end = self._ranks.get, len(symbols)
        after, before = list(range(1, end + 1)), list(range(-1, end - 1))
        places = self._places(symbols)  # by rank, the places of pairs, some of them outdated
        waiting = list(places)
        heapq.heapify(waiting)
        while waiting:
            now = heapq.heappop(waiting)
            for place in sorted(places.pop(now)):
                urgent = [(now, place)]
                while urgent:
                    rank, left = heapq.heappop(urgent)
                    right = after[left]
                    if right == end or get(symbols[left] << 32 | symbols[right]) != rank:
                        continue  # one of the two was merged with another since
                    symbols[left] = self._made[rank]
                    symbols[right] = -1  # no longer there; a pair with it has no rank
                    beyond = after[left] = after[right]
                    if beyond < end:
                        before[beyond] = left
                    for first, second in ((before[left], left), (left, beyond)):
                        if first < 0 or second == end:
                            continue
                        new_rank = get(symbols[first] << 32 | symbols[second])
                        if new_rank is None:
                            continue
                        if new_rank <= now:
                            heapq.heappush(urgent, (new_rank, first))
                        elif new_rank in places:
                            places[new_rank].append(first)
                        else:
                            places[new_rank] = [first]
                            heapq.heappush(waiting, new_rank)
        return [symbol for symbol in symbols if symbol >= 0]

    def _places(self, symbols: list[int]) -> dict[int, list[int]]:
        get = self._ranks.get
        places: dict[int, list[int]] = {}
        for left, (first, second) in enumerate(pairwise(symbols)):
            rank = get(first << 32 | second)
            if rank is not None:
                places.setdefault(rank, []).append(left)
        return places
