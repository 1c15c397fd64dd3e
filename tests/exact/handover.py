"""`make test-handover`: messages of a hand-over are lost, late, doubled, and connections cut.

First each message suffers each fault, over each link; then come random rounds. Every request must
be answered as by one engine, nothing may hang, and no page may stay held.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.handover import LINKS
from support.handover_rounds import play_each, play_round


def main() -> int:
    """Play all; an assertion fails at the first fault that costs a request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first random round")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # lost connections are no news here
    counts, began_s = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for link in LINKS:
            play_each(Path(place), link, counts)
        for seed in range(given.seed, given.seed + given.rounds):
            print(f"\rround {seed}", end="", file=sys.stderr, flush=True)
            play_round(seed, Path(place), counts)
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count:,}")
    print(f"No request was lost, in {time.monotonic() - began_s:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
