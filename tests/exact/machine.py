"""`make long SUITE=machine`: random operations on pages, scheduler, engine and supervisor.

Each round combines other sizes, windows, policies and methods of speculation, does operations in a
random order, checks the invariants after each, and lets everything end. A round that fails is run
again by its seed: `--seed N --rounds 1`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter

from support.random_rounds import play_scheduler, play_service

_SERVICE_ROUNDS = 8  # one in so many is of engine and supervisor
_TOGETHER = 64  # rounds that are handed out together
_SAY_S = 60.0


def main() -> int:
    """Play rounds until there were enough operations; return 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    args = parser.parse_args()
    counts, began_s, said_s = Counter[str](), time.monotonic(), 0.0
    first, end = args.seed, args.seed + args.rounds
    with multiprocessing.Pool(min(args.rounds, len(os.sched_getaffinity(0)))) as pool:
        while first < end and counts["operations"] < args.operations:
            seeds = range(first, min(end, first + _TOGETHER))
            first += _TOGETHER
            for seed, round_counts, fault in pool.imap_unordered(play, seeds):
                counts.update(round_counts)
                if fault:
                    print(f"Round {seed} failed:\n{fault}")
                    return 1
            took_s = time.monotonic() - began_s
            if took_s - said_s > _SAY_S:
                said_s = took_s
                print(f"{counts['operations']:,} operations in {took_s:.0f} s", flush=True)
    for operation, count in sorted(counts.items()):
        print(f"  {operation}: {count:,}")
    print(f"Nothing was found in {time.monotonic() - began_s:.0f} s.")
    return 0


def play(seed: int) -> tuple[int, Counter[str], str]:
    """Play a round; return its seed, its counts, and what was found."""
    logging.disable(logging.ERROR)  # deaths are no news here
    counts: Counter[str] = Counter()
    play_round = play_service if seed % _SERVICE_ROUNDS == 0 else play_scheduler
    try:
        play_round(seed, counts)
    except Exception:  # noqa: BLE001 whatever it is, it is a finding
        return seed, counts, traceback.format_exc()
    return seed, counts, ""


if __name__ == "__main__":
    sys.exit(main())
