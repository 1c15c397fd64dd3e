"""Twostroke's side of a comparison: a process that runs jobs (see pipe.py)."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from benchmarks.common.closed_loop import Loop
from benchmarks.common.pipe import claim_output, serve
from benchmarks.common.quiet import descendants, held_bytes, process_s
from benchmarks.engine.ours import run_job, run_loop
from twostroke.backends.machine_limits import machine
from twostroke.backends.parallel.backend import ParallelBackend
from twostroke.backends.parallel.predicted_speed import divide, measure_link
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.options import (
    AUTO_BITS,
    DEFAULT_ACTIVATION_BITS,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.engine.engine import build
from twostroke.lab.measure.rank_profile import with_measured_speed
from twostroke.lab.measure.single_step import StepShape
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from twostroke.backends.parallel.rank_messages import RankTimes
    from twostroke.engine.engine import Engine

_NOISE_S = 1.0  # for which the noise of the machine is measured


def main() -> None:
    """Load the model, then answer."""
    args, answers = _arguments(), claim_output()
    bits = args.activation_bits
    bits = bits if bits == AUTO_BITS else int(bits)
    compute = ComputeOptions(args.backend, args.threads, args.level, activation_bits=bits)
    # Engines are compared at computing the same: speculation has its own benchmark.
    options = EngineOptions(
        compute,
        CacheOptions(memory_bytes=args.kv_memory),
        speculation=SpeculationOptions("off"),
        parallel=msgspec.json.decode(args.parallel, type=ParallelOptions),
        accept_quality=True,  # random weights are as fast
    )
    with build(args.model, options) as engine:
        client, facts = engine.client, engine.facts

        def rank_times() -> list[RankTimes]:
            backend = client.loop.backend  # at rest
            return backend.times() if isinstance(backend, ParallelBackend) else []

        def run(prompts: list[list[int]], num_tokens: int, num_kept: int) -> dict[str, Any]:
            del num_kept  # the prefix cache finds by itself what it has seen before
            rank_times()
            before, before_s = client.loop.snapshot().phases, _processor_s()
            timing = run_job(client, prompts, num_tokens)
            strokes = client.loop.snapshot().phases - before
            stroke = strokes.prefill if num_tokens == 1 else strokes.decode
            used = [
                after - start_s for start_s, after in zip(before_s, _processor_s(), strict=True)
            ]
            return {
                **timing.as_json(),
                "bytes": stroke.bytes,
                "flops": stroke.flops,
                "collective_s": stroke.collective_s,
                "waiting": [r.decode_waiting_s / r.decode_s for r in rank_times() if r.decode_s],
                "busy": [seconds / timing.wall_s for seconds in used],
            }

        def loop(prompts: list[list[int]], num_clients: int, num_tokens: int) -> dict[str, Any]:
            return run_loop(client, prompts, Loop(num_clients, num_tokens)).as_json()

        def limits() -> dict[str, Any]:
            at = machine(facts.level, facts.num_threads, facts.weight_bytes, remeasure=True)
            return {"bandwidth": at.bandwidth, "peak": at.peak, "peak_kind": at.peak_kind}

        def memory() -> dict[str, Any]:
            return {
                "processes": [held_bytes(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
            }

        def about() -> dict[str, Any]:
            return {"version": f"on {facts.detail}", "facts": msgspec.to_builtins(facts)}

        serve({
            "about": about, "run": run, "loop": loop, "limits": limits, "memory": memory,
            "expected": partial(_expected, engine), "forget": dict,
        }, answers)  # fmt: skip


def _expected(engine: Engine, starts: list[int], counts: list[int]) -> dict[str, Any]:
    """Predict a step of divided ranks; from then on the prefix cache is wrong for its prompts."""
    batch, limits = BatchShape(tuple(starts), tuple(counts), len(starts)), engine.limits.hardware()
    backend, facts = engine.client.loop.backend, engine.facts
    assert limits is not None
    assert isinstance(backend, ParallelBackend)
    link = measure_link(backend, _NOISE_S)
    divided = divide(engine.card.cost, engine.mesh, limits, facts.ranks, link)
    is_prompt = counts[0] > 1
    shape = StepShape.prefill(counts[0]) if is_prompt else StepShape.decode(len(starts), starts[0])
    divided = with_measured_speed(divided, backend, engine.mesh, shape)
    steps = facts.steps_ahead + 1
    shares = divided.collective_shares(batch, steps)
    return {
        "ratio": divided.gain(batch, limits, steps),
        "collective_share": shares.waiting + shares.moving,
        "waiting_share": shares.waiting,
        "moving_share": shares.moving,
        "step": msgspec.to_builtins(divided.step(batch)),
        "link": msgspec.to_builtins(replace(link, bandwidth=min(link.bandwidth, 1e12))),
        "rates": msgspec.to_builtins(divided.rates),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--level")
    parser.add_argument("--activation-bits", default=DEFAULT_ACTIVATION_BITS)
    parser.add_argument("--parallel", default="{}", help="fields of ParallelOptions, as JSON")
    parser.add_argument("--kv-memory", type=int, help="bytes")
    return parser.parse_args()


def _processor_s() -> list[float]:
    """Return the processor time of this process, and of each rank that it started."""
    return [process_s(pid) for pid in (os.getpid(), *descendants(os.getpid()))]


if __name__ == "__main__":
    main()
