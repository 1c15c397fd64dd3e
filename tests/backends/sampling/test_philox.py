"""Random bits equal the generator's published results, also for seeds at word boundaries."""

from __future__ import annotations

import pytest

from twostroke.backends.sampling.reference import philox4x32, random_bits

ALL_BITS = 0xFFFFFFFF


@pytest.mark.parametrize(  # from the authors' Random123 distribution, kat_vectors
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_BITS,) * 4, (ALL_BITS,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert philox4x32(counter, key) == answer


def test_bits_are_the_first_two_words_under_the_seed():
    assert random_bits(0, 0) == 0xE169C58D6627E8D5


def test_a_negative_seed_is_its_residue():
    assert random_bits(-1, 5) == random_bits(2**64 - 1, 5)


def test_seeds_and_counters_that_differ_in_one_bit_give_other_bits():
    seeds = [0, *(1 << i for i in range(64))]
    counters = [0, *(1 << i for i in range(64))]
    assert len({random_bits(s, c) for s in seeds for c in counters}) == 65 * 65
