"""`make test-handover`: messages of a hand-over are lost, late, doubled, and processes killed.

First each message suffers each fault, over each link; then come random rounds, which cut
connections, too. Every request must be answered as by one engine, nothing may hang, and no page may
stay held. Last, engines and servers are killed and stopped (see support/handover_kills.py).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.handover import LINKS
from support.handover_kills import KINDS, SIDES, campaign
from support.handover_rounds import play_each, play_round


def main() -> int:
    """Play all; an assertion fails at the first fault that costs a request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first random round")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="kill to go on with, without rounds")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # lost connections are no news here
    counts, began_s = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for link in LINKS if not given.first else ():
            play_each(Path(place), link, counts)
        for seed in range(given.seed, given.seed + given.rounds) if not given.first else ():
            print(f"\rround {seed}", end="", file=sys.stderr, flush=True)
            play_round(seed, Path(place), counts)
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count:,}")
    wrong = _kill(given.kills, given.seed, given.first)
    words = f"{len(wrong)} things went wrong" if wrong else "No request was lost"
    print("\n".join([*wrong, f"{words}, in {time.monotonic() - began_s:.0f} s."]))
    return 1 if wrong else 0


def _kill(count: int, seed: int, first: int) -> list[str]:
    """Do the last of `count` faults of processes, and print the results; return what was wrong."""
    every = [(side, kind) for side in SIDES for kind in KINDS]
    faults = [every[number % len(every)] for number in range(count)]
    random.Random(seed).shuffle(faults)
    with tempfile.TemporaryDirectory() as place:
        counts, wrong = asyncio.run(campaign(Path(place), faults, seed, first=first))
    print(f"{count - first} faults of processes:")
    for what, number in sorted(counts.items()):
        print(f"  {what}: {number:,}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
