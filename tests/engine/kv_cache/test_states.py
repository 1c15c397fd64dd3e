"""The pool of recurrent states: which snapshots are evicted."""

from __future__ import annotations

import random

from twostroke.core.request import NO_STATE
from twostroke.engine.kv_cache import StatePool

KEYS = [bytes([number]) for number in range(60)]


def keep(pool: StatePool, key: bytes, num_tokens: int, previous: bytes | None = None) -> None:
    """Keep a snapshot that no request references."""
    slot = pool.allocate()
    pool.keep(slot, key, num_tokens, previous)
    pool.release(slot)


def use(pool: StatePool, key: bytes, previous: bytes | None = None) -> None:
    """Let a request start from a snapshot."""
    pool.use(pool.find(key), previous)


def cached(pool: StatePool) -> set[bytes]:
    return {key for key in KEYS if pool.find(key) != NO_STATE}


def test_the_snapshot_that_saves_the_fewest_tokens_is_evicted() -> None:
    pool = StatePool(3)
    keep(pool, KEYS[0], 2000)
    keep(pool, KEYS[1], 2016, KEYS[0])
    keep(pool, KEYS[2], 500)
    keep(pool, KEYS[3], 300)
    assert cached(pool) == {KEYS[0], KEYS[2], KEYS[3]}


def test_a_snapshot_saves_more_once_the_shorter_one_is_gone() -> None:
    pool = StatePool(3)
    keep(pool, KEYS[0], 1000)
    keep(pool, KEYS[1], 1100, KEYS[0])
    keep(pool, KEYS[2], 200)
    pool.drop(KEYS[0])
    keep(pool, KEYS[3], 400)
    keep(pool, KEYS[4], 400)
    assert KEYS[1] in cached(pool), "1,100 tokens are computed again without it"


def test_a_snapshot_between_two_others_lessens_the_longer_one_at_its_next_use() -> None:
    pool = StatePool(3)
    keep(pool, KEYS[0], 4096)
    keep(pool, KEYS[1], 4000)
    use(pool, KEYS[0], previous=KEYS[1])
    keep(pool, KEYS[2], 200)
    keep(pool, KEYS[3], 200)
    assert cached(pool) == {KEYS[1], KEYS[2], KEYS[3]}


def test_a_snapshot_whose_page_was_evicted_goes_first() -> None:
    pool = StatePool(2)
    keep(pool, KEYS[0], 10_000)
    keep(pool, KEYS[1], 16)
    pool.has_page = lambda key: key != KEYS[0]
    keep(pool, KEYS[2], 16)
    assert cached(pool) == {KEYS[1], KEYS[2]}


def test_a_shared_beginning_outlives_chats_that_pass_each_snapshot_once() -> None:
    pool = StatePool(6)
    keep(pool, KEYS[0], 1000)
    use(pool, KEYS[0])
    use(pool, KEYS[0])
    previous = None
    for turn, key in enumerate(KEYS[1:], 1):
        keep(pool, key, turn * 100, previous)
        use(pool, key, previous)
        previous = key
    assert KEYS[0] in cached(pool)
    assert KEYS[-1] in cached(pool)


def test_links_between_snapshots_stay_right_in_any_order() -> None:
    rng = random.Random(3)
    pool = StatePool(8)
    for _ in range(3000):
        key = rng.choice(KEYS)
        others = sorted(cached(pool))
        previous = max((other for other in others if other < key), default=None)
        if pool.find(key) == NO_STATE:
            keep(pool, key, 16 * key[0], previous)
        elif rng.random() < 0.5:
            use(pool, key, previous)
        else:
            pool.drop(key)
        snapshots = list(pool._snapshots.values())
        for snapshot in snapshots:
            next_ones = [other for other in snapshots if other.previous == snapshot.key]
            assert snapshot.num_next == len(next_ones)
            assert snapshot.previous is None or snapshot.previous in cached(pool)
        assert pool.num_available == pool.num_slots
