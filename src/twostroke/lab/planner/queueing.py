"""What requests see at a share of the load that a plan can carry: how many are at work, and waits.

A queue whose rate depends on how many requests are at work, as in processor sharing (Kleinrock,
Queueing Systems II, 1976, section 4.4): what it does on average depends on the mean of lengths
alone. Prompts wait for others as in M/D/1.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.planner import last_that

if TYPE_CHECKING:
    from twostroke.lab.planner.planner import Planner

SHARES: Final = (0.5, 0.7, 0.9)  # of the most requests a second
_MAX_BUSY_SHARE: Final = 0.999
_MIN_THINK_S: Final = 1e-6
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


class UserLoad(Frozen):
    """Mean latencies and rates for users who each wait for an answer, think, and ask again.

    There are `num_users` on `num_replicas`, at most `users_per_replica` on each. `requests_per_s`
    counts all replicas. `at_work` is the number of requests that one replica computes or queues.
    `meets_objectives` says whether the mean latencies meet the objectives of the question.
    """

    num_users: int
    think_s: float
    num_replicas: int
    users_per_replica: int
    requests_per_s: float
    at_work: float
    ttft_s: float
    tpot_s: float
    response_s: float
    meets_objectives: bool


def loads(planner: Planner, streams: int) -> tuple[Loaded, ...]:
    """Return what requests see at `SHARES` of what at most `streams` requests at once carry."""
    times = _times(planner, streams)
    return tuple(_at(share, times) for share in SHARES)


def user_load(planner: Planner, streams: int) -> UserLoad | None:
    """Return the load of the question's users on the fewest replicas that meet the objectives.

    A replica computes at most `streams` requests at once. Without an objective for the first token,
    the replicas are enough for requests not to queue for their turn on average. The load is that on
    one replica if no number of replicas meets the objectives. None if the question names no users.
    """
    question = planner.question
    num_users = question.users
    if num_users is None:
        return None
    times = _times(planner, streams)

    def meets_objectives(num_replicas: int) -> bool:
        num_sharing = ceil(num_users / num_replicas)
        load = _closed(times, num_sharing, question.think_s)
        if question.ttft_s is None:  # the users who do not think wait for an answer
            is_soon = num_sharing - load.requests_per_s * question.think_s <= streams
        else:
            is_soon = load.ttft_s <= question.ttft_s
        return is_soon and (question.tpot_s is None or load.tpot_s <= question.tpot_s)

    is_possible = meets_objectives(num_users)  # with a replica for each user
    num_replicas = 1 + last_that(lambda count: not meets_objectives(count), num_users)
    num_replicas = num_replicas if is_possible else 1
    users_per_replica = ceil(num_users / num_replicas)
    load = _closed(times, users_per_replica, question.think_s)
    return UserLoad(
        num_users=num_users,
        think_s=question.think_s,
        num_replicas=num_replicas,
        users_per_replica=users_per_replica,
        requests_per_s=load.requests_per_s * num_users / users_per_replica,
        at_work=load.at_work,
        ttft_s=load.ttft_s,
        tpot_s=load.tpot_s,
        response_s=load.ttft_s + max(question.output - 1, 0) * load.tpot_s,
        meets_objectives=is_possible,
    )


def _times(planner: Planner, streams: int) -> _Times:
    grid = np.unique(np.geomspace(1, streams, _GRID).round().astype(int))
    counts = np.arange(1, streams + 1)

    def between(times_s: list[float]) -> np.ndarray:
        return np.exp(np.interp(np.log(counts), np.log(grid), np.log(times_s)))

    return _Times(
        planner.question.output,
        between([max(planner.prompt_s(int(n)), 1e-12) for n in grid]),
        between([planner.step_s(int(n)) for n in grid]),
        np.array([planner.num_chunks(int(n)) for n in counts]),
    )


class _Times(Frozen):
    """The times with 1, 2, ... requests at work, and the steps that read a prompt: (streams,)."""

    num_output: int
    prompt_s: np.ndarray
    step_s: np.ndarray
    num_chunks: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """The numbers of requests at work, from 1 on."""
        return np.arange(1, len(self.step_s) + 1)

    @property
    def rates(self) -> np.ndarray:
        """The requests a second that end, with 1, 2, ... requests at work."""
        rates: np.ndarray = 1 / (self.prompt_s + self.num_output * self.step_s / self.counts)
        return rates


def _at(share: float, times: _Times) -> Loaded:
    """Return the means at a share of the most requests a second."""
    counts, rates = times.counts, times.rates
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
    return _loaded(
        share, rate, others, times=times, at_work=at_work, slot_s=slot_s, others_rate=rate
    )


def _closed(times: _Times, num_users: int, think_s: float) -> Loaded:
    """Return the means for users who think for `think_s` seconds after each answer.

    The number of requests is a birth-death process: each idle user asks once in `think_s` seconds.
    A new request finds the same number of others as in a system without its user (Lavenberg and
    Reiser, 1980).
    """
    chances = _chances_closed(times, num_users, think_s)
    num_slots = len(times.rates)
    numbers = np.arange(num_users + 1)
    at_work = np.minimum(numbers, num_slots)
    rate = float(chances[1:] @ times.rates[at_work[1:] - 1])
    num_waiting = float(chances @ (numbers - at_work))
    others = np.zeros(num_slots)
    met = _chances_closed(times, num_users - 1, think_s)
    np.add.at(others, np.minimum(np.arange(num_users), num_slots - 1), met)
    share = min(rate / times.rates[-1], _MAX_BUSY_SHARE)
    slot_s = num_waiting / rate
    return _loaded(
        share,
        rate,
        others,
        times=times,
        at_work=float(chances @ at_work),
        slot_s=slot_s,
        others_rate=rate * (num_users - 1) / num_users,
    )


def _chances_closed(times: _Times, num_users: int, think_s: float) -> np.ndarray:
    """Return the chances that 0, 1, ... of the users wait for an answer: (num_users + 1,)."""
    numbers = np.arange(1, num_users + 1)
    rates = times.rates[np.minimum(numbers, len(times.rates)) - 1]
    arrivals = (num_users - numbers + 1) / max(think_s, _MIN_THINK_S)
    logs = np.concatenate(([0.0], np.cumsum(np.log(arrivals / rates))))
    chances: np.ndarray = np.exp(logs - logs.max())
    chances /= chances.sum()
    return chances


def _loaded(
    share: float,
    rate: float,
    others: np.ndarray,
    *,
    times: _Times,
    at_work: float,
    slot_s: float,
    others_rate: float,
) -> Loaded:
    """Return mean latencies of requests that find 0, 1, ... others with these chances: (streams,).

    A request waits `slot_s` for a free slot, and then for the prompts of other requests, which
    arrive at `others_rate` per second.
    """
    num_output, prompt_s, step_s = times.num_output, times.prompt_s, times.step_s
    others_s = np.concatenate(([0.0], step_s[:-1]))
    # A prompt alone may take longer than among others.
    busy = min(others_rate * (others @ prompt_s), share)
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
