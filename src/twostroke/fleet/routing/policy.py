"""Routing policies: pure functions that choose a replica from the state of all replicas.

To add a policy, write a function from `RoutingState` to the index of a replica, add it to
`POLICIES`, and add its name to `POLICY_NAMES` in `fleet/router/options.py`. The options `--policy`
of `twostroke route` and `--routing` of `twostroke simulate` then offer it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from twostroke.core.frozen import Frozen

Floats = npt.NDArray[np.float64]

COMPUTE_WEIGHT: Final = 3.0  # of a second that is computed, relative to a second that is waited
_CROWDING_FACTOR: Final = 0.02  # by which each running request slows down the others
_OPEN_REQUEST_S: Final = 1e-4  # cost of each running request, to choose between idle replicas
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_MASK_64: Final = (1 << 64) - 1


class RoutingState(Frozen):
    """The state of all replicas when a request arrives, from which a routing policy chooses.

    Replicas are numbered from 0. The router knows its own requests at once, and the requests of
    other senders from the replicas' reports. Each replica reports every half second, or more
    rarely if there are more than 125 replicas. No field counts running requests alone.

    Attributes:
        request_number: the number of this request, counted from 0.
        wait_s: shape (replicas,): seconds until a new request would start, from this router's
            requests and the replica's last report; inf for replicas that get no requests. At
            least one is finite. Of idle replicas, the smallest value belongs to the replica with
            the fewest requests.
        num_open: shape (replicas,): requests of this router, waiting and running, that have not
            ended.
        num_waiting: shape (replicas,): requests of all senders in a replica's queue, by its last
            report (`ServerLoad.waiting`); 0 for servers other than Twostroke, which report none.
        prefill_s: by index of a candidate replica, seconds to prefill the part of the prompt that
            is not in the replica's prefix cache, slowed down by its running requests. Empty unless
            the policy is in `PREFIX_POLICIES`.
    """

    request_number: int
    wait_s: Floats
    num_open: Floats
    num_waiting: Floats
    prefill_s: Mapping[int, float] = {}


Policy = Callable[[RoutingState], int]  # returns the index of a replica with a finite wait


def prefix(state: RoutingState, compute_weight: float = COMPUTE_WEIGHT) -> int:
    """Return the replica with the lowest cost: the time to the first token, weighted.

    The time is the wait and the prefill of the part of the prompt that is not in the replica's
    prefix cache. A second of prefill counts more than a second of waiting, since prefill also
    delays later requests: `compute_weight` is the ratio. Open requests at a replica raise its cost.
    """
    best, min_cost_s = 0, math.inf
    for index, prefill_s in state.prefill_s.items():
        num_open = state.num_open.item(index)
        first_token_s = state.wait_s.item(index) + compute_weight * prefill_s
        cost_s = first_token_s * (1 + _CROWDING_FACTOR * num_open) + _OPEN_REQUEST_S * num_open
        if cost_s < min_cost_s:
            best, min_cost_s = index, cost_s
    return best


def least_work(state: RoutingState) -> int:
    """Return the replica with the shortest wait.

    Among idle replicas, it is the replica with the fewest requests.
    """
    return int(state.wait_s.argmin())


def two_choices(state: RoutingState) -> int:
    """Return the replica with the shorter wait of two random replicas (Mitzenmacher, 2001).

    The choice is a hash of the request's number, so that simulations can be repeated.
    """
    open_replicas = np.flatnonzero(np.isfinite(state.wait_s))
    random_bits = mix(state.request_number)
    first = int(open_replicas[(random_bits >> 32) % len(open_replicas)])
    second = int(open_replicas[(random_bits & 0xFFFFFFFF) % len(open_replicas)])
    return min(first, second, key=state.wait_s.item)


def round_robin(state: RoutingState) -> int:
    """Return the next open replica, so that requests go to all open replicas in turn."""
    open_replicas = np.flatnonzero(np.isfinite(state.wait_s))
    return int(open_replicas[state.request_number % len(open_replicas)])


POLICIES: Final[dict[str, Policy]] = {
    "prefix": prefix,
    "least-work": least_work,
    "two-choices": two_choices,
    "round-robin": round_robin,
}
PREFIX_POLICIES: Final = frozenset({"prefix"})  # policies that need `RoutingState.prefill_s`


def mix(number: int) -> int:
    """Return 64 pseudo-random bits that depend on a number (the finalizer of SplitMix64).

    Hashes of texts and points of the hash ring are computed with it.
    """
    mixed = (number + 1) * _GOLDEN_GAMMA & _MASK_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
    return mixed ^ mixed >> 31
