"""Mean latencies under load: how many requests are in progress, and how long they wait.

The model is a queue whose service rate depends on the number of requests in progress, as in
processor sharing (Kleinrock, Queueing Systems II, 1976, section 4.4). Its means depend only on the
mean lengths of requests. Prompts wait for other prompts as in an M/D/1 queue.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.planner import largest_where

if TYPE_CHECKING:
    from twostroke.lab.planner.planner import Planner

SHARES: Final = (0.5, 0.7, 0.9)  # of the highest possible requests per second
_MAX_BUSY_SHARE: Final = 0.999
_MIN_THINK_S: Final = 1e-6
_NUM_GRID_POINTS: Final = 24  # numbers of streams to compute; others are interpolated


class LoadLatencies(Frozen):
    """Mean latencies of a replica at a load of `requests_per_s` that arrive at random times.

    Attributes:
        share: the load as a share of the highest possible load.
        requests_per_s: requests that arrive per second.
        at_work: mean number of requests in progress.
        ttft_s: time to first token, with waiting.
        tpot_s: time per output token, with the prefill of other requests.
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


def loads(planner: Planner, streams: int) -> tuple[LoadLatencies, ...]:
    """Return mean latencies at each of `SHARES` of the highest load on `streams` streams."""
    times = _times(planner, streams)
    return tuple(_random_arrivals(share, times) for share in SHARES)


def user_load(planner: Planner, streams: int) -> UserLoad | None:
    """Return the mean latencies and rates of the question's users, on as few replicas as suffice.

    Returns None if the question names no users. A replica computes at most `streams` requests at
    once. Replicas suffice if they meet the latency objectives. If there is no objective for the
    first token, they suffice if requests on average do not wait for a free stream. If no number of
    replicas suffices, the result is the load on one replica.
    """
    question = planner.question
    num_users = question.users
    if num_users is None:
        return None
    times = _times(planner, streams)

    def meets_objectives(num_replicas: int) -> bool:
        num_sharing = ceil(num_users / num_replicas)
        load = _waiting_users(times, num_sharing, question.think_s)
        if question.ttft_s is None:  # the users who do not think wait for an answer
            is_soon = num_sharing - load.requests_per_s * question.think_s <= streams
        else:
            is_soon = load.ttft_s <= question.ttft_s
        return is_soon and (question.tpot_s is None or load.tpot_s <= question.tpot_s)

    is_possible = meets_objectives(num_users)  # with a replica for each user
    num_replicas = 1 + largest_where(lambda count: not meets_objectives(count), num_users)
    num_replicas = num_replicas if is_possible else 1
    users_per_replica = ceil(num_users / num_replicas)
    load = _waiting_users(times, users_per_replica, question.think_s)
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


def _times(planner: Planner, streams: int) -> _TimesByRunning:
    """Return a replica's times with 1 to `streams` requests in progress.

    They are planned for some numbers of requests, and interpolated between these.
    """
    grid = np.unique(np.geomspace(1, streams, _NUM_GRID_POINTS).round().astype(int))
    counts = np.arange(1, streams + 1)

    def interpolate(times_s: list[float]) -> np.ndarray:
        return np.exp(np.interp(np.log(counts), np.log(grid), np.log(times_s)))

    return _TimesByRunning(
        planner.question.output,
        interpolate([max(planner.prompt_s(int(n)), 1e-12) for n in grid]),
        step_s=interpolate([planner.step_s(int(n)) for n in grid]),
        num_chunks=np.array([planner.num_chunks(int(n)) for n in counts]),
    )


class _TimesByRunning(Frozen):
    """A replica's step and prompt times with 1, 2, ... requests in progress.

    Each array is (streams,). `prompt_s` is the time that a prompt adds, `num_chunks` the number of
    steps that prefill it.
    """

    num_output: int
    prompt_s: np.ndarray
    step_s: np.ndarray
    num_chunks: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """The numbers of requests in progress to which the times belong: 1, 2, ..."""
        return np.arange(1, len(self.step_s) + 1)

    @property
    def rates(self) -> np.ndarray:
        """Completed requests per second with 1, 2, ... requests in progress."""
        rates: np.ndarray = 1 / (self.prompt_s + self.num_output * self.step_s / self.counts)
        return rates


