"""Damage, swap or forge 10,000 offloaded KV pages; each must be a miss.

Run it with `make long SUITE=kv-offload`.

Files in a folder, then entries of a Redis server, are damaged in every way of
`stored_pages.DAMAGES`, or replaced by the same page of another tenant, model, format, level, page
size or kind, under the right name. Then tiny engines answer prompts whose stored files and entries
are damaged while they run and between their starts: the tokens must stay the same.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from support.engines import tiny_client
from support.stored_pages import DAMAGES, OTHER_KINDS, PAGE_BYTES, PAGE_VALUE, content_of, kind
from support.stores import SECRET, Store, missing, store
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_offload.disk import DiskTier, stored_pages
from twostroke.engine.kv_offload.manager import OffloadManager
from twostroke.engine.kv_offload.redis import RedisTier
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from twostroke.engine.kv_offload.tier import KvCacheSpec, OffloadTier

_NUM_PAGES = 40
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class StoreUnderTest(Protocol):
    """Where pages are stored, and how what is there can be changed."""

    def tier(self, of: KvCacheSpec) -> OffloadTier:
        """Return a new tier for pages of a kind."""

    def stored(self) -> list[object]:
        """Return where each page is."""

    def where(self, tier: OffloadTier, name: bytes) -> object:
        """Return where a page is."""

    def read(self, where: object) -> bytes:
        """Return what is there."""

    def write(self, where: object, data: bytes) -> None:
        """Put something else there."""


class Files:
    """Implements `Place` with a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tier(self, of: KvCacheSpec) -> DiskTier:
        return DiskTier(self._folder, of, 10**9, "m")

    def stored(self) -> list[Path]:
        return list(stored_pages(self._folder))

    def where(self, tier: DiskTier, name: bytes) -> Path:
        return tier._path(name)

    def read(self, where: Path) -> bytes:
        return where.read_bytes()

    def write(self, where: Path, data: bytes) -> None:
        where.write_bytes(data)


class Entries:
    """Implements `Place` with a Redis server."""

    def __init__(self, running: Store) -> None:
        self._client, self._url = running.client(), running.url

    def tier(self, of: KvCacheSpec) -> RedisTier:
        return RedisTier(self._url, of)

    def stored(self) -> list[bytes]:
        return list(self._client.scan_iter())

    def where(self, tier: RedisTier, name: bytes) -> bytes:
        return tier._key(name)

    def read(self, where: bytes) -> bytes:
        return self._client.get(where) or b""

    def write(self, where: bytes, data: bytes) -> None:
        self._client.set(where, data)


def damage_pages(numbers: range, seed: str, store_under_test: StoreUnderTest) -> Counter[str]:
    """Damage stored pages; return how many were missed, by damage, and what was wrong.

    Each fault follows from the seed and its number.
    """
    counts: Counter[str] = Counter()
    tiers = {of: store_under_test.tier(of) for of in (kind(), *OTHER_KINDS)}
    keys = [(0, bytes([number]) * 32) for number in range(_NUM_PAGES)]
    theirs = [(0, bytes([number]) * 31 + b"t") for number in range(_NUM_PAGES)]  # another tenant's
    tested_tier = tiers[kind()]
    for of, tier in tiers.items():
        for number, key in enumerate([*keys, *theirs]):
            # All kinds have other bytes, so that a wrong page would be seen.
            content = memoryview(content_of(number + 1000 * list(tiers).index(of)))
            tier.offer(of.name(key), content, PAGE_VALUE)
    pages_by_kind = {
        of: [
            store_under_test.read(store_under_test.where(tier, of.name(key)))
            for key in [*keys, *theirs]
        ]
        for of, tier in tiers.items()
    }
    mine, tenants = pages_by_kind[kind()][:_NUM_PAGES], pages_by_kind[kind()][_NUM_PAGES:]
    for fault in numbers:
        rng = random.Random(f"{seed} {fault}")
        number = rng.randrange(_NUM_PAGES)
        name = kind().name(keys[number])
        where = store_under_test.where(tested_tier, name)
        damage_name = rng.choice([*DAMAGES, "of another kind", "of another tenant"])
        if damage_name in DAMAGES:
            others = [*mine[:number], *mine[number + 1 :]]
            bad = DAMAGES[damage_name](rng, mine[number], others)
        elif damage_name == "of another kind":
            bad = pages_by_kind[rng.choice(OTHER_KINDS)][number]
        else:
            bad = tenants[number]
        store_under_test.write(where, bad)
        page = bytearray(PAGE_BYTES)
        result = tested_tier.fetch(name, memoryview(page))
        is_whole = bad == mine[number]
        counts["nothing changed" if is_whole else damage_name] += 1
        if result != is_whole or (result and bytes(page) != content_of(number)):
            counts["WRONG"] += 1
        store_under_test.write(where, mine[number])
    return counts


