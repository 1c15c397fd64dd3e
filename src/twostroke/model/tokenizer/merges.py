"""Byte-pair encoding: turns words into tokens by merging neighbours in the order of their rank."""

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
from twostroke.core.message_text import counted_noun
from twostroke.model.tokenizer.alphabets import byte_level_text
from twostroke.model.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Order = Callable[[bytes, bytes, int], int | None]

_MAX_CACHED_WORDS = 20_000
_MAX_CACHED_LENGTH = 64
_MAX_CACHED_CHARS = 1 << 16
_SHORT_WORD = 128  # symbols; in shorter words, searching all pairs for each merge is faster
_LONG_WORD = 1 << 14  # characters; from this length a lower bound of the tokens is checked first
# The rank of a pair that is not merged. Every other rank is lower, and its last 32 bits are the
# id of the merged token.
_NO_MERGE = 1 << 80
_LAST_BITS = 0xFFFFFFFF
_MAX_CACHED_PAIRS = 50_000
_MAX_LENGTH = 0xFFFF
_CHUNK_SYMBOLS = 1 << 16  # symbols of a long word between two calls of `check_not_cancelled`
_CHECK_MASK = 0x3FFF  # words or merges between two calls of `check_not_cancelled`


class TooManyTokensError(Exception):
    """A text has more tokens than are allowed; it has at least `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"At least {counted_noun(num_tokens, 'token')}.")
        self.num_tokens = num_tokens


class MergeOptions(Frozen):
    """How byte-pair encoding divides a word into its first symbols, before merging.

    With `byte_level` the symbols are the word's bytes, spelled as characters (GPT-2), else the
    word's characters. With `ignore_merges`, a word that is a token becomes this token without
    merging. A character that is not a token becomes the tokens of its bytes (`byte_ids`, by value;
    None for a byte without a token). If a byte has no token, the character becomes the token
    `unknown` (one token for a whole run of such characters with `fuse_unknown`); without an
    `unknown` it is left out.
    """

    byte_level: bool = True
    ignore_merges: bool = False
    byte_ids: tuple[int | None, ...] = ()
    unknown: int | None = None
    fuse_unknown: bool = False


class Merges:
    """Encodes words by byte-pair encoding, with a vocabulary and its ranked merges.

    The ids are the same as in Hugging Face's `tokenizers`. The pair of neighbours with the lowest
    rank is merged first, and among pairs of equal rank the leftmost (Sennrich et al.,
    arXiv:1508.07909). Words are cached, up to a limit. The object can be shared between threads.
    """

    def __init__(self, vocabulary: Vocabulary, pairs: _Pairs, options: MergeOptions) -> None:
        self.vocabulary = vocabulary
        self._pairs = pairs
        self._options = options
        self._char_id = lru_cache(_MAX_CACHED_CHARS)(lambda char: vocabulary.find(char.encode()))
        self._words: dict[str, list[int]] = {}

    def encode(
        self, words: Sequence[str], max_tokens: int = sys.maxsize, num_before: int = 0
    ) -> list[int]:
        """Return the token ids of words, concatenated.

        Raises:
            TooManyTokensError: the words and `num_before` other tokens exceed `max_tokens`.
        """
        cached_words = self._words
        ids: list[int] = []
        for num_done, word in enumerate(words, 1):
            if not num_done & _CHECK_MASK:
                check_not_cancelled()
            ids += cached_words.get(word) or self._encode_and_cache(
                word, max_tokens, num_before + len(ids)
            )
            if num_before + len(ids) > max_tokens:
                raise TooManyTokensError(num_before + len(ids) + len(words) - num_done)
        return ids

    def _encode_and_cache(self, word: str, max_tokens: int, num_before: int) -> list[int]:
        ids = self._encode_word(word, max_tokens, num_before)
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self._words) >= _MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def _encode_word(
        self, word: str, max_tokens: int = sys.maxsize, num_before: int = 0
    ) -> list[int]:
        spelled = byte_level_text(word) if self._options.byte_level else word
        if self._options.ignore_merges:
            token_id = self.vocabulary.find(spelled.encode())
            if token_id is not None:
                return [token_id]
        if (
            len(spelled) >= _LONG_WORD
            and (min_tokens := num_before + self._min_tokens(spelled)) > max_tokens
        ):
            raise TooManyTokensError(min_tokens)
        symbols = self._symbols(spelled)
        merge = self._merge_short if len(symbols) <= _SHORT_WORD else self._merge_long
        return merge(symbols)

    def min_tokens(self, text: str, longest_added: int = 1) -> int:
        """Return a lower bound of the number of tokens in a text, however it is cut into words.

        With it, a text that is too long is refused quickly, without encoding it. `longest_added` is
        the size in bytes of the longest added token that may be in the text.
        """
        spelled = byte_level_text(text) if self._options.byte_level else text
        return self._min_tokens(spelled, longest_added)

    def min_tokens_of_words(self, words: Sequence[str]) -> int:
        """Return a lower bound of the number of tokens, from the number of words alone.

        It is 0 if the vocabulary may spell a word with no token at all.
        """
        options = self._options
        is_complete = options.byte_level or options.unknown is not None
        return len(words) if is_complete else 0

    def _min_tokens(self, spelled: str, longest_added: int = 1) -> int:
        """Return a lower bound of the number of tokens in a word, without merging it.

        A token has at most the length of the longest token in the vocabulary that consists of the
        word's symbols.
        """
        num_symbols = 0
        used_symbols = set[int]()
        for char, count in Counter(spelled).items():
            symbols = self._symbols(char)
            used_symbols.update(symbols)
            if self._options.unknown not in symbols:  # a run of unknown characters may be one token
                num_symbols += count * len(symbols)
        chars = "".join(self.vocabulary.text(symbol) or "" for symbol in used_symbols)
        return -(-num_symbols // max(self.vocabulary.max_length(chars), longest_added))

    def _symbols(self, spelled: str) -> list[int]:
        """Return the token ids of a word's characters, from which merging begins.

        Characters that are not in the vocabulary are replaced as `MergeOptions` says.
        """
        char_id = self._char_id
        options = self._options
        ids: list[int | None] = []
        for start in _chunk_starts(len(spelled)):
            ids += [char_id(char) for char in spelled[start : start + _CHUNK_SYMBOLS]]
        symbols = [id_ for id_ in ids if id_ is not None]
        if len(symbols) == len(ids):
            return symbols
        unknown = [] if options.unknown is None else [options.unknown]
        symbols = []
        # An unknown token is written after the bytes that follow it, as in `tokenizers`.
        pending_unknown: list[int] = []
        for char, id_ in zip(spelled, ids, strict=True):
            if id_ is not None:
                symbols += [*pending_unknown, id_]
                pending_unknown = []
                continue
            if options.byte_ids:
                tokens = [options.byte_ids[value] for value in char.encode()]
                byte_tokens = [token for token in tokens if token is not None]
                if len(byte_tokens) == len(tokens):
                    symbols += byte_tokens
                    continue
            if not options.fuse_unknown:
                symbols += pending_unknown
            pending_unknown = unknown
        return symbols + pending_unknown

    def _merge_short(self, symbols: list[int]) -> list[int]:
        rank_of = self._pairs
        ranks = [rank_of[a << 32 | b] for a, b in pairwise(symbols)]
        while ranks and (rank := min(ranks)) != _NO_MERGE:
            index = ranks.index(rank)
            merged = symbols[index] = rank & _LAST_BITS
            del symbols[index + 1], ranks[index]
            if index:
                ranks[index - 1] = rank_of[symbols[index - 1] << 32 | merged]
            if index < len(ranks):
                ranks[index] = rank_of[merged << 32 | symbols[index + 1]]
        return symbols

    def _merge_long(self, symbols: list[int]) -> list[int]:
        """Merge the symbols of a long word, with the same result as `_merge_short`.

        A heap and a linked list make this take n log n steps.
        """
        rank_of = self._pairs
        end = len(symbols)
        next_of, previous_of = list(range(1, end + 1)), list(range(-1, end - 1))
        heap: list[int] = []
        for start in _chunk_starts(end):
            ranks = [
                rank_of[a << 32 | b]
                for a, b in pairwise(symbols[start : start + _CHUNK_SYMBOLS + 1])
            ]
            heap += [rank << 32 | at for at, rank in enumerate(ranks, start) if rank != _NO_MERGE]
        heapq.heapify(heap)
        num_steps = 0
        while heap:
            num_steps += 1
            if not num_steps & _CHECK_MASK:
                check_not_cancelled()
            first_pair = heapq.heappop(heap)
            rank, left = first_pair >> 32, first_pair & _LAST_BITS
            right = next_of[left]
            if symbols[left] < 0 or right == end:
                continue  # merged with another symbol since
            if rank_of[symbols[left] << 32 | symbols[right]] != rank:
                continue
            symbols[left] = rank & _LAST_BITS
            symbols[right] = -1  # merged into the left one
            next_right = next_of[left] = next_of[right]
            if next_right < end:
                previous_of[next_right] = left
            for first, second in ((previous_of[left], left), (left, next_right)):
                if first < 0 or second == end:
                    continue
                new_rank = rank_of[symbols[first] << 32 | symbols[second]]
                if new_rank != _NO_MERGE:
                    heapq.heappush(heap, new_rank << 32 | first)
        return [symbol for symbol in symbols if symbol >= 0]


def _chunk_starts(length: int) -> Iterator[int]:
    """Yield the start of each chunk of a long list; raise WorkCancelledError if cancelled.

    The encoder walks through long texts in chunks, so that it can be cancelled between them.
    """
    for start in range(0, length, _CHUNK_SYMBOLS):
        if start:
            check_not_cancelled()
        yield start


class _Pairs(dict[int, int]):
    """The merge rank of each pair of neighbouring token ids; lower ranks are merged first.

    The rank is `pairs[left << 32 | right]`. If the joined texts of a pair are not a token, its rank
    is `_NO_MERGE`. Ranks are computed on demand and cached, up to a limit.
    """

    def __init__(self, vocabulary: Vocabulary, order: Order) -> None:
        """Use `order(left, right, merged)` to rank the pair `left`, `right`, which forms `merged`.

        `order` returns a number, which is lower for a pair that is merged earlier, or None for a
        pair that is never merged.
        """
        super().__init__()
        self._vocabulary = vocabulary
        self._order = order

    def __missing__(self, pair: int) -> int:
        vocabulary = self._vocabulary
        left, right = vocabulary.spelling(pair >> 32), vocabulary.spelling(pair & _LAST_BITS)
        merged = vocabulary.find(left + right)
        order = None if merged is None else self._order(left, right, merged)
        rank = _NO_MERGE if merged is None or order is None else order << 32 | merged
        if len(self) >= _MAX_CACHED_PAIRS:
            self.clear()
        self[pair] = rank
        return rank


class ListedPairs(_Pairs):
    """Merge ranks from a file's list of merges: the order in the list is the rank."""

    def __init__(self, merges: Iterable[str], vocabulary: Vocabulary) -> None:
        """Read merges, each a line of two texts with a space between.

        The last of equal lines counts.
        """
        lines = Vocabulary(merges)
        super().__init__(vocabulary, lambda left, right, _: lines.find(left + b" " + right))


class ScoredPairs(_Pairs):
    """Merge ranks from token scores, by SentencePiece's rule.

    Neighbours may merge if their joined text is a token. The token with the best score is merged
    first; if several pairs make this token, the pair with the longest left part. Hugging Face's
    converters list the pairs of a vocabulary in the same order (`generate_merges` of transformers'
    tokenization_utils_base.py).
    """

    def __init__(self, scores: Sequence[float], vocabulary: Vocabulary) -> None:
        """Rank pairs by `scores`, which has the score of each token by id."""
        by_score = np.argsort(-np.asarray(scores, np.float64), kind="stable")
        order_by_id = np.empty(len(by_score), np.uint32)
        order_by_id[by_score] = np.arange(len(by_score), dtype=np.uint32)
        order = array("I", order_by_id.tobytes())
        super().__init__(
            vocabulary,
            lambda left, _, merged: (
                order[merged] << 16 | (_MAX_LENGTH - min(len(left), _MAX_LENGTH))
            ),
        )
