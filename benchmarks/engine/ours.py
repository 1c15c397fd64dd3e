"""Run jobs on a Twostroke engine as a client, and measure their times from outside."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.common import closed_loop
from benchmarks.common.workload import Timing
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.common.workload import Stamps
    from twostroke.engine.client import Client


def run_job(client: Client, prompts: Sequence[list[int]], num_tokens: int) -> Timing:
    """Answer all prompts together: greedy, `num_tokens` each, the end ignored."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return asyncio.run(_run(client, prompts, params))


def run_loop(
    client: Client, prompts: Sequence[list[int]], loop: closed_loop.Loop
) -> closed_loop.LoadResult:
    """Answer prompts for a closed loop of clients in this process, without a server."""
    params = SamplingParams(max_tokens=loop.num_tokens, temperature=0.0, ignore_eos=True)

    async def call(prompt: Sequence[int]) -> AsyncIterator[int]:
        async for output in client.generate_many_async([prompt], params):
            yield len(output.token_ids)

    return asyncio.run(closed_loop.run(call, prompts, loop))


async def _run(client: Client, prompts: Sequence[list[int]], params: SamplingParams) -> Timing:
    start_s = time.monotonic()
    stamps: list[Stamps] = [[] for _ in prompts]
    first_tokens = [0] * len(prompts)
    async for output in client.generate_many_async(prompts, params):
        if not stamps[output.index]:
            first_tokens[output.index] = output.token_ids[0]
        stamps[output.index].append((time.monotonic(), len(output.token_ids)))
    return Timing.of_stamps([*prompts], start_s, stamps, first_tokens)
