"""Random bits that are a function of (seed, counter) and of nothing else: Philox4x32-10."""

from __future__ import annotations

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the four 32-bit words that ten rounds make of four words under a key of two.

    Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def random_bits(seed: int, counter: int) -> int:
    """Return 64 random bits for output token `counter` of a request with this seed.

    The seed (taken modulo 2^64) is the key. The counter fills the low two words of Philox's own;
    the other two are 0 here and free for other uses of the same seed.
    """
    seed &= 2**64 - 1
    words = philox4x32((counter & _LOW, counter >> 32 & _LOW, 0, 0), (seed & _LOW, seed >> 32))
    return words[0] | words[1] << 32