def damage_under_engines(
    rounds: int, rng: random.Random, folder: Path, store_under_test: StoreUnderTest
) -> Counter[str]:
    """Damage the pages of tiny engines; return how many answers were right and wrong."""
    counts: Counter[str] = Counter()
    prompts = [[3 + (i * i + seed * i) % 200 for i in range(100)] for seed in range(6)]
    with tiny_client(folder) as (client, backend):
        page_bytes = backend.pages.page_bytes  # type: ignore[union-attr]
        right = [client.generate(prompt, _GREEDY).wait()[0].token_ids for prompt in prompts]
    of = kind(page_bytes=page_bytes, groups=PageGroups(16))
    for _ in range(rounds):
        stored = store_under_test.stored()
        for where in rng.sample(stored, len(stored) // 2):
            data = store_under_test.read(where)
            if len(data) < 200:  # it was cut before
                continue
            others = [store_under_test.read(key) for key in rng.sample(stored, min(3, len(stored)))]
            store_under_test.write(where, rng.choice(list(DAMAGES.values()))(rng, data, others))
            counts["damaged"] += 1
        with tiny_client(folder) as (client, _):
            OffloadManager(
                client.loop.pages,
                of,
                [store_under_test.tier(of)],
                prefill_s=lambda first, end: (end - first) * 0.01,
            )
            for number in rng.sample(range(len(prompts)), len(prompts)):
                generation = client.generate(prompts[number], _GREEDY, hints=Hints(keep_s=60.0))
                output = generation.wait()[0]
                is_right = output.token_ids == right[number]
                counts["answers" if is_right else "WRONG"] += 1
                assert output.usage is not None
                counts["pages used"] += output.usage.cached_tokens // 16
    return counts


def main() -> int:
    """Damage pages, print what came of it; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="page to begin with, to go on")
    parser.add_argument("--rounds", type=int, default=30, help="of tiny engines")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.getLogger("twostroke").setLevel(logging.ERROR)
    os.environ["TWOSTROKE_STORE_KEY"] = SECRET
    rng, wrong = random.Random(f"{args.seed} {args.first}"), 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def new(name: str) -> Path:
            (Path(folder) / name).mkdir()
            return Path(folder) / name

        store_pairs: list[tuple[str, Any, Any]] = [("files", Files(new("a")), Files(new("b")))]
        if reason := missing():
            print(f"entries of a store: skipped, this {reason}")
        else:
            first, second = (Entries(stack.enter_context(store(new(name)))) for name in ("c", "d"))
            store_pairs.append(("entries", first, second))
        for name, first, second in store_pairs:
            result = damage_pages(range(args.first, args.pages), f"{args.seed} {name}", first)
            under = damage_under_engines(args.rounds, rng, new(name), second)
            for label, counts in ((name, result), (f"engines with {name}", under)):
                wrong += counts["WRONG"]
                summary = ", ".join(f"{n:,} {of}" for of, n in sorted(counts.items()))
                print(f"{label}: {summary}")
    print("Nothing was wrong." if not wrong else f"{wrong} times something was wrong.")
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
