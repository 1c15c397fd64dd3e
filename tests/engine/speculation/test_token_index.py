"""The index of n-grams finds the same occurrences as a search through all tokens."""

from __future__ import annotations

import random

import pytest

from twostroke.engine.speculation.token_index import TokenIndex

LONGEST = 32


def search(
    tokens: list[int], context: list[int], max_occurrences: int = 8
) -> tuple[int, list[int]] | None:
    """Compare all positions; return the longest match's length and ends, the latest first.

    Only the latest `max_occurrences` of three equal tokens are compared, as in the index.
    """
    result = []
    for end in range(len(tokens) - 1, 2, -1):
        length = 0
        while length < min(end, len(context), LONGEST) and (
            tokens[end - 1 - length] == context[-1 - length]
        ):
            length += 1
        if length >= 3:
            result.append((length, end))
    result = result[:max_occurrences]
    if not result:
        return None
    longest = max(length for length, _ in result)
    return longest, [end for length, end in result if length == longest]


@pytest.mark.parametrize("seed", range(30))
def test_the_index_finds_what_a_full_search_finds(seed):
    rng = random.Random(seed)
    vocab_size = rng.choice((2, 3, 10, 150_000))
    tokens = [rng.randrange(vocab_size) for _ in range(rng.choice((0, 1, 3, 4, 50, 300)))]
    index = TokenIndex(tokens)
    for _ in range(60):
        new_tokens = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 4))]
        if tokens and rng.random() < 0.5:  # say again what was said
            start = rng.randrange(len(tokens))
            new_tokens = tokens[start : start + rng.randint(1, 40)]
        tokens += new_tokens
        index.catch_up()
        start = rng.randrange(len(tokens) + 1)
        for context in (tokens, tokens[start : start + 40], new_tokens):
            match = index.match(context)
            result = None if match is None else (match.length, list(match.ends))
            assert result == search(tokens, context)


def test_a_lookup_in_a_long_text_reads_few_places():
    """The number of compared positions stays small, however many occurrences there are."""

    class Counting(list):
        num_reads = 0

        def __getitem__(self, index):
            if isinstance(index, int):
                Counting.num_reads += 1
            return super().__getitem__(index)

    tokens = Counting([1, 2, 3, 4] * 25_000)
    index = TokenIndex(tokens)
    Counting.num_reads = 0
    match = index.match([9, 2, 3, 4])
    assert match is not None
    assert match.length == 3
    assert Counting.num_reads <= 8 * 4


def test_equal_hashes_of_different_tokens_are_not_a_match(monkeypatch):
    monkeypatch.setattr("twostroke.engine.speculation.token_index._HASH_FACTORS", (0, 0, 0))
    index = TokenIndex([1, 2, 3, 4, 5, 6, 7])
    assert index.match([7, 8, 9]) is None
    match = index.match([2, 3, 4])
    assert match is not None
    assert match.ends == (4,)
