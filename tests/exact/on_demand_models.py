"""`make long SUITE=models-on-demand`: hostile requests for three models with memory for two.

Real processes with tiny models. A twelfth of the requests always ask, one after the other, for
a model that is not loaded; five twelfths come from callers that alternate without a pause; the rest
come in bursts. Each must be answered, with the tokens that its model always writes. The loads are
compared with the fewest that are possible if all requests are known beforehand, loads take no time,
and each request may wait for up to the shortest load (ADR 0042).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.residency import fewest_loads
from support.several_models import ModelServer, serving, write_models

_NAMES = "abc"


class Campaign:
    """Asks a server, and notes when it asked for what."""

    def __init__(self, server: ModelServer, seed: int) -> None:
        """Ask `server` at random by `seed`."""
        self.server, self.rng = server, random.Random(seed)
        self.arrivals: list[tuple[float, str]] = []
        self.texts: dict[str, set[str]] = {name: set() for name in _NAMES}
        self.waits: list[float] = []
        self.failures: list[str] = []

    def send_request(self, name: str) -> None:
        """Ask for a model and note the answer."""
        began_s = time.monotonic()
        self.arrivals.append((began_s, name))
        answer = self.server.complete(name, max_tokens=8)
        self.waits.append(time.monotonic() - began_s)
        if answer.status_code == 200:
            self.texts[name].add(answer.json()["choices"][0]["text"])
        else:
            self.failures.append(f"{name}: {answer.status_code} {answer.text[:200]}")

    def ask_for_unloaded_models(self, count: int) -> None:
        """Ask for a model that is not loaded, each time when the last answer is there."""
        for _ in range(count):
            loaded = self.server.loaded
            self.send_request(next((name for name in _NAMES if name not in loaded), "a"))

    def alternate(self, count: int) -> None:
        """Let callers go through the models, each from another one on, without a pause."""
        num_callers = 6
        with ThreadPoolExecutor(num_callers) as pool:

            def caller(number: int) -> None:
                for turn in range(number, count, num_callers):
                    self.send_request(_NAMES[(turn // num_callers + number) % 3])

            list(pool.map(caller, range(num_callers)))

    def burst(self, count: int) -> None:
        """Ask for models at random, several at once, with pauses between."""
        left = count
        with ThreadPoolExecutor(24) as pool:
            while left:
                size = min(left, self.rng.randint(1, 24))
                left -= size
                list(pool.map(self.send_request, self.rng.choices(_NAMES, k=size)))
                time.sleep(self.rng.random())


def main() -> int:
    """Run the campaign and print what came of it; return 1 if it missed its goal."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder), _NAMES)
        with serving(Path(folder), models, "--max-waiting", "1000") as server:
            campaign = Campaign(server, args.seed)
            part = args.requests // 12
            began_s = time.monotonic()
            for work, count in (
                (campaign.ask_for_unloaded_models, part),
                (campaign.alternate, 5 * part),
                (campaign.burst, args.requests - 6 * part),
            ):
                work(count)
                took_s = time.monotonic() - began_s
                print(f"{len(campaign.arrivals)} requests after {took_s:.0f} s.", flush=True)
            loads = server.load_times()
    sizes, arrivals = dict.fromkeys(_NAMES, 1), sorted(campaign.arrivals)
    shortest_s = min(seconds for _, seconds in loads)
    print("\n".join([f"{len(campaign.failures)} requests failed.", *campaign.failures[:5]]))
    longest_s = max(campaign.waits)
    print(f"{len(loads)} loads of {shortest_s:.1f} s or more; longest answer {longest_s:.1f} s.")
    fewest = 0
    for words, window_s in (("the longest answer", longest_s), ("one load", 0.99 * shortest_s)):
        fewest = fewest_loads(arrivals, sizes, 2, window_s)
        print(
            f"Fewest loads if each may wait for {words}, {window_s:.1f} s: {fewest} "
            f"(ours: {len(loads) / fewest:.2f} times)."
        )
    differ = [name for name, texts in campaign.texts.items() if len(texts) > 1]
    if differ:
        print(f"Answers of {', '.join(differ)} differ.")
    return 1 if campaign.failures or differ or len(loads) > 2 * fewest else 0


if __name__ == "__main__":
    raise SystemExit(main())
