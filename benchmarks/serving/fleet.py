"""Simulate a fleet's prefix cache hits and times to first token on published traces.

Run it with `make bench WHAT=fleet`.

Both Mooncake traces are simulated on 8 and 64 replicas of an 8B model on an H100, at 80% of
their capacity, with each routing policy. For comparison, one cache with the pages of all
replicas is simulated. Options choose runs; results of earlier runs stay in the tables. Then a
scaled trace is sent through a real router to two real servers, whose hit rate is compared with
the simulated one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import RESULTS, caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import Server, our_command
from benchmarks.serving.router import Stream, send_request
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.fleet.routing.policy import COMPUTE_WEIGHT, POLICIES, prefix
from twostroke.lab.planner import find_device, load_planned_model, this_machine
from twostroke.lab.planner.question import Question
from twostroke.lab.simulator import SimulationSetup, Workload, read_trace, simulate

Job = tuple[str, int, str, int, float]  # a trace, replicas, a policy, requests, the weight

if TYPE_CHECKING:
    Rows = list[tuple[Any, ...]]

    from twostroke.lab.planner import PlannedModel

# The shape of Llama 3.1 8B (https://huggingface.co/meta-llama/Llama-3.1-8B, read on 2026-11-26).
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
_CONTEXT, _PAGE, _BLOCK = 131072, 64, 512
_ONE_CACHE = "one cache"
_RUNS, _SIZES = (_ONE_CACHE, *POLICIES), (8, 64)
_PATH = RESULTS / "fleet.json"
_read = cache(read_trace)
_POINTS = {"simulated": 0.02, "real": 0.03}
# How much faster requests come than in the trace, for each replica: 80% of what replicas can do.
_SPEED = {"mooncake-conversation": 0.36, "mooncake-synthetic": 0.3}
# Of the trace that is replayed: its lengths, the bytes of a real replica's pages, its longest text.
_REAL, _SCALE, _REAL_KV, _REAL_CONTEXT = "mooncake-synthetic", 0.02, 64 << 20, 2560


def _fitting(load: Workload, context: int) -> Workload:
    """Return a load without the requests that no context holds."""
    fitting = [
        arrival for arrival in load.arrivals if arrival.num_prompt + arrival.num_output <= context
    ]
    return Workload(load.name, tuple(fitting))


def big_model() -> PlannedModel:
    """Return the simulated model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(_SHAPE))
        return load_planned_model(str(path))


def one_cache(load: Workload, num_tokens: int, block: int) -> float:
    """Return the hit rate of one cache of so many tokens, the blocks used longest ago evicted."""
    cached: OrderedDict[int, None] = OrderedDict()
    num_hit = num_prompt = 0
    for arrival in load.arrivals:
        num_known = 0
        while num_known < len(arrival.blocks) and arrival.blocks[num_known] in cached:
            num_known += 1
        num_hit += min(num_known * block, arrival.num_prompt - 1)
        num_prompt += arrival.num_prompt
        for id_ in reversed(arrival.blocks):  # so that the last block is evicted first
            cached[id_] = None
            cached.move_to_end(id_)
        while len(cached) > num_tokens // block:
            cached.popitem(last=False)
    return num_hit / num_prompt


def simulated(job: Job) -> dict[str, Any]:
    """Return what becomes of a trace before so many replicas, by a policy."""
    trace, replicas, policy, count, weight = job
    POLICIES["prefix"] = partial(prefix, compute_weight=weight)
    setup = SimulationSetup(
        big_model(),
        find_device("H100-SXM"),
        Question(mfu=0.5, mbu=0.8),
        CacheOptions(page_size=_PAGE, context_length=_CONTEXT),
        BatchOptions(token_budget=2048, max_running=256, max_waiting_requests=1_000_000,
                     max_waiting_tokens=1 << 40),
        replicas=replicas,
        routing="prefix" if policy == _ONE_CACHE else policy,
    )  # fmt: skip
    load = _fitting(_read(trace).first(count), _CONTEXT).changed(speed=_SPEED[trace] * replicas)
    began_s = time.process_time()
    if policy == _ONE_CACHE:
        hit = one_cache(load, setup.size().num_pages * replicas * _PAGE, _BLOCK)
        return {"hit": hit, "took_s": time.process_time() - began_s}
    result = simulate(setup, load)
    ttfts = [log.timings.first_token_s - log.sent_s for log in result.logs]
    return {
        "hit": result.report.hit_rate,
        "ttft_s": mean(ttfts),
        "busy": mean(result.busy),
        "took_s": time.process_time() - began_s,
    }


