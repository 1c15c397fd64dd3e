"""Measure each batching policy on the same trace of arrivals. Used by `make bench`."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.options import (
    POLICIES,
    BatchOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import SamplingParams
from twostroke.engine.engine import build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.common.texts import FreshPrompts
    from twostroke.engine.client import Client

_PROMPT_LENGTHS = (32, 256)
_ANSWER_LENGTHS = (16, 96)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the trace; `at_s` counts from its beginning."""

    at_s: float
    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """How a policy served a trace.

    Times to first token count from the scheduled arrival; `tokens_per_s` are those written from
    the first arrival to the last token.
    """

    policy: str
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_max_s: float
    tokens_per_s: float
    lateness_s: float  # the latest that a request was sent, after it was due
    answers: list[tuple[int, ...]]


def poisson_trace(
    prompts: FreshPrompts, count: int, tokens_per_s: float, seed: int
) -> list[Arrival]:
    """Return `count` random arrivals that ask for `tokens_per_s` on average."""
    rng = random.Random(seed)
    rate = tokens_per_s / statistics.mean(_ANSWER_LENGTHS)
    arrivals, at_s = [], 0.0
    for _ in range(count):
        prompt = prompts.take(rng.randint(*_PROMPT_LENGTHS))
        arrivals.append(Arrival(at_s, prompt, rng.randint(*_ANSWER_LENGTHS)))
        at_s += rng.expovariate(rate)
    return arrivals


def compare_policies(
    model: str, compute: ComputeOptions, trace: list[Arrival], batch_size: int
) -> list[PolicyResult]:
    """Replay a trace under each policy, on engines that differ in nothing else."""
    results = []
    for policy in POLICIES:
        batch = BatchOptions(policy=policy, batch_size=batch_size)
        with build(
            model, EngineOptions(compute, batch=batch, speculation=SpeculationOptions("off"))
        ) as engine:
            results.append(_replay(engine.client, policy, trace))
    return results


def _replay(client: Client, policy: str, trace: Sequence[Arrival]) -> PolicyResult:
    warm_up = client.generate(trace[0].prompt[::-1], SamplingParams(max_tokens=8))
    client.loop.flush()
    warm_up.wait()
    start_s = time.monotonic()
    generations, lateness = [], 0.0
    for arrival in trace:
        time.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
        lateness = max(lateness, time.monotonic() - start_s - arrival.at_s)
        params = SamplingParams(max_tokens=arrival.num_tokens, temperature=0.0, ignore_eos=True)
        generations.append(client.generate(arrival.prompt, params))
    client.loop.flush()
    answers = [generation.wait()[0] for generation in generations]
    ttfts = sorted(
        answer.timings.first_token_s - start_s - arrival.at_s
        for answer, arrival in zip(answers, trace, strict=True)
    )
    end_s = max(answer.timings.last_token_s for answer in answers)
    return PolicyResult(
        policy=policy,
        ttft_p50_s=statistics.median(ttfts),
        ttft_p95_s=statistics.quantiles(ttfts, n=20, method="inclusive")[-1],
        ttft_max_s=ttfts[-1],
        tokens_per_s=sum(arrival.num_tokens for arrival in trace) / (end_s - start_s),
        lateness_s=lateness,
        answers=[answer.token_ids for answer in answers],
    )
