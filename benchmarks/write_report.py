"""Write BENCHMARKS.md: summary tables of the rows under results/.

Run it with `make report`. It measures nothing.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.common.goals import GOALS
from benchmarks.common.records import OURS, Record, all_records, ours_with
from benchmarks.common.report import ROOT, caption, table
from benchmarks.common.workload import WORKS
from benchmarks.engine import parallel_report
from benchmarks.engine.speculation_results import load_results
from benchmarks.lab.advice import load_advice_results
from benchmarks.peers.quality import Quality
from benchmarks.serving.definitions import load_comparisons
from twostroke.core.options import AUTO_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.common.goals import Goal
    from benchmarks.engine.speculation_results import SpeculationResult

_PAGE = ROOT / "BENCHMARKS.md"
_NOT_MEASURED = "–"
_NAMES = {
    "start": "start of the process to first token",
    "memory": "peak memory, a context of 2,048 tokens filled",
    "serve-16": "server, 16 streaming clients, 100 tokens in, 64 out",
    "overhead-256": "a step of 256 streams without its kernels",
}
_HEAD = """# Benchmarks

`make report` writes this page from the measurements in `benchmarks/results/rows/`, which
has every run of every row: all engines, their versions, the lowest and highest figures, and how
many runs other programs disturbed. [benchmarks/README.md](benchmarks/README.md) says how they are
measured. Machines are virtual and shared, so absolute figures belong to a machine and a day;
compare only the ratios.
"""
_SPEED = """## Speed

Each cell has Twostroke's median, the best peer's, and in **bold** how many times better Twostroke
is (for times and memory: how many times less it takes), with 15 bits of activations. In parentheses
is the same ratio with those that it chooses by default, and with `--activation-bits 8`, the
precision that most peers have. Speculation is off for all engines. llama-3b and llama-8b have
random weights of those shapes in Q4_K_M (`python -m benchmarks.common.shapes llama-3b FOLDER`).
"""
_SPECULATION = """## Speculation

How many times faster answers are with `--speculate auto` than without, by the number of streams,
if every step of a size took the same time.
"""
_PARALLEL = """## Several ranks

A model on several ranks beside one process on the same cores: one process has two threads, each of
two ranks has one. With llama.cpp and its `rpc-server`, which have lines of their own, the ratio is
divided by that of llama.cpp. The time in collectives is rank 0's. It and what ranks wait (in decode
steps, by their own clocks) are shares of a step; [docs/guide/parallel.md](docs/guide/parallel.md)
says what is predicted.
"""
_LOAD_GENERATORS = """## Load generators

