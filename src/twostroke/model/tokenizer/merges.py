"""Byte-pair encoding: words into tokens, by merging neighbours in the order of their rank."""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.cancellation import check_not_cancelled
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer.alphabets import byte_level_text
from twostroke.model.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Order = Callable[[bytes, bytes, int], int | None]

_MAX_CACHED_WORDS = 20_000
_MAX_CACHED_LENGTH = 64
_MAX_CACHED_CHARS = 1 << 16
# Up to this many symbols it is quicker to look at all of them for each merge.
_SHORT_WORD = 128
# From this many characters it is worth a look through the vocabulary to give up a word early.
_LONG_WORD = 1 << 14
# The rank of two neighbours that stay apart. Every other rank is lower, and its last 32 bits are
# the id of the token that the two make.
_NEVER = 1 << 80
_LAST_BITS = 0xFFFFFFFF
_MAX_CACHED_PAIRS = 50_000
_MAX_LENGTH = 0xFFFF
_CHUNK_SYMBOLS = 1 << 16  # symbols of a long word between two calls of `check_not_cancelled`
_CHECK_MASK = 0x3FFF  # words or merges between two calls of `check_not_cancelled`


class TooManyTokensError(Exception):
    """A text has more tokens than its reader wants: `num_tokens` of them, or still more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"At least {num_tokens} tokens.")
        self.num_tokens = num_tokens


class MergeOptions(Frozen):
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

    def __init__(self, vocabulary: Vocabulary, pairs: _Pairs, options: MergeOptions) -> None:
        self.vocabulary = vocabulary
        self._pairs = pairs
        self._options = options
        self._char_id = lru_cache(_MAX_CACHED_CHARS)(lambda char: vocabulary.find(char.encode()))
        self._words: dict[str, list[int]] = {}

    def encode(
        self, words: Sequence[str], most: int = sys.maxsize, num_before: int = 0
    ) -> list[int]:
        """Return the ids of words, one after the other.

        Raises:
            TooManyTokensError: they and `num_before` other tokens are more than `most`.
        """
        known = self._words
        ids: list[int] = []
        for num_done, word in enumerate(words, 1):
            if not num_done & _CHECK_MASK:
                check_not_cancelled()
            ids += known.get(word) or self._learn(word, most, num_before + len(ids))
            if num_before + len(ids) > most:
                raise TooManyTokensError(num_before + len(ids) + len(words) - num_done)
        return ids

    def _learn(self, word: str, most: int, num_before: int) -> list[int]:
        found = self._encode_word(word, most, num_before)
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self._words) >= _MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word] = found
        return found

    def _encode_word(self, word: str, most: int = sys.maxsize, num_before: int = 0) -> list[int]:
        spelled = byte_level_text(word) if self._options.byte_level else word
        if self._options.ignore_merges:
            whole = self.vocabulary.find(spelled.encode())
            if whole is not None:
                return [whole]
        if len(spelled) >= _LONG_WORD and (fewest := num_before + self._fewest(spelled)) > most:
            raise TooManyTokensError(fewest)
        symbols = self._symbols(spelled)
        merge = self._merge_short if len(symbols) <= _SHORT_WORD else self._merge_long
        return merge(symbols)

    def fewest(self, text: str, longest_added: int = 1) -> int:
        """Return a lower bound of the number of tokens in a text, however it is cut into words.

        `longest_added` is the size in bytes of the longest added token that may be in the text.
        """
        spelled = byte_level_text(text) if self._options.byte_level else text
        return self._fewest(spelled, longest_added)

    def fewest_of(self, words: Sequence[str]) -> int:
        """Return a lower bound of the number of tokens in words, from the number of words."""
        options = self._options
        is_complete = options.byte_level or options.unknown is not None
        return len(words) if is_complete else 0

    def _fewest(self, spelled: str, longest_added: int = 1) -> int:
        """Return a lower bound of the number of tokens in a word, without merging it.

        No token is longer than the longest one that has only bytes of the word's symbols.
        """
        num_symbols, used = 0, set[int]()
        for char, count in Counter(spelled).items():
            symbols = self._symbols(char)
            used.update(symbols)
            if self._options.unknown not in symbols:  # a run of those may be one token
                num_symbols += count * len(symbols)
        chars = "".join(self.vocabulary.text(symbol) or "" for symbol in used)
        return -(-num_symbols // max(self.vocabulary.max_length(chars), longest_added))

    def _symbols(self, spelled: str) -> list[int]:
        """Return the first symbols of a word: characters, and what replaces unknown ones."""
        char_id, options = self._char_id, self._options
        ids: list[int | None] = []
        for start in _wanted_starts(len(spelled)):
            ids += [char_id(char) for char in spelled[start : start + _CHUNK_SYMBOLS]]
        symbols = [id_ for id_ in ids if id_ is not None]
        if len(symbols) == len(ids):
            return symbols
        unknown = [] if options.unknown is None else [options.unknown]
        symbols = []
        waiting: list[int] = []  # an unknown token, which bytes pass by as in `tokenizers`
        for char, id_ in zip(spelled, ids, strict=True):
            if id_ is not None:
                symbols += [*waiting, id_]
                waiting = []
                continue
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
        while ranks and (rank := min(ranks)) != _NEVER:
            at = ranks.index(rank)
            made = symbols[at] = rank & _LAST_BITS
            del symbols[at + 1], ranks[at]
            if at:
                ranks[at - 1] = rank_of[symbols[at - 1] << 32 | made]
            if at < len(ranks):
                ranks[at] = rank_of[made << 32 | symbols[at + 1]]
        return symbols

    def _merge_long(self, symbols: list[int]) -> list[int]:
        """Do the same in n log n steps, with a heap of pairs over a linked list."""
        rank_of, end = self._pairs, len(symbols)
        after, before = list(range(1, end + 1)), list(range(-1, end - 1))
        waiting: list[int] = []
        for start in _wanted_starts(end):
            ranks = [
                rank_of[a << 32 | b]
                for a, b in pairwise(symbols[start : start + _CHUNK_SYMBOLS + 1])
            ]
            waiting += [rank << 32 | at for at, rank in enumerate(ranks, start) if rank != _NEVER]
        heapq.heapify(waiting)
        num_steps = 0
        while waiting:
            num_steps += 1
            if not num_steps & _CHECK_MASK:
                check_not_cancelled()
            first_pair = heapq.heappop(waiting)
            rank, left = first_pair >> 32, first_pair & _LAST_BITS
            right = after[left]
            if symbols[left] < 0 or right == end:
                continue  # it was merged with another since
            if rank_of[symbols[left] << 32 | symbols[right]] != rank:
                continue
            symbols[left] = rank & _LAST_BITS
            symbols[right] = -1  # no longer there
            beyond = after[left] = after[right]
            if beyond < end:
                before[beyond] = left
            for first, second in ((before[left], left), (left, beyond)):
                if first < 0 or second == end:
                    continue
                new_rank = rank_of[symbols[first] << 32 | symbols[second]]
                if new_rank != _NEVER:
                    heapq.heappush(waiting, new_rank << 32 | first)
        return [symbol for symbol in symbols if symbol >= 0]


def _wanted_starts(length: int) -> Iterator[int]:
    """Yield the start of each chunk of a long list; call `check_not_cancelled` between chunks."""
    for start in range(0, length, _CHUNK_SYMBOLS):
        if start:
            check_not_cancelled()
        yield start


class _Pairs(dict[int, int]):
    """The rank of a pair of token ids by `pairs[left << 32 | right]`: lower is sooner.

    A pair whose texts joined are not a token has the rank `_NEVER`. Ranks that were asked for are
    kept, up to a bound.
    """

    def __init__(self, vocabulary: Vocabulary, order: Order) -> None:
        """`order(left, right, made)` says how late two texts become the token `made`, or None."""
        super().__init__()
        self._vocabulary, self._order = vocabulary, order

    def __missing__(self, pair: int) -> int:
        vocabulary = self._vocabulary
        left, right = vocabulary.spelling(pair >> 32), vocabulary.spelling(pair & _LAST_BITS)
        made = vocabulary.find(left + right)
        order = None if made is None else self._order(left, right, made)
        rank = _NEVER if made is None or order is None else order << 32 | made
        if len(self) >= _MAX_CACHED_PAIRS:
            self.clear()
        self[pair] = rank
        return rank


class ListedPairs(_Pairs):
    """The merges of a file, in its order."""

    def __init__(self, merges: Iterable[str], vocabulary: Vocabulary) -> None:
        """`merges` are lines of two texts and a space between; of equal ones the last counts."""
        lines = Vocabulary(merges)
        super().__init__(vocabulary, lambda left, right, _: lines.find(left + b" " + right))


class ScoredPairs(_Pairs):
    """SentencePiece's rule: neighbours may merge when their text joined is a token.

    The token of the best score comes first; of several ways to make one token, that with the
    longest left part, as where the pairs of a vocabulary are listed by Hugging Face's converters
    (`generate_merges` of transformers' tokenization_utils_base.py).
    """

    def __init__(self, scores: Sequence[float], vocabulary: Vocabulary) -> None:
        """`scores` are by id, one for each token."""
        by_score = np.argsort(-np.asarray(scores, np.float64), kind="stable")
        places = np.empty(len(by_score), np.uint32)
        places[by_score] = np.arange(len(by_score), dtype=np.uint32)
        order = array("I", places.tobytes())
        super().__init__(
            vocabulary,
            lambda left, _, made: order[made] << 16 | (_MAX_LENGTH - min(len(left), _MAX_LENGTH)),
        )
