"""Measure servers with the client of `twostroke bench`: clients, batching, prefixes, traces.

Run it with `make bench WHAT=traffic`; `ARGS=--list` lists the scenarios.

Our server and llama-server run the same model side by side, and answer each scenario in turn,
round by round (A B A B). Figures are medians over the rounds, ratios are ratios of medians. A run
that the client's audit calls invalid is left out and counted. vLLM's wheel for CPUs starts no
server: `make bench WHAT=serving ARGS=--vllm` measures its engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.common.goals import SMOLLM2
from benchmarks.common.quiet import MAX_SHARE, Watch
from benchmarks.common.records import OURS, Entry, Record, keep
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.common.texts import FreshPrompts
from benchmarks.peers import environments
from twostroke.lab.measure.compare import held_out_text
from twostroke.model.hub import resolve
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LLAMA: Final = "llama-server"
_CONTEXT: Final = 2048  # of each of llama-server's slots
_NUM_SLOTS: Final = 64
_SHARED: Final = 896  # tokens that the prompts of `prefix-first` and `prefix-last` share
_UNIQUE: Final = 128
_NUM_PROMPTS: Final = 64  # of `prefix-first` and `prefix-last`
# What a scenario is judged by: the unit, and whether less is better.
_RATE, _TTFT = ("tokens/s", False), ("ms to the first token, median", True)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, and the servers that answer it.

    Attributes:
        row: its name in the stored measurements.
        name: its description.
        options: options of `twostroke bench`.
        measure: what is compared, with its unit.
        policies: the batching policies of our server that are measured.
        dataset: the file of prompts that is made for it, "first" or "last": where the shared part
            of its prompts stands.
        trace: the file of a trace, in the folder of --traces.
    """

    row: str
    name: str
    options: tuple[str, ...]
    measure: tuple[str, bool] = _RATE
    policies: tuple[str, ...] = ("continuous",)
    dataset: str = ""
    trace: str = ""


def _clients(count: int) -> Scenario:
    # Enough that the first requests, which arrive at the same time, do not decide the figures, and
    # with different lengths, so that the clients do not stay in step.
    requests = str(max(40, 8 * count if count < 64 else 6 * count))
    lengths = ("--prompt", "256", "--output", "64", "--spread", "0.3", "--requests", requests)
    return Scenario(
        f"traffic-clients-{count}",
        f"{count} clients, 256 tokens in, 64 out",
        ("--clients", str(count), *lengths),
    )


def _prefix(kind: str, name: str) -> Scenario:
    return Scenario(
        f"traffic-prefix-{kind}",
        f"8 clients, prompts of some {_SHARED + _UNIQUE} tokens, {name}",
        ("--clients", "8", "--requests", str(_NUM_PROMPTS)),
        _TTFT,
        dataset=kind,
    )


def _trace(name: str, file: str, speed: float, scale: float) -> Scenario:
    options = ("--speed", f"{speed:g}", "--scale", f"{scale:g}", "--requests", "60")
    row = f"traffic-{name}"
    return Scenario(row, f"the trace {name}, scaled", options, _TTFT, trace=file)


_SPREAD_LOAD: Final = (
    *("--clients", "16", "--requests", "128"),
    *("--prompt", "200", "--output", "64", "--spread", "0.8"),
)
SCENARIOS: Final = (
    *map(_clients, (1, 4, 16, 64)),
    Scenario(
        "traffic-batching",
        "16 clients, mixed lengths of 200 tokens in and 64 out",
        _SPREAD_LOAD,
        policies=("continuous", "dynamic", "static"),
    ),
    _prefix("first", f"the first {_SHARED} shared"),
    _prefix("last", f"the last {_SHARED} shared"),
    _trace("azure-conv", "azure_2023_conv.csv", speed=0.3, scale=0.2),
    _trace("azure-code", "azure_2023_code.csv", speed=0.3, scale=0.2),
    _trace("mooncake-conversation", "mooncake_conversation.jsonl", speed=0.4, scale=0.05),
)


