"""`make test-tiers`: page files damaged, swapped or of others, 10,000; each must be a miss.

Pages are damaged in every way of `stored_pages.DAMAGES`, or replaced by the same page of another
model, format, level, page size or kind, under the right name. Then a tiny engine answers prompts
whose stored pages are damaged while it runs and between its starts: its tokens must stay the same.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from support.engines import tiny_client
from support.stored_pages import DAMAGES, OTHER_KINDS, PAGE_BYTES, WORTH, content_of, kind
from twostroke.cache import PageGroups
from twostroke.cache.disk import DiskTier, stored_pages
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.paging import Paging

_NUM_PAGES = 40
_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def damage_pages(count: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Damage `count` stored pages; return how many were missed, by damage, and what was wrong."""
    counts: Counter[str] = Counter()
    tiers = {of: DiskTier(folder, of, 10**9, "m") for of in (kind(), *OTHER_KINDS)}
    keys = [(0, bytes([number]) * 32) for number in range(_NUM_PAGES)]
    own = tiers[kind()]
    for of, tier in tiers.items():
        for number, key in enumerate(keys):
            # All kinds have other bytes, so that a wrong page would be seen.
            content = memoryview(content_of(number + 1000 * list(tiers).index(of)))
            tier.offer(of.name(key), content, WORTH)
    whole = {of: [t._path(of.name(key)).read_bytes() for key in keys] for of, t in tiers.items()}
    mine = whole[kind()]
    for _ in range(count):
        number = rng.randrange(_NUM_PAGES)
        name = kind().name(keys[number])
        path = own._path(name)
        what = rng.choice([*DAMAGES, "of another kind"])
        if what in DAMAGES:
            others = [*mine[:number], *mine[number + 1 :]]
            bad = DAMAGES[what](rng, mine[number], others)
        else:
            bad = whole[rng.choice(OTHER_KINDS)][number]
        path.write_bytes(bad)
        page = bytearray(PAGE_BYTES)
        found = own.fetch(name, memoryview(page))
        is_whole = bad == mine[number]
        counts["nothing changed" if is_whole else what] += 1
        if found != is_whole or (found and bytes(page) != content_of(number)):
            counts["WRONG"] += 1
        path.write_bytes(mine[number])
    return counts


def damage_under_engines(rounds: int, rng: random.Random, folder: Path) -> Counter[str]:
    """Damage the pages of tiny engines; return how many answers were right and wrong."""
    counts: Counter[str] = Counter()
    prompts = [[3 + (i * i + seed * i) % 200 for i in range(100)] for seed in range(6)]
    with tiny_client(folder) as (client, backend):
        page_bytes = backend.pages.page_bytes  # type: ignore[union-attr]
        right = [client.generate(prompt, _GREEDY).wait()[0].token_ids for prompt in prompts]
    of = kind(page_bytes=page_bytes, groups=PageGroups(16))
    for _ in range(rounds):
        files = list(stored_pages(folder / "pages"))
        for path in rng.sample(files, len(files) // 2):
            data = path.read_bytes()
            if len(data) < 200:  # it was cut before
                continue
            others = [one.read_bytes() for one in rng.sample(files, min(3, len(files)))]
            path.write_bytes(rng.choice(list(DAMAGES.values()))(rng, data, others))
            counts["files damaged"] += 1
        with tiny_client(folder) as (client, _):
            disk = DiskTier(folder / "pages", of, 10**9, "tiny")
            Paging(client.loop.pages, of, [disk], lambda first, end: (end - first) * 0.01)
            for number in rng.sample(range(len(prompts)), len(prompts)):
                asked = client.generate(prompts[number], _GREEDY, hints=Hints(keep_s=60.0))
                output = asked.wait()[0]
                is_right = output.token_ids == right[number]
                counts["answers" if is_right else "WRONG"] += 1
                assert output.usage is not None
                counts["pages used"] += output.usage.cached_tokens // 16
    return counts


def main() -> int:
    """Damage pages, print what came of it; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=30, help="of tiny engines")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger("twostroke").setLevel(logging.ERROR)
    rng, wrong = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for name, counts in (
            ("pages", damage_pages(given.pages, rng, Path(first))),
            ("engines", damage_under_engines(given.rounds, rng, Path(second))),
        ):
            wrong += counts["WRONG"]
            print(f"{name}: " + ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items())))
    print("Nothing was wrong." if not wrong else f"{wrong} times something was wrong.")
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