aiperf and guidellm beside `twostroke bench` on the same traffic. Each figure of a tool is divided
by the figure that `twostroke bench` computes from its own run by the definition of that tool.
[The guide](docs/guide/bench.md#definitions-of-other-tools) has the definitions. The server without
a model compares definitions. With a model, the load generators (aiperf has eight processes) slow
the server on a small machine: then the rounds of one tool differ by more than the tools do.
"""
_ADVICE = """## Advice

A load is recorded, `twostroke advise` reads it, and the advised command runs beside the default one
under the same loads in turn. [benchmarks/README.md](benchmarks/README.md#advice) says how.
"""
_QUALITY = """## Quality

The next-token distributions on held-out text, against the float32 reference on the same weights.
"""


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    machines = dict(all_records())
    if not machines:
        raise SystemExit("There are no measurements yet; run `make bench WHAT=peers`.")
    parts = [_HEAD, *_speed(machines), *_speculation(machines), *_parallel(machines)]
    parts += [*_quality(machines), *_load_generators(machines), *_advice(machines)]
    _PAGE.write_text("\n".join(parts).rstrip() + "\n")
    print(f"Wrote {_PAGE.relative_to(ROOT)}")


def _speed(machines: dict[str, list[Record]]) -> Iterator[str]:
    alone = {
        name: [r for r in records if not _is_parallel(r)] for name, records in machines.items()
    }
    newest = {name: max(records, key=_date).facts for name, records in alone.items() if records}
    columns = {
        name: {(record.row, record.model): record for record in alone[name] if not record.setting}
        for name in newest
    }
    titles = [_machine(name, facts) for name, facts in newest.items()]
    rows = [
        (
            f"{goal.model}: {_NAMES.get(goal.row) or WORKS[goal.row].name}",
            goal.text(),
            *(summary(goal, column.get((goal.row, goal.model))) for column in columns.values()),
        )
        for goal in GOALS
    ]
    yield _SPEED
    yield table(("", "goal", *titles), rows) + "\n"
    commands = dict.fromkeys(goal.command.partition(" ARGS")[0] for goal in GOALS)
    yield f"Commands: {', '.join(f'`{command}`' for command in commands)}.\n"


def summary(goal: Goal, record: Record | None) -> str:
    """Return our figure, the best peer's and the ratio, or a dash."""
    if record is None or (ours := record.best(OURS)) is None:
        return _NOT_MEASURED
    own_figure = _figure(ours.median, record.unit)
    peer = record.peers[0] if record.peers else None
    best = record.best(peer) if peer else None
    if peer is None or best is None:
        return own_figure
    bare = record.others.get("bare_tokens_per_s") if goal.bare else None
    share = f", {ours.median / median(bare):.0%} of the bare engine" if bare else ""
    theirs = _figure(best.median, record.unit).partition(" ")[0]
    others = [record.ratio(peer, ours_with(bits)) for bits in (AUTO_BITS, 8)]
    ratios_text = ", ".join(_NOT_MEASURED if other is None else f"{other:.2f}" for other in others)
    with_others = f" ({ratios_text})" if any(others) else ""
    return f"{own_figure}, {peer} {theirs}: **{record.ratio(peer):.2f}**{with_others}{share}"


def _speculation(machines: dict[str, list[Record]]) -> Iterator[str]:
    measured = [
        (result, name)
        for name in machines
        for result in load_results(name)
        if "activations" not in result.name
    ]
    if not measured:
        return
    _, machine = max(measured, key=lambda name_and_machine: _newest(name_and_machine[0]))
    machine_results = [result for result, name in measured if name == machine]
    streams = sorted({line.streams for result in machine_results for line in result.lines})
    rows = []
    for result in machine_results:
        by_task: dict[str, dict[int, float]] = {}
        for line in result.lines:
            by_task.setdefault(line.task, {})[line.streams] = line.steady
        for task, ratios in by_task.items():
            cells = (f"{ratios[n]:.2f}" if n in ratios else _NOT_MEASURED for n in streams)
            rows.append((f"{result.name}: {task}", *cells))
    newest = max(
        (line.facts for row in machine_results for line in row.lines), key=lambda f: str(f["date"])
    )
    yield _SPECULATION
    yield table(("", *(f"{n} streams" if n > 1 else "1 stream" for n in streams)), rows) + "\n"
    yield f"{caption(newest)}. Command: `make bench WHAT=speculation`.\n"


def _load_generators(machines: dict[str, list[Record]]) -> Iterator[str]:
    comparisons = [comparison for name in machines for comparison in load_comparisons(name)]
    if comparisons:
        yield _LOAD_GENERATORS
    for comparison in comparisons:
        yield from comparison.parts()


def _advice(machines: dict[str, list[Record]]) -> Iterator[str]:
    results = [result for name in machines for result in load_advice_results(name)]
    if results:
        yield _ADVICE
    for result in results:
        yield from result.parts()


def _newest(result: SpeculationResult) -> str:
    return max(str(line.facts["date"]) for line in result.lines)


def _parallel(machines: dict[str, list[Record]]) -> Iterator[str]:
    """Yield the table of the machine that was measured last."""
    results = [
        [record for record in records if _is_parallel(record)] for records in machines.values()
    ]
    if not any(results):
        return
    records = max(filter(None, results), key=lambda records: max(map(_date, records)))
    yield _PARALLEL
    yield table(parallel_report.HEADER, map(parallel_report.line, records)) + "\n"
    yield f"{caption(max(records, key=_date).facts)}. Command: `make bench WHAT=parallel`.\n"


def _is_parallel(record: Record) -> bool:
    return record.row.startswith(parallel_report.PREFIX)


def _quality(machines: dict[str, list[Record]]) -> Iterator[str]:
    newest: dict[str, Record] = {}
    for record in sorted((row for each in machines.values() for row in each), key=_date):
        if record.others.get("quality"):
            newest[record.model] = record
    if not newest:
        return
    rows = [
        (model, *Quality(**line).cells())
        for model, record in sorted(newest.items())
        for line in record.others["quality"]
    ]
    yield _QUALITY
    yield table(("model", *Quality.header()), rows) + "\n"
    yield "Commands: `make bench WHAT=peers`; for Twostroke alone `twostroke compare MODEL`.\n"


def _machine(name: str, facts: dict[str, object]) -> str:
    level = name.rpartition("-")[2]
    date = str(facts["date"]).partition(" ")[0]
    return f"{facts['processor']}, {facts['cores']} cores, {level}, {date}"


def _date(record: Record) -> str:
    return str(record.facts["date"])


def _figure(value: float, unit: str) -> str:
    return f"{value:,.{2 if unit in {'s', 'ms'} else 0}f} {unit}"


if __name__ == "__main__":
    main()