@dataclass
class Target:
    """A server that answers scenarios, and the results of its runs by scenario."""

    name: str
    way: str
    server: Server
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    num_invalid: int = 0
    num_disturbed: int = 0

    def run(self, scenario: Scenario, options: Sequence[str], seed: int) -> None:
        """Run the client of `twostroke bench` once, and keep its figures if they are valid."""
        url = f"http://127.0.0.1:{self.server.port}"
        command = [
            *(sys.executable, "-m", "twostroke", "bench", url, "--model", MODEL_NAME),
            *("--api", "completions", *options, "--seed", str(seed), "--json"),
            *("--extra-body", '{"temperature": 0}', "--no-energy"),
        ]
        watch = Watch(self.server.pid)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if not result.stdout.strip():
            raise SystemExit(f"{self.name}, {scenario.row}: {result.stderr.strip()[-500:]}")
        fields = json.loads(result.stdout)
        if fields["is_valid"]:
            self.runs.setdefault(scenario.row, []).append(fields["report"]["run"])
        else:
            self.num_invalid += 1
            note(f"{self.name}, {scenario.row}: {fields['verdict']}")
        self.num_disturbed += watch.others_share() > MAX_SHARE

    def values(self, scenario: Scenario) -> list[float]:
        """Return the figure of each run by which a scenario is judged."""
        return [_figure(run, scenario.measure) for run in self.runs.get(scenario.row, [])]


def _figure(run: Mapping[str, Any], measure: tuple[str, bool]) -> float:
    if measure is _RATE:
        return float(run["output_per_s"])
    return 1000 * float(run["latencies"]["ttft"]["percentiles"]["p50"]["value"])


def main() -> None:
    """Measure, print and keep the rows."""
    args = _arguments()
    if args.list:
        print("\n".join(f"{scenario.row:32} {scenario.name}" for scenario in SCENARIOS))
        return
    scenarios = [
        s for s in SCENARIOS if not args.only or s.row.removeprefix("traffic-") in args.only
    ]
    scenarios = [s for s in scenarios if not s.trace or args.traces is not None]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = list(_start(args, folder, stack, scenarios))
        for round_number in range(args.rounds):
            note(f"Round {round_number + 1} of {args.rounds}")
            for scenario in scenarios:
                for target in targets:
                    if target.name == OURS and target.way not in scenario.policies:
                        continue
                    options = [*scenario.options, *_files(args, scenario, folder, round_number)]
                    target.run(scenario, options, seed=round_number + 1)
    records = [_record(args, scenario, targets) for scenario in scenarios]
    for record in records:
        if record.entries:
            keep(record)
    runs = {_key(target): target.runs for target in targets}
    save("traffic", {"facts": machine_facts(), "runs": runs}, _text(args, scenarios, targets))


def _files(
    args: argparse.Namespace, scenario: Scenario, folder: Path, round_number: int
) -> tuple[str, ...]:
    """Return the options that name a scenario's file; prompts are new in each round."""
    if scenario.trace:
        return ("--trace", str(args.traces / scenario.trace))
    if not scenario.dataset:
        return ()
    path = folder / f"{scenario.dataset}-{round_number}.jsonl"
    if not path.exists():
        tokenizer = build_tokenizer(load(args.model))
        prompts = FreshPrompts(tokenizer.encode(held_out_text()), seed=round_number)
        shared = tokenizer.decode(prompts.take(_SHARED))
        rows = []
        for _ in range(_NUM_PROMPTS):
            unique = tokenizer.decode(prompts.take(_UNIQUE))
            parts = (shared, unique) if scenario.dataset == "first" else (unique, shared)
            rows.append(json.dumps({"prompt": "\n\n".join(parts), "max_tokens": 32}))
        path.write_text("\n".join(rows) + "\n")
    return ("--dataset", str(path))


