"""Measure Twostroke on this machine; each figure is shown beside the machine's limit.

Run it with `make bench`. Rounds go through all rows in turn, so that a slow minute does not
affect only one row.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.common.footprint import OFTEN_S, build_s, generate_command, installed_size, live
from benchmarks.common.quiet import MAX_SHARE, Watch
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from benchmarks.common.workload import PROMPT_LENGTH, WORKS, Timing, Work
from benchmarks.engine.ours import run_job
from benchmarks.engine.policies import PolicyResult, compare_policies, poisson_trace
from twostroke.backends.machine_limits import machine
from twostroke.core.options import ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.engine.engine import build
from twostroke.model.loader import load

if TYPE_CHECKING:
    from twostroke.core.hardware import Hardware
    from twostroke.engine.counters import PrefillDecodeTotals
    from twostroke.engine.engine import Engine

_PARTS = ("speed", "policies", "start", "memory", "size", "build")
_ROWS = [name for name, work in WORKS.items() if not work.kept_length]  # those of seconds
_PROMPT = "Why is the sky blue?"
_MEMORY_CONTEXT = 2048  # tokens in the key-value pool when memory is measured
_MEMORY_FACTOR = 1.6  # of the model's file, beside the pool
_POLICY_BATCH = 8
_POLICY_REQUESTS = 48
_POLICY_LOAD = 0.6  # of the tokens/s that a full batch reaches


def main() -> None:
    """Measure, then print and keep the tables."""
    args = _arguments()
    result: dict[str, Any] = {**machine_facts(), "model": args.model, "rounds": args.rounds}
    text = ["## Speed and size", ""]
    if {"speed", "policies"} & set(args.parts):
        text += _measure_engine(args, result)
    text += _measure_footprint(args, result)
    save("speed", result, "\n".join([*text, caption(result, args.model)]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--level", help="instruction-set level")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--parts", nargs="+", choices=_PARTS, default=_PARTS, metavar="PART",
        help=f"what to measure: {', '.join(_PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", choices=list(WORKS), default=_ROWS, metavar="ROW",
        help=f"rows of the speed table: {', '.join(WORKS)}",
    )  # fmt: skip
    return parser.parse_args()


@dataclass(slots=True)
class Row:
    """All runs of one job: rates, shares of the limits, and of the time spent outside kernels.

    `outside` is the share of the job's time in which no kernel computes: the threads' waiting for
    each other included. `engine` is the part of it outside the backend's call: scheduler, text,
    delivery.
    """

    work: Work
    tokens_per_s: list[float] = field(default_factory=list)
    mbu: list[float] = field(default_factory=list)
    mfu: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    disturbed: int = 0

    def add(
        self, timing: Timing, strokes: PrefillDecodeTotals, limits: Hardware, others: float
    ) -> None:
        """Add a run; `strokes` are its own, `others` the share that others took of all cores."""
        both = (strokes.prefill, strokes.decode)
        kernel_s = sum(stroke.kernel_s for stroke in both)
        call_s = sum(stroke.time_s for stroke in both)
        stroke, wall_s = both[not self.work.is_prefill], timing.prefill_s
        if not self.work.is_prefill:
            wall_s = timing.wall_s - strokes.prefill.time_s
        self.tokens_per_s.append(timing.tokens_per_s(self.work))
        self.mbu.append(stroke.bytes / wall_s / limits.bandwidth)
        self.mfu.append(stroke.flops / wall_s / limits.peak)
        self.outside.append(1 - kernel_s / timing.wall_s)
        self.engine.append(1 - call_s / timing.wall_s)
        self.disturbed += others > MAX_SHARE

    def cells(self) -> tuple[str, ...]:
        """Return the table's line."""
        shares = (f"{median(v):.0%}" for v in (self.mbu, self.mfu))
        overheads = (f"{median(v):.1%}" for v in (self.outside, self.engine))
        rate = spread(self.tokens_per_s)
        return (self.work.name, rate, *shares, *overheads, f"{self.disturbed} of {len(self.mbu)}")


_HEADER = (
    "tokens/s: median (lowest to highest)",
    "Twostroke",
    "of the bandwidth",
    "of the peak",
    "step outside kernels",
    "of it outside the backend",
    "disturbed runs",
)


