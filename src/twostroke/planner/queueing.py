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

    times = _Times(
        planner.question.output,
        between([max(planner.prompt_s(int(n)), 1e-12) for n in grid]),
        between([planner.step_s(int(n)) for n in grid]),
        np.array([planner.num_chunks(int(n)) for n in counts]),
    )
    return tuple(_at(share, times) for share in SHARES)


class _Times(Frozen):
    """The times with 1, 2, ... requests at work, and the steps that read a prompt: (streams,)."""

    num_output: int
    prompt_s: np.ndarray
    step_s: np.ndarray
    num_chunks: np.ndarray


def _at(share: float, times: _Times) -> Loaded:
    """Return the means at a share of the most requests a second."""
    num_output, prompt_s, step_s = times.num_output, times.prompt_s, times.step_s
    counts = np.arange(1, len(step_s) + 1)
    rates = 1 / (prompt_s + num_output * step_s / counts)
    rate = share * rates[-1]
    # Relative chances of 0, 1, ... requests at work, and of any that wait for one of these to end.
    logs = np.concatenate(([0.0], np.cumsum(np.log(rate / rates))))
    chances = np.exp(logs - logs.max())
    waiting = share / (1 - share) * chances[-1]
    total = chances.sum() + waiting
    slot_s = waiting / (1 - share) / total / rate / 2  # half, as lengths are equal
    at_work = (chances[1:] @ counts + waiting * counts[-1]) / total
    # Chances of 0, 1, ... others at work when a request begins, and the time of their step.
    others = chances[:-1] / total
    others[-1] += (chances[-1] + waiting) / total
    others_s = np.concatenate(([0.0], step_s[:-1]))
    busy = min(
        rate * (others @ prompt_s), share
    )  # a prompt alone may take longer than among others
    reads_s = others @ (prompt_s + times.num_chunks * others_s)
    begins_s = reads_s * (1 + busy / (2 - 2 * busy)) + others @ others_s / 2
    # The rates count a step for the first token, too, which has none of its own where nobody else
    # is at work, and none for other chunks.
    extra_s = others @ ((times.num_chunks - 1) * others_s) - others[0] * step_s[0]
    system_s = at_work / rate + extra_s
    near = max(0, round(float(at_work)) - 1)
    tpot_s = max((system_s - begins_s) / max(num_output - 1, 1), step_s[near])
    at_work = rate * system_s
    return Loaded(share, float(rate), float(at_work), float(slot_s + begins_s), float(tpot_s))
