"""What requests see at a share of the load that a plan can carry: how many are at work, and waits.

A queue whose rate depends on how many requests are at work, as in processor sharing (Kleinrock,
Queueing Systems II, 1976, section 4.4): what it does on average depends on the mean of lengths
alone. Prompts wait for others as in M/D/1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.planner.planner import Planner

SHARES: Final = (0.5, 0.7, 0.9)  # of the most requests a second
_GRID: Final = 24  # numbers of streams whose steps are computed; logarithms between are linear


class Loaded(Frozen):
    """Means at a load of `requests_per_s` that come by chance, a `share` of the most.

    `at_work` is how many requests are in progress. TTFT includes waiting, TPOT the prompts of
    others.
    """

    share: float
    requests_per_s: float
    at_work: float
    ttft_s: float
    tpot_s: float


def loads(planner: Planner, streams: int) -> tuple[Loaded, ...]:
    """Return what requests see at `SHARES` of what at most `streams` requests at once carry."""
    grid = np.unique(np.geomspace(1, streams, _GRID).round().astype(int))
    counts = np.arange(1, streams + 1)

    def between(times_s: list[float]) -> np.ndarray:
        return np.exp(np.interp(np.log(counts), np.log(grid), np.log(times_s)))

    step_s = between([planner.decode(int(n)).seconds for n in grid])
    prompt_s = between([max(planner.prompt_s(int(n)), 1e-12) for n in grid])
    return tuple(_at(planner.question.output, share, prompt_s, step_s) for share in SHARES)


def _at(num_output: int, share: float, prompt_s: np.ndarray, step_s: np.ndarray) -> Loaded:
    """Return the means; the times are those with 1, 2, ... requests at work: (streams,)."""
    counts = np.arange(1, len(step_s) + 1)
    rates = 1 / (prompt_s + num_output * step_s / counts)
    rate = share * rates[-1]
    # Relative chances of 0, 1, ... requests at work, and of any that wait for one of these to end.
    logs = np.concatenate(([0.0], np.cumsum(np.log(rate / rates))))
    chances = np.exp(logs - logs.max())
    waiting = share / (1 - share) * chances[-1]
    total = chances.sum() + waiting
    at_work = (chances[1:] @ counts + waiting * counts[-1]) / total
    slot_s = waiting / (1 - share) / total / rate / 2  # half, as lengths are equal
    near = max(0, round(float(at_work)) - 1)
    own_s = prompt_s[near] + step_s[near]
    busy = min(rate * prompt_s[near], share)  # a prompt alone may take longer than among others
    begins_s = own_s * (1 + busy / (2 - 2 * busy)) + step_s[near] / 2
    tpot_s = max((at_work / rate - begins_s) / max(num_output - 1, 1), step_s[near])
    return Loaded(share, float(rate), float(at_work), float(slot_s + begins_s), float(tpot_s))