def real(args: argparse.Namespace) -> dict[str, float]:
    """Return the hit rates of two real servers behind a router, and of the same simulated."""
    load = read_trace(_REAL).first(args.real_requests)
    load = load.changed(speed=load.arrivals[-1].at_s / args.real_s, scale=_SCALE)
    load = _fitting(load, _REAL_CONTEXT)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sizes = ("--kv-memory", str(_REAL_KV), "--context-length", str(_REAL_CONTEXT))
        command = (*our_command(args.model, 1), *sizes)
        ports = [Server(f"replica {n}", command, folder, stack).port for n in (1, 2)]
        named = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        code = "from twostroke.cli import main; main()"
        route = (sys.executable, "-c", code, "route", "--no-access-log", *named)
        port = Server("router", route, folder, stack).port
        note(f"Sending {len(load.arrivals)} requests within {args.real_s} s")
        streams = asyncio.run(
            _replay(load, port, load_planned_model(args.model).program.vocab_size)
        )
        time.sleep(1.5)  # until the router has asked its replicas again
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=10) as answer:
            rows = json.load(answer)["replicas"]
    hit = sum(r["cached_tokens"] for r in rows) / sum(r["prompt_tokens"] for r in rows)
    setup = SimulationSetup(
        load_planned_model(args.model),
        this_machine(),
        Question(),
        CacheOptions(memory_bytes=_REAL_KV, context_length=_REAL_CONTEXT),
        replicas=2,
        routing="prefix",
        is_here=True,
    )
    repeated, size = simulate(setup, load), setup.size()
    return {
        "hit": hit,
        "simulated": repeated.report.hit_rate,
        "requests": len(streams),
        "ttft_s": mean(stream.ttft_s for stream in streams),
        _ONE_CACHE: one_cache(
            load, 2 * size.num_pages * size.page_size, load.arrivals[0].block_size
        ),
    }


async def _replay(load: Workload, port: int, vocab_size: int) -> list[Stream]:
    """Send each request when it is due."""
    began_s = time.monotonic() - load.arrivals[0].at_s

    async def send_arrival(number: int) -> Stream:
        arrival = load.arrivals[number]
        tokens = arrival.tokens(number, vocab_size - 100).tolist()
        await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
        return await send_request(port, {"prompt": tokens, "max_tokens": arrival.num_output})

    return await asyncio.gather(*[send_arrival(number) for number in range(len(load.arrivals))])


def simulate_all(jobs: list[Job], kept_runs: dict[str, Any], args: argparse.Namespace) -> None:
    """Simulate, several at once, and keep each outcome as soon as it is there."""
    with ProcessPoolExecutor(args.processes) as pool:
        runs = {pool.submit(simulated, job): job for job in jobs}
        for number, run in enumerate(as_completed(runs), 1):
            job, got = runs[run], run.result()
            kept_runs[str(job)] = got
            _PATH.parent.mkdir(exist_ok=True)
            _PATH.write_text(json.dumps({"runs": kept_runs}))
            text = f"{number} of {len(jobs)}: {job[0]}, {job[1]} replicas, {job[2]}: {_cell(got)}"
            note(f"{text}, simulated in {got['took_s']:.0f} s")


