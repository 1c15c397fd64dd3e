"""Byte-pair encoding: words into tokens, by merging neighbours in the order of their rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.tokenize.alphabets import NOT_IN_UTF8, byte_level_characters, byte_level_text
from twostroke.tokenize.bound import Fewest, TooManyTokensError
from twostroke.tokenize.pairs import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.tokenize.pairs import Pairs
    from twostroke.tokenize.vocabulary import Vocabulary

_MAX_CACHED_WORDS = 20_000
_MAX_CACHED_LENGTH = 64
# Up to this many symbols it is quicker to look at all of them for each merge.
_SHORT_WORD = 128


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How a word becomes its first symbols, and what replaces characters outside the vocabulary.

    `byte_level` spells a word's bytes as characters (GPT-2); without it the symbols are the
    word's own characters. `ignore_merges` keeps a word that is a token whole. A character
    that is no token becomes its bytes (`byte_ids`, by value; None where there is no such token),
    if all of them are there, else the token `unknown` (one for a whole run with `fuse_unknown`),
    else nothing.
    """

    byte_level: bool = True
    ignore_merges: bool = False
    byte_ids: tuple[int | None, ...] = ()
    unknown: int | None = None
    fuse_unknown: bool = False


class Merges:
    """A vocabulary and its ranked merges; the ids are those of Hugging Face's `tokenizers`.

    Of all neighbours that may merge, those of the lowest rank are merged first, and the leftmost
    of equals (Sennrich et al., arXiv:1508.07909). Words met before are remembered, up to a bound.
    Safe to share between threads.
    """

    def __init__(self, vocabulary: Vocabulary, pairs: Pairs, options: MergeOptions) -> None:
        self._vocabulary = vocabulary
        self._pairs = pairs
        self._options = options
        self._chars = _Characters(vocabulary)
        self._words: dict[str, list[int]] = {}
        self._fewest = Fewest(vocabulary, byte_level=options.byte_level)

    def encode(
        self, words: Sequence[str], most: int | None = None, num_before: int = 0
    ) -> list[int]:
        """Return the ids of words, one after the other.

        It gives up once it is sure that they, with `num_before` other tokens, are more than `most`.

        Raises:
            TooManyTokensError: they are.
        """
        if most is not None and self._keeps_all(words):
            return self._encode_bounded(words, most, num_before)
        known = self._words
        ids: list[int] = []
        for word in words:
            ids += known.get(word) or self._learn(word)
        return ids

    def _encode_bounded(self, words: Sequence[str], most: int, num_before: int) -> list[int]:
        known, fewest = self._words, self._fewest.of_each(words)
        least = num_before + len(words) + sum(fewest.get(word, 1) - 1 for word in words)
        ids: list[int] = []
        for word in words:
            if least > most:
                raise TooManyTokensError(least)
            found = known.get(word) or self._learn(word)
            least += len(found) - fewest.get(word, 1)
            ids += found
        return ids

    def _keeps_all(self, words: Sequence[str]) -> bool:
        """Whether no character of words gets lost, or becomes one token with others."""
        lost = self._lost_bytes
        return not lost or not any(lost.intersection(word.encode()) for word in words)

    @cached_property
    def _lost_bytes(self) -> frozenset[int]:
        """The bytes that have no token of their own, of those that a text may have."""
        options, find = self._options, self._vocabulary.find
        if options.byte_level:
            tokens = [find(byte_level_characters([value]).encode()) for value in range(256)]
        else:
            tokens = [*(options.byte_ids or [None] * 256)]
        return frozenset(v for v in range(256) if tokens[v] is None) - NOT_IN_UTF8

    def text_of(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None for an id that it lacks."""
        return self._vocabulary.text(token_id)

    def id_of(self, token_text: str) -> int | None:
        """Return the id of the token that the vocabulary spells `token_text`, or None."""
        return self._vocabulary.find(token_text.encode("utf-8", "surrogateescape"))

    def _learn(self, word: str) -> list[int]:
        found = self._encode_word(word)
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self._words) >= _MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word] = found
        return found

    def _encode_word(self, word: str) -> list[int]:
        spelled = byte_level_text(word) if self._options.byte_level else word
        if self._options.ignore_merges:
            whole = self._vocabulary.find(spelled.encode())
            if whole is not None:
                return [whole]
        try:
            symbols = [self._chars[char] for char in spelled]
        except KeyError:
            symbols = self._symbols(spelled)
        return (
            self._merge_short(symbols) if len(symbols) <= _SHORT_WORD else self._merge_long(symbols)
        )

    def _symbols(self, spelled: str) -> list[int]:
        """Return the first symbols of a word with characters that the vocabulary lacks."""
        options = self._options
        unknown = [] if options.unknown is None else [options.unknown]
        symbols: list[int] = []
        waiting: list[int] = []  # an unknown token, which bytes pass by as in `tokenizers`
        for char in spelled:
            try:
                symbols += [*waiting, self._chars[char]]
                waiting = []
                continue
            except KeyError:
                pass
            if options.byte_ids:
                tokens = [options.byte_ids[value] for value in char.encode()]
                known = [token for token in tokens if token is not None]
                if len(known) == len(tokens):
                    symbols += known
                    continue
            if not options.fuse_unknown:
                symbols += waiting
            waiting = unknown
        return symbols + waiting

    def _merge_short(self, symbols: list[int]) -> list[int]:
        rank_of = self._pairs
        ranks = [rank_of[a << 32 | b] for a, b in pairwise(symbols)]
        while ranks and (rank := min(ranks)) != NEVER:
            at = ranks.index(rank)
            made = symbols[at] = rank_of.made(rank)
            del symbols[at + 1], ranks[at]
            if at:
                ranks[at - 1] = rank_of[symbols[at - 1] << 32 | made]
            if at < len(ranks):
                ranks[at] = rank_of[made << 32 | symbols[at + 1]]
        return symbols

    def _merge_long(self, symbols: list[int]) -> list[int]:
        """Do the same in n log n steps, rank by rank over a linked list.

        All places of one rank are merged from left to right, which walks through memory in order.
        A merge can make a pair of the same or a lower rank, which is then more urgent.
        """
        rank_of, end = self._pairs, len(symbols)
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
                    if symbols[left] < 0 or right == end:
                        continue  # it was merged with another since
                    if rank_of[symbols[left] << 32 | symbols[right]] != rank:
                        continue
                    symbols[left] = rank_of.made(rank)
                    symbols[right] = -1  # no longer there
                    beyond = after[left] = after[right]
                    if beyond < end:
                        before[beyond] = left
                    for first, second in ((before[left], left), (left, beyond)):
                        if first < 0 or second == end:
                            continue
                        new_rank = rank_of[symbols[first] << 32 | symbols[second]]
                        if new_rank == NEVER:
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
        places: dict[int, list[int]] = {}
        for left, (first, second) in enumerate(pairwise(symbols)):
            rank = self._pairs[first << 32 | second]
            if rank != NEVER:
                places.setdefault(rank, []).append(left)
        return places


class _Characters(dict[str, int]):
    """The ids of single characters, looked up when they are first met."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, char: str) -> int:
        found = self._vocabulary.find(char.encode())
        if found is None:
            raise KeyError(char)
        self[char] = found
        return found
