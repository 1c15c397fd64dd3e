"""Lose, delay and repeat messages of KV transfers, and kill the processes.

Run it with `make long SUITE=disaggregation`.

First, each type of message is lost, delayed, doubled and cut over each link, then random rounds do
the same at random. Every request must get the answer of one engine, nothing may hang, and no
page may stay held. Last, engines and servers are killed and stopped (see
support/disaggregation_kills.py). With `--nixl`, NIXL, which must be installed, moves the pages, and
its processes are killed and stopped, too.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from support.disaggregation import LINKS, NIXL_LINKS, SECRET
from support.disaggregation_faults import run_each_fault, run_round
from support.disaggregation_kills import CARRIER_KINDS, KINDS, SIDES, campaign

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Play all; an assertion fails at the first fault that costs a request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first random round")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="kill to go on with, without rounds")
    parser.add_argument("--nixl", action="store_true", help="let NIXL move the pages")
    args = parser.parse_args()
    os.environ["TWOSTROKE_PEER_SECRET"] = SECRET
    links = NIXL_LINKS if args.nixl else LINKS
    rounds_links = links if args.nixl else ("shared", "tcp")
    logging.disable(logging.WARNING)  # lost connections are no news here
    counts, began_s = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder_name:
        for link in links if not args.first else ():
            run_each_fault(Path(folder_name), link, counts)
        for seed in range(args.seed, args.seed + args.rounds) if not args.first else ():
            print(f"\rround {seed}", end="", file=sys.stderr, flush=True)
            run_round(seed, Path(folder_name), counts, rounds_links)
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count:,}")
    wrong = _kill(args.kills, args.seed, args.first, links if args.nixl else ("",))
    words = f"{len(wrong)} things went wrong" if wrong else "No request was lost"
    print("\n".join([*wrong, f"{words}, in {time.monotonic() - began_s:.0f} s."]))
    return 1 if wrong else 0


def _kill(count: int, seed: int, first: int, links: Sequence[str]) -> list[str]:
    """Do the last of `count` faults of processes, and print the results; return what was wrong.

    Each of the `links` suffers its share of them.
    """
    if len(links) > 1:
        return [
            result for link in links for result in _kill(count // len(links), seed, first, [link])
        ]
    kinds = (*KINDS, *CARRIER_KINDS) if links[0] else KINDS
    every = [(side, kind) for side in SIDES for kind in kinds]
    faults = [every[number % len(every)] for number in range(count)]
    random.Random(seed).shuffle(faults)
    with tempfile.TemporaryDirectory() as folder_name:
        counts, wrong = asyncio.run(
            campaign(Path(folder_name), faults, seed, first=first, link=links[0])
        )
    print(f"{count - first} faults of processes{links[0] and ', ' + links[0]}:")
    for name, number in sorted(counts.items()):
        print(f"  {name}: {number:,}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