def _random_arrivals(share: float, times: _TimesByRunning) -> LoadLatencies:
    """Return mean latencies if requests arrive at random times.

    `share` is the load as a share of the highest possible requests per second.
    """
    counts, rates = times.counts, times.rates
    rate = share * rates[-1]
    # Relative probabilities of 0, 1, ... requests in progress, and of a waiting request.
    logs = np.concatenate(([0.0], np.cumsum(np.log(rate / rates))))
    probabilities = np.exp(logs - logs.max())
    waiting = share / (1 - share) * probabilities[-1]
    total = probabilities.sum() + waiting
    slot_s = waiting / (1 - share) / total / rate / 2  # half, as lengths are equal
    at_work = (probabilities[1:] @ counts + waiting * counts[-1]) / total
    # Probabilities that a new request meets 0, 1, ... others, and the time of their step.
    others = probabilities[:-1] / total
    others[-1] += (probabilities[-1] + waiting) / total
    return _mean_latencies(
        share, rate, others, times=times, at_work=at_work, slot_s=slot_s, others_rate=rate
    )


def _waiting_users(times: _TimesByRunning, num_users: int, think_s: float) -> LoadLatencies:
    """Return mean latencies of a replica for users who think for `think_s` after each answer.

    The number of requests is a birth-death process: each idle user sends a request with the rate 1
    / `think_s`. A new request sees as many other requests as a system without its user has on
    average (Lavenberg and Reiser, 1980).
    """
    probabilities = _waiting_probabilities(times, num_users, think_s)
    num_slots = len(times.rates)
    numbers = np.arange(num_users + 1)
    at_work = np.minimum(numbers, num_slots)
    rate = float(probabilities[1:] @ times.rates[at_work[1:] - 1])
    num_waiting = float(probabilities @ (numbers - at_work))
    others = np.zeros(num_slots)
    met_probabilities = _waiting_probabilities(times, num_users - 1, think_s)
    np.add.at(others, np.minimum(np.arange(num_users), num_slots - 1), met_probabilities)
    share = min(rate / times.rates[-1], _MAX_BUSY_SHARE)
    slot_s = num_waiting / rate
    return _mean_latencies(
        share,
        rate,
        others,
        times=times,
        at_work=float(probabilities @ at_work),
        slot_s=slot_s,
        others_rate=rate * (num_users - 1) / num_users,
    )


def _waiting_probabilities(times: _TimesByRunning, num_users: int, think_s: float) -> np.ndarray:
    """Return the probability that 0, 1, ... of the users wait for an answer: (num_users + 1,)."""
    numbers = np.arange(1, num_users + 1)
    rates = times.rates[np.minimum(numbers, len(times.rates)) - 1]
    arrivals = (num_users - numbers + 1) / max(think_s, _MIN_THINK_S)
    logs = np.concatenate(([0.0], np.cumsum(np.log(arrivals / rates))))
    probabilities: np.ndarray = np.exp(logs - logs.max())
    probabilities /= probabilities.sum()
    return probabilities


def _mean_latencies(
    share: float,
    rate: float,
    others: np.ndarray,
    *,
    times: _TimesByRunning,
    at_work: float,
    slot_s: float,
    others_rate: float,
) -> LoadLatencies:
    """Return mean latencies of requests that meet other requests on their replica.

    Args:
        share: the load as a share of the highest possible load.
        rate: requests that arrive per second.
        others: (streams,); `others[n]` is the probability to meet n other requests.
        times: the replica's times by number of requests in progress.
        at_work: mean number of requests in progress.
        slot_s: seconds that a request waits because the maximum number of requests runs.
        others_rate: prompts of other requests, for which a request waits, per second.
    """
    num_output, prompt_s, step_s = times.num_output, times.prompt_s, times.step_s
    others_s = np.concatenate(([0.0], step_s[:-1]))
    # A prompt alone may take longer than a prompt that shares steps.
    busy = min(others_rate * (others @ prompt_s), share)
    prefill_s = others @ (prompt_s + times.num_chunks * others_s)
    ttft_s = prefill_s * (1 + busy / (2 - 2 * busy)) + others @ others_s / 2
    # The rates count one step for the first token. A request that runs alone has no such step, and
    # a chunked prompt has a step for each further chunk.
    extra_s = others @ ((times.num_chunks - 1) * others_s) - others[0] * step_s[0]
    system_s = at_work / rate + extra_s
    mean_index = max(0, round(float(at_work)) - 1)
    tpot_s = max((system_s - ttft_s) / max(num_output - 1, 1), step_s[mean_index])
    return LoadLatencies(
        share,
        requests_per_s=float(rate),
        at_work=float(rate * system_s),
        ttft_s=float(slot_s + ttft_s),
        tpot_s=float(tpot_s),
    )