def compared(runs: dict[str, Any], args: argparse.Namespace) -> tuple[Rows, Rows]:
    """Return what was asked beside what was reached, and the figures of each policy.

    Runs that were not made, now or before, are left out.
    """
    asked_rows: Rows = []
    all_: Rows = []
    for trace, replicas in product(_SPEED, _SIZES):
        jobs = {run: (trace, replicas, run, args.requests, args.weight) for run in _RUNS}
        results = {
            policy_name: runs[str(job)] for policy_name, job in jobs.items() if str(job) in runs
        }
        if not results:
            continue
        name = f"{trace.removeprefix('mooncake-')}, {replicas} replicas"
        if {_ONE_CACHE, "prefix"} <= results.keys():
            min_hit, hit = (
                results[_ONE_CACHE]["hit"] - _POINTS["simulated"],
                results["prefix"]["hit"],
            )
            asked_rows.append((f"{name}: hit rate", min_hit, hit, _share, "at least"))
        if {*POLICIES} <= results.keys():
            others_s = min(results[policy]["ttft_s"] for policy in POLICIES if policy != "prefix")
            mean_s = results["prefix"]["ttft_s"]
            asked_rows.append((f"{name}: mean TTFT", others_s, mean_s, _seconds, "below"))
        all_.append((name, *[_cell(results[run]) if run in results else "" for run in _RUNS]))
    return asked_rows, all_


def main() -> int:
    """Simulate, measure, print and keep; return 1 if a limit is missed."""
    args = _arguments()
    asked_rows: Rows = []
    texts, facts = list[str](), machine_facts()
    kept_runs: dict[str, Any] = json.loads(_PATH.read_text())["runs"] if _PATH.exists() else {}
    if "simulated" in args.parts:
        chosen_jobs = product(args.traces, args.replicas, args.policies)
        jobs = [(*job_parts, args.requests, args.weight) for job_parts in chosen_jobs]
        note(f"Simulating {len(jobs)} runs")
        simulate_all(jobs, kept_runs, args)
        asked_rows, rows = compared(kept_runs, args)
        texts.append(table(("hit rate, mean TTFT", *_RUNS), rows))
    if "real" in args.parts:
        kept_runs["real"] = got = real(args)
        for sign, words in ((-1, "at least"), (1, "at most")):
            limit = got["simulated"] + sign * _POINTS["real"]
            asked_rows.append(("two servers: hit rate", limit, got["hit"], _share, words))
        texts.append(
            f"Two servers: {got['requests']} requests of {_REAL}, lengths x {_SCALE}; simulated "
            f"{_share(got['simulated'])}, one cache {_share(got[_ONE_CACHE])}, mean TTFT "
            f"{_seconds(got['ttft_s'])}."
        )
    lines = [(name, f"{words} {form(limit)}", form(value))
             for name, limit, value, form, words in asked_rows]  # fmt: skip
    is_met = all(
        value >= limit if words == "at least" else value <= limit
        for _, limit, value, _, words in asked_rows
    )
    under = caption(facts, f"the first {args.requests} requests of each trace")
    text = "\n\n".join([table(("figure", "asked", "reached"), lines), *texts, under])
    save("fleet", {"facts": facts, "runs": kept_runs}, text)
    return 0 if is_met else 1


def _cell(got: dict[str, Any]) -> str:
    return _share(got["hit"]) + (f", {_seconds(got['ttft_s'])}" if "ttft_s" in got else "")


def _share(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=positive, default=4000)
    parser.add_argument("--traces", nargs="+", choices=_SPEED, default=tuple(_SPEED))
    parser.add_argument("--replicas", type=int, nargs="+", choices=_SIZES, default=_SIZES)
    parser.add_argument("--policies", nargs="+", choices=_RUNS, default=_RUNS)
    parser.add_argument(
        "--weight", type=float, default=COMPUTE_WEIGHT, help="of computing beside waiting"
    )
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--real-requests", type=positive, default=300)
    parser.add_argument("--real-s", type=positive, default=140)
    parts = ("simulated", "real")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