def _measure_engine(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    compute = ComputeOptions(args.backend, args.threads, args.level, activation_bits=15)
    prompts = FreshPrompts(heldout_tokens(load(args.model)))
    with build(args.model, EngineOptions(compute, speculation=SpeculationOptions("off"))) as engine:
        limits = _limits(engine)
        works = [WORKS[name] for name in args.only]
        rows = _measure_rows(engine, works, limits, prompts, args.rounds)
        batch = Row(Work("full batch", _POLICY_BATCH, PROMPT_LENGTH, 32))
        _run_once(engine, batch, limits, prompts)
    result["engine"] = msgspec.to_builtins(engine.facts)
    result["limits"] = msgspec.to_builtins(limits)
    result["speed"] = [msgspec.to_builtins(row) for row in rows]
    text = _speed_text(rows, engine, limits) if "speed" in args.parts else []
    if "policies" in args.parts:
        note("Replaying one trace under each policy")
        load_tokens_per_s = _POLICY_LOAD * batch.tokens_per_s[0]
        trace = poisson_trace(prompts, _POLICY_REQUESTS, load_tokens_per_s, seed=0)
        policy_results = compare_policies(args.model, compute, trace, _POLICY_BATCH)
        result["policies"] = [
            {key: value for key, value in msgspec.to_builtins(row).items() if key != "answers"}
            for row in policy_results
        ]
        text += _policies_text(policy_results, load_tokens_per_s)
    return text


def _limits(engine: Engine) -> Hardware:
    facts = engine.facts
    return machine(facts.level, facts.num_threads, facts.weight_bytes, remeasure=True)


def _measure_rows(
    engine: Engine, works: list[Work], limits: Hardware, prompts: FreshPrompts, rounds: int
) -> list[Row]:
    warm_up = [Row(work) for work in works]
    rows = [Row(work) for work in works]
    for number in range(rounds + 1):
        note(f"Round {number} of {rounds}" if number else "Warming up")
        for row in rows if number else warm_up:
            _run_once(engine, row, limits, prompts)
    return rows


def _run_once(engine: Engine, row: Row, limits: Hardware, prompts: FreshPrompts) -> None:
    work, loop = row.work, engine.client.loop
    job = prompts.job(work)
    before, watch = loop.snapshot().phases, Watch()
    timing = run_job(engine.client, job, work.num_tokens)
    row.add(timing, loop.snapshot().phases - before, limits, watch.others_share())


def _speed_text(rows: list[Row], engine: Engine, limits: Hardware) -> list[str]:
    medians = {row.work: median(row.tokens_per_s) for row in rows}
    single, sixteen = medians.get(WORKS["decode-1"]), medians.get(WORKS["decode-16"])
    text = [table(_HEADER, [row.cells() for row in rows]), ""]
    if single and sixteen:
        text += [f"16 streams together write {sixteen / single:.1f} times the tokens of one.", ""]
    about = (
        f"{engine.facts.detail}. The most ever measured here: {limits.bandwidth / 1e9:.1f} GB/s"
        f" for a stream of the weights' size, {limits.peak / 1e12:.2f} T operations/s"
        f" ({limits.peak_kind})."
    )
    return [*text, about, ""]


def _policies_text(policy_results: list[PolicyResult], tokens_per_s: float) -> list[str]:
    header = ("policy", "TTFT p50", "TTFT p95", "TTFT max", "tokens/s", "latest client")
    lines = [
        (
            row.policy,
            *(f"{s * 1000:,.0f} ms" for s in (row.ttft_p50_s, row.ttft_p95_s, row.ttft_max_s)),
            f"{row.tokens_per_s:,.0f}",
            f"{row.lateness_s * 1000:.0f} ms",
        )
        for row in policy_results
    ]
    same = all(row.answers == policy_results[0].answers for row in policy_results)
    about = (
        f"{_POLICY_REQUESTS} requests, the same Poisson arrivals for each policy, asking for"
        f" {tokens_per_s:,.0f} tokens/s; batches of {_POLICY_BATCH}. The answers are"
        f" {'the same, token for token' if same else 'NOT the same'}."
    )
    return [table(header, lines), "", about, ""]


def _measure_footprint(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    lines: list[tuple[str, str]] = []
    if "start" in args.parts:
        note("Starting cold processes")
        command = generate_command(args.model, "-p", _PROMPT, "--max-tokens", "2")
        times = result["first_token_s"] = [live(command).first_s for _ in range(2 * args.rounds)]
        lines.append(("start of the process to first token", spread(times, 2, " s")))
    if "memory" in args.parts:
        lines += _measure_memory(args.model, result)
    if "size" in args.parts:
        note("Installing into a fresh environment")
        size = installed_size()
        result["installed"] = msgspec.to_builtins(size)
        lines.append(("installed environment without pip", f"{size.without_pip / 1e6:.0f} MB"))
        lines.append(("installed environment with pip", f"{size.total / 1e6:.0f} MB"))
        lines.append(("`pip install .`, all included", f"{size.install_s:.0f} s"))
    if "build" in args.parts:
        note("Building the native libraries")
        result["build_s"] = build_s()
        lines.append(("native build on two cores", f"{result['build_s']:.0f} s"))
    return [table(("size and start", "Twostroke"), lines), ""] if lines else []


def _measure_memory(model: str, result: dict[str, Any]) -> list[tuple[str, str]]:
    from twostroke.model.families import build_program
    from twostroke.model.program import FLOAT16

    note("Measuring memory")
    loaded = load(model)
    layers = build_program(loaded.spec).cache_layers
    token_bytes = sum(layer.bytes_per_token(FLOAT16) for layer in layers)
    kv_bytes = _MEMORY_CONTEXT * token_bytes
    sizes = ("--context-length", str(_MEMORY_CONTEXT), "--kv-memory", str(kv_bytes))
    prompt = ("--raw", "-p", " ".join([_PROMPT] * (_MEMORY_CONTEXT // 10)))
    peak = live(generate_command(model, "--ignore-eos", *sizes, *prompt), OFTEN_S).resident
    limit = _MEMORY_FACTOR * loaded.file_bytes + kv_bytes
    result["memory"] = {
        "peak": peak, "model_file": loaded.file_bytes, "kv_pool": kv_bytes, "limit": limit
    }  # fmt: skip
    about = (
        f"{peak / 1e6:.0f} MB; {_MEMORY_FACTOR} x the model's file ({loaded.file_bytes / 1e6:.0f}"
        f" MB) + pool of {_MEMORY_CONTEXT:,} tokens ({kv_bytes / 1e6:.0f} MB):"
        f" {limit / 1e6:.0f} MB"
    )
    return [("peak memory of a process whose pool is full", about)]


if __name__ == "__main__":
    main()
