"""A closed loop of clients: each sends its next request when its last one is answered.

Used by the benchmarks of servers, and of an engine in this process. Only the standard library is
imported.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Ask = Callable[[Sequence[int]], AsyncIterator[int]]  # a prompt's answer: tokens at each arrival


@dataclass(frozen=True, slots=True)
class Loop:
    """So many clients at once, and the tokens of each answer."""

    num_clients: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a closed loop saw from outside, each client's first request left out: the ramp.

    `tokens_per_s` counts by time stamp from the last client's first answer to the first client's
    last one, so every client is at work in it. `gaps_s` are the times between arrivals within an
    answer, pooled (ITL); `client_s` is the processor time of the one who asked.
    """

    tokens_per_s: float
    ttfts_s: list[float]
    gaps_s: list[float]
    client_s: float
    wall_s: float
    num_requests: int

    def as_json(self) -> dict[str, Any]:
        """Return the rate, and percentiles of the times in seconds."""
        gaps, ttfts = (
            statistics.quantiles(times_s, n=100, method="inclusive")
            for times_s in (self.gaps_s, self.ttfts_s)
        )
        times = {
            "ttft_p50_s": ttfts[49], "ttft_p95_s": ttfts[94], "ttft_p99_s": ttfts[98],
            "itl_p50_s": gaps[49], "itl_p95_s": gaps[94], "itl_max_s": max(self.gaps_s),
        }  # fmt: skip
        counts = {name: getattr(self, name) for name in ("client_s", "wall_s", "num_requests")}
        return {"tokens_per_s": self.tokens_per_s, **times, **counts}


@dataclass(slots=True)
class _Answer:
    """One request: when it was sent, and when how many of its tokens came."""

    sent_s: float
    stamps: list[tuple[float, float]]

    @property
    def ended_s(self) -> float:
        return self.stamps[-1][0]


async def run(ask: Ask, prompts: Sequence[Sequence[int]], loop: Loop) -> LoadResult:
    """Let the clients share the prompts out among themselves, and ask.

    Raises:
        ValueError: there are fewer than two prompts for each client.
    """
    if len(prompts) < 2 * loop.num_clients:
        message = f"{loop.num_clients} clients need two prompts each or more, not {len(prompts)}"
        raise ValueError(message)
    start_s, began_cpu = time.monotonic(), time.process_time()
    shares = [prompts[client :: loop.num_clients] for client in range(loop.num_clients)]
    clients = await asyncio.gather(*(_client(ask, share, loop.num_tokens) for share in shares))
    end_s, ended_cpu = time.monotonic(), time.process_time()
    window = max(client[0].ended_s for client in clients), min(c[-1].ended_s for c in clients)
    counted_answers = [answer for client in clients for answer in client[1:]]
    stamps = [stamp for client in clients for answer in client for stamp in answer.stamps]
    tokens = sum(count for at, count in stamps if window[0] < at <= window[1])
    return LoadResult(
        tokens_per_s=tokens / (window[1] - window[0]),
        ttfts_s=[answer.stamps[0][0] - answer.sent_s for answer in counted_answers],
        gaps_s=[
            later[0] - earlier[0]
            for answer in counted_answers
            for earlier, later in pairwise(answer.stamps)
        ],
        client_s=ended_cpu - began_cpu,
        wall_s=end_s - start_s,
        num_requests=len(counted_answers),
    )


async def _client(ask: Ask, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[_Answer]:
    answers = []
    for prompt in prompts:
        answer = _Answer(time.monotonic(), [])
        async for count in ask(prompt):
            answer.stamps.append((time.monotonic(), float(count)))
        if not answer.stamps:
            raise ValueError("an answer came without a token")
        # A server's chunks are texts: its tokens are spread over them evenly.
        each = num_tokens / sum(count for _, count in answer.stamps)
        answer.stamps = [(at, count * each) for at, count in answer.stamps]
        answers.append(answer)
    return answers
