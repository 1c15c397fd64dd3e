"""Ranks are killed or frozen under load: streams continue, with the same tokens, and nothing stays.

Eight streams run all the time. At random times while all ranks serve, one other than 0 gets SIGKILL
or SIGSTOP. It counts as detected when it is gone and somebody waited for it, or another process
takes its place; streams continue with the next token after all ranks are ready again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

from jobs import make_job
from meshes import MESHES, cache_bytes, crowded, page_size, plain
from msgspec.structs import replace
from processes import Traces, exists, ranks

from twostroke import LLM
from twostroke.core.errors import TwostrokeError
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from jobs import Job

    from twostroke.engine.client import Client

USUAL = ("tensor-2", "tensor-4", "pipeline-2", "context-2")
_STREAMS = 8
_QUIET_S = (0.2, 1.5)  # between two faults
_DETECTED_S = 1.0
_CONTINUED_S = 5.0  # beside the time that loading takes
_GIVE_UP_S = 60.0
_LOOK_S = 0.005


@dataclass
class Seen:
    """What happened in one mesh: seconds until faults were seen, and until tokens came again."""

    detected_s: list[float] = field(default_factory=list)
    continued_s: list[float] = field(default_factory=list)
    answers: int = 0
    differing: int = 0
    last_token_s: float = 0.0
    is_over: bool = False


def run(name: str, path: str, args: argparse.Namespace) -> list[str]:
    """Do it for each mesh, print how it went, and return what was wrong."""
    with LLM(path, plain(args.context, "f16")) as llm:
        job = make_job(llm, args.prompts, args.prompt_tokens, args.tokens, args.seed, (None,))
        job.params[:] = [replace(params, n=1) for params in job.params]
        expected = [
            completions[0].token_ids for completions in llm.generate(job.prompts, job.params)
        ]
        cost = llm.engine.card.cost
        windows = llm.engine.facts.windows
    failures = []
    for mesh in args.meshes:
        traces, start_s = Traces(), time.monotonic()
        groups = PageGroups(page_size(MESHES[mesh]), windows)
        memory = cache_bytes(MESHES[mesh], cost, _STREAMS * groups.num_needed(args.context))
        sizes = {"memory_bytes": memory, "token_budget": 64, "drafts": 4}
        with LLM(path, crowded(MESHES[mesh], args.context, "f16", **sizes)) as llm:
            load_s = time.monotonic() - start_s
            number = -(-args.kills // len(args.meshes))
            try:
                seen = asyncio.run(_load(llm.engine.client, job, expected, number, args.seed))
            except TwostrokeError as error:
                failures.append(f"{name}, {mesh}: {error}")
                continue
        failures += _judge(f"{name}, {mesh}", seen, load_s, traces.left())
    return failures


def _judge(where: str, seen: Seen, load_s: float, left: list[str]) -> list[str]:
    within_s = _CONTINUED_S + load_s
    print(
        f"{where}: {len(seen.continued_s)} faults; detected after {_spread(seen.detected_s)}, "
        f"streams continued after {_spread(seen.continued_s)} (loading takes {load_s:.1f} s); "
        f"{seen.differing} of {seen.answers} answers differ; left: {', '.join(left) or 'nothing'}",
        flush=True,
    )
    results = {
        "answers differ": seen.differing > 0,
        f"not detected within {_DETECTED_S} s": max(seen.detected_s) > _DETECTED_S,
        f"no token within {within_s:.1f} s": max(seen.continued_s) > within_s,
        f"left {', '.join(left)}": bool(left),
    }
    return [f"{where}: {problem}" for problem, is_so in results.items() if is_so]


async def _load(
    client: Client, job: Job, expected: list[tuple[int, ...]], number: int, seed: int
) -> Seen:
    """Answer prompts until there were `number` faults, and compare all answers."""
    seen, indices = Seen(), count()
    streams = [
        asyncio.create_task(_stream(client, job, expected, indices, seen)) for _ in range(_STREAMS)
    ]
    rng = random.Random(seed)
    for _ in range(number):
        await asyncio.sleep(rng.uniform(*_QUIET_S))
        await _fault(client, rng, seen)
    seen.is_over = True
    await asyncio.gather(*streams)
    return seen


async def _stream(
    client: Client, job: Job, expected: list[tuple[int, ...]], indices: Iterator[int], seen: Seen
) -> None:
    """Answer one prompt after the other."""
    while not seen.is_over:
        index = next(indices) % len(expected)
        tokens: list[int] = []
        async for output in client.generate_many_async([job.prompts[index]], job.params[index]):
            tokens += output.token_ids
            seen.last_token_s = time.monotonic()
        seen.answers += 1
        if list(tokens) != list(expected[index]):
            seen.differing += 1
            print(f"  prompt {index}: {expected[index]} became {tokens}", flush=True)


async def _fault(client: Client, rng: random.Random, seen: Seen) -> None:
    """Kill or freeze a rank; wait until it is replaced and a token comes."""
    before = ranks()
    if not before:
        raise TwostrokeError("There is no rank left: the engine has stopped.")
    victim = rng.choice(before)
    began_s = time.monotonic()
    os.kill(victim, rng.choice((signal.SIGKILL, signal.SIGSTOP)))
    await _until(lambda: not exists(victim) or bool({*ranks()} - {*before}))
    detected_s = time.monotonic()
    # A stage may still finish steps without the lost one.
    await _until(lambda: all(rank.state == "ready" for rank in client.loop.ranks()))
    ready_s = time.monotonic()
    await _until(lambda: seen.last_token_s > ready_s)
    seen.detected_s.append(detected_s - began_s)
    seen.continued_s.append(seen.last_token_s - began_s)


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait, but not for ever."""
    deadline = time.monotonic() + _GIVE_UP_S
    while not is_so() and time.monotonic() < deadline:  # noqa: ASYNC110 no event tells of processes
        await asyncio.sleep(_LOOK_S)


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} s (at most {max(values):.2f} s)"
