"""Pages are evicted from disk as a slow, plain twin decides, and never before pages after them."""

from __future__ import annotations

import random

import pytest

from twostroke.engine.kv_offload.disk_index import PREFIX_BYTES, DiskIndex, Entry

NOW_S = 1_000_000.0


def name_of(number: int) -> bytes:
    return number.to_bytes(PREFIX_BYTES, "big")


def plain_surplus(ledger: DiskIndex, now_s: float, room: int) -> list[bytes]:
    """Choose the pages to evict one by one, each the worst of the remaining pages."""
    left = dict(ledger.entries)
    kept_names: set[bytes] = set()

    def family(name: bytes) -> list[Entry]:
        """Return the entries of a page and of all pages that continue it."""
        after = [n for n, entry in ledger.entries.items() if entry.previous == name[:PREFIX_BYTES]]
        return [ledger.entries[name], *(entry for n in after for entry in family(n))]

    until = {name: max(entry.used_s for entry in family(name)) for name in left}
    score = {name: max(entry.score(now_s) for entry in family(name)) for name in left}
    while True:
        wanted_names = [n for n in left if until[n] > now_s and n not in kept_names]
        if not wanted_names:
            break
        best = max(wanted_names, key=lambda name: (until[name], -left[name].index))
        if sum(left[name].num_bytes for name in (*kept_names, best)) > ledger.max_bytes // 2:
            break
        kept_names.add(best)
    removed_names = []
    while left and sum(e.num_bytes for e in left.values()) + room > ledger.max_bytes:
        worst = min(left, key=lambda name: (name in kept_names, score[name], -left[name].index))
        removed_names.append(worst)
        del left[worst]
    return removed_names


@pytest.mark.seeds(20)
def test_the_index_chooses_as_its_plain_twin(seed: int) -> None:
    rng = random.Random(seed)
    ledger = DiskIndex(rng.randint(500, 5000))
    for number in range(rng.randint(0, 60)):
        used_s = NOW_S + rng.choice((-1e6, -100.0, -1.0, 50.0, 1e5)) * rng.random()
        entry = Entry(rng.randint(50, 150), rng.random(), rng.randrange(9), used_s)
        entry.num_uses = rng.randint(1, 4)
        earlier = [
            n for n, other_entry in ledger.entries.items() if other_entry.index < entry.index
        ]
        if earlier and rng.random() < 0.8:
            entry.previous = rng.choice(earlier)
        ledger.add(name_of(number), entry)
        if rng.random() < 0.2:
            ledger.remove(name_of(rng.randrange(number + 1)))
    assert ledger.num_bytes == sum(entry.num_bytes for entry in ledger.entries.values())
    room = rng.choice((0, 100, 10_000))
    assert ledger.surplus(NOW_S, room) == plain_surplus(ledger, NOW_S, room)


@pytest.mark.seeds(20)
def test_a_page_never_goes_before_those_that_need_it(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [[(0, s)] * 3 + [(s, index) for index in range(rng.randint(0, 9))] for s in (0, 1)]
    keys = [list(enumerate(sequence)) for sequence in sequences]
    all_keys = sorted({key for row in keys for key in row})
    chains = [[name_of(all_keys.index(key)) for key in row] for row in keys]
    ledger, now_s = DiskIndex(10**9), NOW_S
    for _ in range(40):
        chain = rng.choice(chains)
        chain = chain[: rng.randint(1, len(chain))]
        keep_s, at = rng.choice((0.0, 0.0, 200.0)), 0
        while at < len(chain):  # in chunks, each as if the sequence ended with it
            now_s += rng.choice((1.0, 300.0))
            end, until_s = at + rng.randint(1, 5), now_s + keep_s
            saved_s = min(end, len(chain)) * 0.1
            for page_index, name in [*enumerate(chain)][at:end]:
                before = chain[page_index - 1] if page_index else b""
                if name in ledger.entries:
                    ledger.use(name, saved_s, until_s)
                else:
                    ledger.add(name, Entry(100, saved_s, page_index, until_s, previous=before))
            at = end
    for total in range(100, ledger.num_bytes, 300):
        ledger.max_bytes = total
        removed_names = set(ledger.surplus(now_s, 0))
        for chain in chains:
            is_stored = [name not in removed_names for name in chain if name in ledger.entries]
            assert is_stored == sorted(is_stored, reverse=True), (
                "a page is left that cannot be reached"
            )
