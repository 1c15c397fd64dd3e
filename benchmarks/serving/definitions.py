"""Compare the figures of `twostroke bench` with aiperf's and guidellm's on the same traffic.

Run it with `make bench WHAT=definitions`. Each tool sends the same prompts from the same number of
clients to the same server, several times in turn. Each figure of a tool is divided by the figure
that `twostroke bench` computes from its own run by the definition of that tool.

Two servers are used: one without a model, which answers at a fixed pace, and Twostroke's with a
small model, which computes with one thread. The server has the machine's first core for itself,
and the load generators share the others: some of them would take a third of its time, and would
then measure another server than the rest. The server with a model has one client: with several,
microseconds between an answer and the next request decide which prompts share a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.common.records import ROWS, machine_slug
from benchmarks.common.report import (
    caption,
    machine_facts,
    note,
    positive,
    read,
    spread,
    table,
    write,
)
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.serving.load_generators import Traffic, run_aiperf, run_guidellm
from twostroke.core.message_text import counted_noun
from twostroke.lab.bench.benchmark import BenchLoad, Benchmark
from twostroke.lab.bench.definitions import defined_figures
from twostroke.lab.bench.prompts import WORDS
from twostroke.lab.bench.request_form import RequestForm
from twostroke.lab.bench.requests_to_send import DatasetPrompt
from twostroke.lab.bench.runner import RunLimits
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.simulator.load import RequestArrival, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    RunTool = Callable[[Traffic, Path | None], dict[str, float]]

MAX_DIFFERENCE = 0.03
TOOLS: dict[str, RunTool] = {"aiperf": run_aiperf, "guidellm": run_guidellm}
_FOLDER = "load-generators"
# Figures whose definitions agree after the translation; percentiles of gaps depend on how each
# client reads its socket.
_COMPARED = (
    *("ttft_mean", "ttft_p50", "tpot_mean", "tpot_p50", "itl_mean", "e2e_mean", "e2e_p50"),
    *("requests_per_s", "output_per_s"),
)


@dataclass(slots=True)
class Comparison:
    """The figures of one server, round by round.

    Attributes:
        server: its name.
        load: the traffic in words.
        ratios: a tool's figure to ours by the tool's definition, by tool and figure.
        own: our figures by the tool's definition, by tool and figure; seconds, or per second.
        facts: the machine and the date.
    """

    server: str
    load: str
    ratios: dict[str, dict[str, list[float]]]
    own: dict[str, dict[str, list[float]]]
    facts: dict[str, Any]

    def parts(self) -> Iterator[str]:
        """Yield the paragraphs of a report."""
        yield f"### {self.server}: {self.load}\n"
        rows = []
        for name in _COMPARED:
            cells = [name]
            for tool in self.ratios:
                value = statistics.median(self.own[tool][name])
                text = f"{value:,.1f}" if name.endswith("per_s") else f"{value * 1e3:,.2f} ms"
                cells += [text, spread(self.ratios[tool][name], 3)]
            rows.append(cells)
        headings = [word for tool in self.ratios for word in (f"ours as {tool}", f"{tool} / ours")]
        yield table(("", *headings), rows) + "\n"
        yield f"{caption(self.facts)}. Command: `make bench WHAT=definitions`.\n"

    def apart(self) -> list[str]:
        """Return the figures that differ by more than the limit, such as "aiperf ttft_mean"."""
        return [
            f"{tool} {name}: {statistics.median(ratios):.3f}"
            for tool, by_name in self.ratios.items()
            for name, ratios in by_name.items()
            if abs(statistics.median(ratios) - 1) > MAX_DIFFERENCE
        ]


def load_comparisons(machine: str) -> list[Comparison]:
    """Return the stored comparisons of a machine."""
    return [read(path, Comparison) for path in sorted((ROWS / machine / _FOLDER).glob("*.json"))]


def run_ours(traffic: Traffic) -> dict[str, dict[str, float]]:
    """Return the figures of a run of our own by the definition of each tool."""
    count = len(traffic.prompts)
    load = BenchLoad(
        workload=Workload("prompts", tuple(RequestArrival(0.0, 1, 1) for _ in range(count))),
        limits=RunLimits(num_clients=traffic.num_clients),
        prompts=tuple(DatasetPrompt(text, traffic.num_output) for text in traffic.prompts),
    )
    form = RequestForm(model=traffic.model, ignores_end=True)
    result = asyncio.run(Benchmark(traffic.url, form, key=None).run(load, Objectives()))
    note(result.audit.verdict)
    figures: dict[str, dict[str, float]] = {tool: {} for tool in TOOLS}
    for figure in defined_figures(result.record.answers, result.report, {}):
        for tool in TOOLS:
            value = figure.values[tool]
            if value is not None:
                figures[tool][figure.name] = value
    return figures


def compare(server: str, traffic: Traffic, options: argparse.Namespace) -> Comparison:
    """Run all tools in turn on one server, and return their figures."""
    load = (
        f"{counted_noun(traffic.num_clients, 'client')}, {len(traffic.prompts)} requests, "
        f"{traffic.num_output} tokens of output"
    )
    ratios: dict[str, dict[str, list[float]]] = {
        tool: {name: [] for name in _COMPARED} for tool in TOOLS
    }
    own: dict[str, dict[str, list[float]]] = {
        tool: {name: [] for name in _COMPARED} for tool in TOOLS
    }
    environments = {"aiperf": options.aiperf_env, "guidellm": options.guidellm_env}
    for _ in range(options.rounds):
        ours = run_ours(traffic)
        for tool, run_tool in TOOLS.items():
            figures = run_tool(traffic, environments[tool])
            for name in _COMPARED:
                ratios[tool][name].append(figures[name] / ours[tool][name])
                own[tool][name].append(ours[tool][name])
    return Comparison(server, load, ratios, own, options.facts)


def main() -> int:
    """Compare on the servers that the command line names; exit with 1 if a figure is apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="*", choices=["paced", "smollm2"])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--requests", type=positive, default=120)
    parser.add_argument("--clients", type=positive, help="4 by default, or 1 with a model")
    parser.add_argument("--words", type=positive, default=64, help="of each prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="of each answer")
    parser.add_argument("--aiperf-env", type=Path, help="a virtual environment with aiperf")
    parser.add_argument("--guidellm-env", type=Path, help="a virtual environment with guidellm")
    options = parser.parse_args()
    options.facts = machine_facts()
    rng, are_apart = random.Random(0), False
    prompts = [" ".join(rng.choices(WORDS, k=options.words)) for _ in range(options.requests)]
    for server in options.servers or ("paced", "smollm2"):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if server == "paced":
                command: tuple[str, ...] = (
                    *(sys.executable, "-m", "benchmarks.serving.paced_server"),
                )
            else:
                # All tools send the same prompts, so a prefix cache would help the later ones.
                command = (*our_command(server, 1), "--no-prefix-cache")
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[:1])
            process = Server(server, command, folder, stack)
            os.sched_setaffinity(0, cores[1:] or cores)
            stack.callback(os.sched_setaffinity, 0, cores)
            url = f"http://127.0.0.1:{process.port}"
            model = "paced" if server == "paced" else MODEL_NAME
            num_clients = options.clients or (4 if server == "paced" else 1)
            traffic = Traffic(url, model, num_clients, prompts, options.tokens, folder)
            _warm_up(traffic)
            comparison = compare(server, traffic, options)
        path = ROWS / machine_slug(comparison.facts) / _FOLDER / f"{server}.json"
        write(path, json.dumps(msgspec.to_builtins(comparison), indent=1) + "\n")
        print("\n".join(comparison.parts()))
        if apart := comparison.apart():
            are_apart = True
            print(f"More than {MAX_DIFFERENCE:.0%} apart: {'; '.join(apart)}")
    return int(are_apart)


def _warm_up(traffic: Traffic) -> None:
    body = {
        "model": traffic.model,
        "messages": [{"role": "user", "content": traffic.prompts[0]}],
        "max_tokens": traffic.num_output,
    }
    request = urllib.request.Request(
        f"{traffic.url}/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()


if __name__ == "__main__":
    sys.exit(main())
