"""Which of several replicas a request goes to: pure functions of what is known of the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from twostroke.core.frozen import Frozen

Floats = npt.NDArray[np.float64]
WEIGHT: Final = 3.0  # of a second that is computed, beside one that is waited
_CROWD: Final = 0.02  # by which each request that writes its answer slows the others
_OPEN_S: Final = 1e-4  # what it costs those that wait for nothing
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_MASK: Final = (1 << 64) - 1


class RoutingState(Frozen):
    """What a router knows when a request comes; replicas have places from 0.

    Attributes:
        number: counts the requests.
        wait_s: (replicas,) seconds until a new request would begin; inf where none may go. At
            least one is finite. Of those that wait for nothing, the one with the fewest requests
            has the least.
        num_open: (replicas,) requests that have not ended.
        missing_s: seconds for the part of the prompt that a replica must compute, and for tokens of
            answers beside it, by place, of the candidates; empty unless the policy is one of
            `LOOKS_AT_PREFIXES`.
    """

    number: int
    wait_s: Floats
    num_open: Floats
    missing_s: Mapping[int, float] = {}


Policy = Callable[[RoutingState], int]  # to the place of a replica whose wait is finite


def prefix(view: RoutingState, weight: float = WEIGHT) -> int:
    """Take the candidate with the soonest first token, where computing counts more than waiting.

    A second that is computed also delays those that come later; one that is waited does not.
    """
    best, least_s = 0, math.inf
    for place, missing_s in view.missing_s.items():
        num_open = view.num_open.item(place)
        cost_s = (view.wait_s.item(place) + weight * missing_s) * (1 + _CROWD * num_open)
        cost_s += _OPEN_S * num_open
        if cost_s < least_s:
            best, least_s = place, cost_s
    return best


def least_work(view: RoutingState) -> int:
    """Take the replica with the shortest wait; of several, the one with the fewest requests."""
    return int(view.wait_s.argmin())


def two_choices(view: RoutingState) -> int:
    """Take the one with the shorter wait of two random replicas (Mitzenmacher, 2001)."""
    places = np.flatnonzero(np.isfinite(view.wait_s))
    mixed = mix(view.number)
    first = int(places[(mixed >> 32) % len(places)])
    other = int(places[(mixed & 0xFFFFFFFF) % len(places)])
    return min(first, other, key=view.wait_s.item)


def round_robin(view: RoutingState) -> int:
    """Take the replicas in turn."""
    places = np.flatnonzero(np.isfinite(view.wait_s))
    return int(places[view.number % len(places)])


POLICIES: Final[dict[str, Policy]] = {
    "prefix": prefix,
    "least-work": least_work,
    "two-choices": two_choices,
    "round-robin": round_robin,
}
LOOKS_AT_PREFIXES: Final = frozenset({"prefix"})


def mix(number: int) -> int:
    """Return 64 bits that look random and follow from a number (the finalizer of SplitMix64)."""
    mixed = (number + 1) * _GOLDEN & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
