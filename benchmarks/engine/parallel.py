"""Compare a model on several ranks with one process on the same cores.

Run it with `make bench WHAT=parallel`.

One process has two threads; each of two ranks has one. A round is one run of each side (A B A B)
with fresh prompts; the ratio is the median of the rounds' ratios. The table also has the time
that ranks spend in collectives, the cost model's prediction of it, and how long ranks wait.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.common.pipe import WorkerError
from benchmarks.common.records import Entry, Record, keep
from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from benchmarks.common.workload import WORKS
from benchmarks.engine import parallel_report, parallel_rows
from benchmarks.engine.parallel_rows import ROWS, Case
from benchmarks.peers.interleaved import measure
from twostroke.model.loader import load

if TYPE_CHECKING:
    from benchmarks.peers.interleaved import Row
    from benchmarks.peers.sides import Side

_CHUNK = 256  # tokens of a prompt that one step computes
_MEMORY_HEADER = ("share of one process's", "weights", "pages", "both", "memory in use")


def main() -> None:
    """Measure, then print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    about = ", ".join(f"{name}: {row.about}" for name, row in ROWS.items())
    parser.add_argument("--row", nargs="+", choices=list(ROWS), metavar="ROW", help=about)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only these of a row's")
    parser.add_argument("--works", nargs="+", metavar="WORK", help="only these of a row's")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT",
                        help="of the row before: another checkout, compiled")  # fmt: skip
    parser.add_argument("--llama-env", type=Path, help="a ready environment with RPC")
    args = parser.parse_args()
    args.row = args.row or [name for name in ROWS if args.before or name != "before"]
    lines, results, memory = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.row:
            for model in dict.fromkeys(case.model for case in ROWS[name].cases):
                if args.models and model not in args.models:
                    continue
                rows, model_memory = _measure_model(name, model, args, Path(folder))
                lines += [line for line, _ in rows]
                results += [result for _, result in rows]
                memory += model_memory
    facts = machine_facts()
    limits = [result["limits"] for result in results if result["limits"]]
    machine = ", ".join(dict.fromkeys(map(_limits, limits))) or "limits unknown"
    text = ["## Several ranks beside one process", "", table(parallel_report.HEADER, lines), ""]
    text += [table(_MEMORY_HEADER, memory), ""] if memory else []
    text += [caption(facts, machine, f"{args.rounds} rounds")]
    save("parallel", {**facts, "rows": results}, "\n".join(text))


def _measure_model(
    name: str, model: str, args: argparse.Namespace, folder: Path
) -> tuple[list[tuple[tuple[str, ...], dict[str, Any]]], list[tuple[str, ...]]]:
    """Measure a row's cases with one model, whose engines stay for all of them.

    Returns the line and the figures of each case, and a line of memory for each rank.
    """
    row = ROWS[name]
    cases = [c for c in row.cases if c.model == model and c.work in (args.works or WORKS)]
    if not cases:
        return [], []
    note(f"== {name}: {model}")
    path = parallel_rows.path_of(model)
    tokens = FreshPrompts(heldout_tokens(load(path)))
    sides = list(row.sides(path, cases[0], args, folder))
    try:
        for side in sides:
            side.about = side.call("about") or {}
        limits = sides[0].call("limits") or {}
        done = []
        for case in cases:
            result = measure(WORKS[case.work], sides, tokens, args.rounds)
            done.append(_result(name, case, result, sides, limits))
        return done, _memory(f"{model}, {cases[0].title}", *sides[:2])
    finally:
        for side in sides:
            side.worker.close()


def _result(
    name: str, case: Case, row: Row, sides: list[Side], limits: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Keep the record of a case, and return its line and its figures.

    The second side is compared with the first one; where there are four, that ratio is divided by
    the one of the fourth and the third.
    """
    base, divided, *others = (row.best(side.name)[1] for side in sides)
    ratios = [ours / theirs for ours, theirs in zip(divided, base, strict=False)]
    if others:
        pairs = zip(ratios, others[1], others[0], strict=False)
        ratios = [ratio / (theirs / whole_rate) for ratio, theirs, whole_rate in pairs]
    timings = row.timings.get(sides[1].name, [])
    seconds = [t.prefill_s if row.work.is_prefill else t.decode_s for t in timings]
    share = median([t.collective_s / s for t, s in zip(timings, seconds, strict=True)] or [0.0])
    expected = _expected(sides[1], case)
    busy, waiting = (
        [median(each) for each in zip(*shares, strict=False)]
        for shares in ([t.busy for t in timings], [t.waiting for t in timings])
    )
    figures = {
        "case": msgspec.to_builtins(case),
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "collective_share": share,
        "expected": expected,
        "busy": busy,
        "waiting": waiting,
        "link": sides[1].about.get("facts", {}).get("link", ""),
        "limits": limits,
        "same_first_tokens": row.same_first_tokens,
    }
    record = Record(
        row=f"{parallel_report.PREFIX}{name}-{case.work}",
        name=f"{case.title}: {row.work.name}",
        model=Path(case.model).stem if "/" in case.model else case.model,
        unit="tokens/s",
        entries=[Entry(entry.engine, entry.way, entry.runs) for entry in row.entries()],
        command=f'make bench WHAT=parallel ARGS="--row {name}"',
        disturbed_runs=row.disturbed,
        num_runs=row.runs,
        failures=row.failures,
        engines={side.name: side.about.get("version", "") for side in sides},
        others=figures,
    )
    keep(record)
    return parallel_report.line(record), {**figures, "speed": row.as_json()}


def _memory(title: str, whole_side: Side, divided: Side) -> list[tuple[str, ...]]:
    """Return a line for each rank: what it holds, as a share of what one process holds.

    Of the processes' memory, what an interpreter has without a model is a part on both sides.
    """
    whole_facts, facts = whole_side.about["facts"], divided.about["facts"]
    if not facts.get("ranks"):
        return []
    alone, *others = whole_side.worker.call("memory")["processes"]
    if others:  # the base has several ranks, too
        return []
    lines = []
    every = divided.worker.call("memory")["processes"]  # rank 0's alone if it has not started them
    for rank, rank_bytes in zip(facts["ranks"], every, strict=False):
        names = ("weight_bytes", "cache_bytes")
        sizes = [(rank[name], whole_facts[name]) for name in names] + [(rank_bytes, alone)]
        cells = [
            f"{part_bytes / 1e6:,.1f} MB, {part_bytes / all_:.1%}" for part_bytes, all_ in sizes
        ]
        share = sum(rank[name] for name in names) / sum(whole_facts[name] for name in names)
        lines.append((f"{title}: rank {rank['rank']}", *cells[:2], f"{share:.1%}", cells[2]))
    return lines


def _expected(side: Side, case: Case) -> dict[str, Any]:
    """Return what the engine expects of its split for a case; {} if it predicts nothing."""
    work = WORKS[case.work]
    start, count = work.prompt_length + work.num_tokens // 2, 1
    if work.is_prefill:  # the chunk in the middle
        count = min(_CHUNK, work.prompt_length)
        start = (work.prompt_length - count) // 2
    starts, counts = [start] * work.num_streams, [count] * work.num_streams
    try:
        return side.worker.call("expected", starts=starts, counts=counts)
    except WorkerError as error:
        note(f"{side.name} predicts nothing: {error}")
        return {}


def _limits(limits: dict[str, Any]) -> str:
    return (
        f"{limits['bandwidth'] / 1e9:.1f} GB/s, {limits['peak'] / 1e12:.2f} T operations/s "
        f"({limits['peak_kind']})"
    )


if __name__ == "__main__":
    main()