def _start(
    args: argparse.Namespace,
    folder: Path,
    stack: contextlib.ExitStack,
    scenarios: Sequence[Scenario],
) -> Iterator[Target]:
    """Start our server with each policy that is measured, and llama-server."""
    policies = {policy: None for scenario in scenarios for policy in scenario.policies}
    ours = our_command(args.model, args.threads)
    for policy in policies:
        command = (*ours, "--policy", policy)
        yield Target(OURS, policy, Server(f"{OURS}-{policy}", command, folder, stack))
    if args.without_llama:
        return
    program = environments.llama_programs(args.llama_programs) / _LLAMA
    options = (
        *("-m", str(resolve(args.model)), "-np", str(_NUM_SLOTS), "--alias", MODEL_NAME),
        *("-c", str(_CONTEXT * _NUM_SLOTS), "-t", str(args.threads), "-tb", str(args.threads)),
        *("-fit", "off", "-fa", "on"),
    )
    yield Target(_LLAMA, "", Server(_LLAMA, (str(program), *options), folder, stack))


def _record(args: argparse.Namespace, scenario: Scenario, targets: list[Target]) -> Record:
    unit, lower_is_better = scenario.measure
    figures = ("requests_per_s", "output_per_s", "hit_rate", "concurrency")
    runs = {
        _key(target): target.runs[scenario.row]
        for target in targets
        if target.runs.get(scenario.row)
    }
    return Record(
        row=scenario.row,
        name=scenario.name,
        model=args.model,
        unit=unit,
        entries=[
            Entry(target.name, target.way, values)
            for target in targets
            if (values := target.values(scenario))
        ],
        command=f'make bench WHAT=traffic ARGS="--only {scenario.row.removeprefix("traffic-")}"',
        lower_is_better=lower_is_better,
        disturbed_runs=sum(target.num_disturbed for target in targets),
        num_runs=sum(map(len, runs.values())),
        others={
            key: {name: median(run[name] or 0.0 for run in target_runs) for name in figures}
            for key, target_runs in runs.items()
        },
    )


def _key(target: Target) -> str:
    return f"{target.name}, {target.way}" if target.way else target.name


def _text(args: argparse.Namespace, scenarios: Sequence[Scenario], targets: list[Target]) -> str:
    header = ("load", "server", "tokens/s", "TTFT p50", "TTFT p90", "TPOT p50", "hits", "better")
    lines = []
    for scenario in scenarios:
        theirs = next((t.values(scenario) for t in targets if t.name == _LLAMA), [])
        for target in targets:
            runs = target.runs.get(scenario.row)
            if not runs:
                continue
            ratio = ""
            if theirs and target.name == OURS:
                value = median(target.values(scenario)) / median(theirs)
                ratio = f"{1 / value if scenario.measure[1] else value:.2f} x"
            rates = spread([run["output_per_s"] for run in runs])
            hits = median(run["hit_rate"] or 0.0 for run in runs)
            latencies = [
                _milliseconds(runs, *place)
                for place in (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"))
            ]
            lines.append((scenario.name, _key(target), rates, *latencies, f"{hits:.0%}", ratio))
    facts = caption(machine_facts(), args.model, f"{args.rounds} rounds")
    num_invalid = sum(target.num_invalid for target in targets)
    about = f"{num_invalid} runs were left out, because the client's audit called them invalid."
    return "\n".join(["## Traffic", "", table(header, lines), "", about, "", facts])


def _milliseconds(runs: Sequence[Mapping[str, Any]], name: str, percentile: str) -> str:
    values = [
        latency["percentiles"][percentile]["value"]
        for run in runs
        if percentile in (latency := run["latencies"].get(name, {"percentiles": {}}))["percentiles"]
    ]
    return f"{1000 * median(values):,.1f} ms" if values else "–"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=3)
    names = [scenario.row.removeprefix("traffic-") for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="*", choices=names, help="scenarios to measure")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER",
        help="the folder with azure_2023_conv.csv, azure_2023_code.csv and "
        "mooncake_conversation.jsonl; without it their scenarios are left out",
    )  # fmt: skip
    parser.add_argument("--without-llama", action="store_true", help="our own server only")
    parser.add_argument("--llama-programs", type=Path, help="a folder with llama-server")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    return parser.parse_args()


if __name__ == "__main__":
    main()
