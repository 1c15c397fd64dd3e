"""Twostroke's side of a comparison: a process that answers jobs (see pipe.py)."""

from __future__ import annotations

import argparse
import os
from typing import Any

import msgspec

from closed_loop import Loop
from ours import run_job, run_loop
from pipe import claim_output, serve
from quiet import descendants, held_bytes, process_s
from twostroke.core.config import (
    DEFAULT_ACTIVATION_BITS,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    ParallelOptions,
    SpeculationOptions,
)
from twostroke.engine.build import build
from twostroke.engine.gain import expect
from twostroke.engine.limits import machine
from twostroke.program import BatchShape


def main() -> None:
    """Load the model, then answer."""
    given, answers = _arguments(), claim_output()
    bits = given.activation_bits
    compute = ComputeOptions(given.backend, given.threads, given.level, activation_bits=bits)
    # Engines are compared at computing the same: guesses ahead have a benchmark of their own.
    options = EngineOptions(
        compute,
        CacheOptions(memory_bytes=given.kv_memory),
        speculation=SpeculationOptions("off"),
        parallel=msgspec.json.decode(given.parallel, type=ParallelOptions),
    )
    with build(given.model, options) as engine:
        client, facts = engine.client, engine.facts

        def run(prompts: list[list[int]], num_tokens: int, kept: int) -> dict[str, Any]:
            del kept  # the prefix cache finds by itself what it has seen before
            before, before_s = client.loop.snapshot().strokes, _processor_s()
            timing = run_job(client, prompts, num_tokens)
            strokes = client.loop.snapshot().strokes - before
            stroke = strokes.prefill if num_tokens == 1 else strokes.decode
            used = [after - began for began, after in zip(before_s, _processor_s(), strict=True)]
            return {
                **timing.as_json(),
                "bytes": stroke.bytes,
                "flops": stroke.flops,
                "collective_s": stroke.collective_s,
                "busy": [seconds / timing.wall_s for seconds in used],
            }

        def loop(prompts: list[list[int]], num_clients: int, num_tokens: int) -> dict[str, Any]:
            return run_loop(client, prompts, Loop(num_clients, num_tokens)).as_json()

        def limits() -> dict[str, Any]:
            at = machine(facts.level, facts.num_threads, facts.weight_bytes, again=True)
            return {"bandwidth": at.bandwidth, "peak": at.peak, "peak_kind": at.peak_kind}

        def expected(starts: list[int], counts: list[int]) -> dict[str, Any]:
            divided, machine = expect(engine), engine.limits.hardware()
            batch = BatchShape(tuple(starts), tuple(counts), len(starts))
            assert machine is not None
            steps = facts.steps_ahead + 1
            return {
                "ratio": divided.gain(batch, machine, steps),
                "collective_share": divided.collective_share(batch, steps),
                "step": msgspec.to_builtins(divided.step(batch)),
            }

        def memory() -> dict[str, Any]:
            return {
                "processes": [held_bytes(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
            }

        def about() -> dict[str, Any]:
            return {"version": f"on {facts.detail}", "facts": msgspec.to_builtins(facts)}

        serve({
            "about": about, "run": run, "loop": loop, "limits": limits, "expected": expected,
            "memory": memory, "forget": dict,
        }, answers)  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--level")
    parser.add_argument("--activation-bits", type=int, default=DEFAULT_ACTIVATION_BITS)
    parser.add_argument("--parallel", default="{}", help="fields of ParallelOptions, as JSON")
    parser.add_argument("--kv-memory", type=int, help="bytes")
    return parser.parse_args()


def _processor_s() -> list[float]:
    """Return the processor time of this process, and of each rank that it started."""
    return [process_s(pid) for pid in (os.getpid(), *descendants(os.getpid()))]


if __name__ == "__main__":
    main()
