"""`make bench-report`: BENCHMARKS.md and its plots, drawn from the rows under results/."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from goals import GOALS
from guessing import all_guessing
from plots import Bar, draw_bars
from quality import Quality
from records import OURS, Record, all_records, is_ours, ours_with
from report import ROOT, Spread, caption, table
from twostroke.core.config import ACTIVATION_BITS
from workload import WORKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goals import Goal

_PAGE = ROOT / "BENCHMARKS.md"
_PLOTS = ROOT / "docs" / "benchmarks"
_NOT_MEASURED = "not measured"
_HEAD = (
    "# Benchmarks\n\n"
    "Written by `make bench-report` from the measurements in `benchmarks/results/rows/`; nothing"
    " here is edited by hand. How they are made stands in"
    " [benchmarks/README.md](benchmarks/README.md). Figures are medians of interleaved rounds, with"
    " the lowest and highest in parentheses. A ratio is Twostroke's figure over the peer's best one"
    " of the same run (for times and sizes the other way round): above 1 Twostroke is better."
    " Absolute figures belong to their machine and day; only ratios of one run may be quoted.\n"
)


def main() -> None:
    """Write the page and its plots."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    parts = [_HEAD]
    for machine, records in all_records():
        parts += _machine_parts(machine, records)
    if len(parts) == 1:
        raise SystemExit("Nothing was measured yet: run make bench-peers, for one.")
    _PAGE.write_text("\n".join(parts).rstrip() + "\n")
    print(f"Wrote {_PAGE.relative_to(ROOT)}")


def _machine_parts(machine: str, records: list[Record]) -> Iterator[str]:
    facts = max((record.facts for record in records), key=lambda each: str(each["date"]))
    level = machine.rpartition("-")[2]
    yield f"## {facts['processor']}, {facts['cores']} cores, {level}\n"
    usual = {(record.row, record.model): record for record in records if not record.setting}
    plot = _PLOTS / f"{machine}.svg"
    drawn = [bar for goal in GOALS if (bar := _bar(goal, usual.get((goal.row, goal.model))))]
    if drawn:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw_bars(plot, "times the best peer of the row (the mark is the goal)", drawn)
        yield f"![ratio to the best peer of each row]({plot.relative_to(ROOT)})\n"
    others = [bits for bits in ACTIVATION_BITS if any(r.best(ours_with(bits)) for r in records)]
    named = [f"with {bits}-bit activations" for bits in others]
    header = ("", "model", OURS, "best peer", "ratio", "goal", "reached", *named)
    rows = []
    for goal in GOALS:
        record = usual.get((goal.row, goal.model))
        rows.append(_goal_cells(goal, record) + tuple(_bits_cell(goal, record, b) for b in others))
    yield table(header, rows) + "\n"
    for record in sorted(records, key=lambda each: (each.model, each.setting, each.row)):
        yield from _record_parts(record)
    for guessing in all_guessing(machine):
        yield from guessing.parts(machine)
    yield from _quality_parts(records)


def _bar(goal: Goal, record: Record | None) -> Bar | None:
    if record is None or goal.ratio is None or not record.peers:
        return None
    ratio = record.ratio(record.peers[0])
    return None if ratio is None else Bar(f"{goal.model}: {record.name}", ratio, goal.ratio)


def _goal_cells(goal: Goal, record: Record | None) -> tuple[str, ...]:
    if record is None or (ours := record.best(OURS)) is None:
        how = f"{_NOT_MEASURED}: `{goal.command}`"
        name = WORKS[goal.row].name if goal.row in WORKS else goal.row
        return (name, goal.model, how, "", "", goal.text(), "")
    peer = record.peers[0] if record.peers else None
    best = record.best(peer) if peer else None
    ratio = record.ratio(peer) if peer else None
    reached, shown = [], []
    for wanted, got, name in (
        (goal.ratio, ratio, ""),
        (goal.mbu, record.others.get("mbu"), "of the bandwidth"),
        (goal.mfu, record.others.get("mfu"), "of the peak"),
        (goal.bare, _share_of_bare(record), "of the bare engine"),
    ):
        if wanted is None:
            continue
        reached.append(None if got is None else got >= wanted)
        text = "–" if got is None else f"{got:.2f}" if not name else f"{got:.0%} {name}"
        shown.append(text)
    if goal.limit is not None:
        reached.append(ours.median <= goal.limit)
    unknown = any(each is None for each in reached)
    word = _NOT_MEASURED if unknown else "yes" if all(reached) else "no"
    theirs = f"{_figure(best.median, record.unit)}, {peer}" if best else _NOT_MEASURED
    own = _figure(ours.median, record.unit)
    return (record.name, goal.model, own, theirs, ", ".join(shown), goal.text(), word)


def _bits_cell(goal: Goal, record: Record | None, bits: int) -> str:
    """Return what other bits of activations make of a row; most peers have 8."""
    if record is None:
        return ""
    ratio = record.ratio(record.peers[0], ours_with(bits)) if record.peers else None
    limits = record.others.get("with_bits", {}).get(str(bits), {})
    shares = [f"{ratio:.2f}"] if ratio is not None else []
    for wanted, name, limit in ((goal.mbu, "mbu", "bandwidth"), (goal.mfu, "mfu", "peak")):
        if wanted is not None and (got := limits.get(name)) is not None:
            shares.append(f"{got:.0%} of the {limit}")
    return ", ".join(shares)


def _share_of_bare(record: Record) -> float | None:
    bare, ours = record.others.get("bare_tokens_per_s"), record.best(OURS)
    return ours.median / Spread.of(bare).median if bare and ours else None


def _record_parts(record: Record) -> Iterator[str]:
    setting = f" ({record.setting})" if record.setting else ""
    yield f"### {record.model}: {record.name}{setting}\n"
    digits = {"s": 3, "ms": 3, "tokens/s": 1}.get(record.unit, 0)
    lines = []
    for entry in record.entries:
        ratio = record.ratio(entry.engine) if not is_ours(entry.engine) else None
        is_best = record.best(entry.engine) == entry
        name = f"{entry.engine}, {entry.way}" if entry.way else entry.engine
        shown = f"{ratio:.2f}" if ratio and is_best else ""
        most = max(len(other.runs) for other in record.entries)
        left_out = f", left out after {len(entry.runs)} rounds" if len(entry.runs) < most else ""
        lines.append((name, Spread.of(entry.runs).text(digits) + left_out, shown))
    lines += [(engine, f"could not run it: {why}", "") for engine, why in record.failures.items()]
    yield table((f"{record.unit}", "median (lowest to highest)", "ratio"), lines) + "\n"
    yield from _others(record.others)
    for engine, version in record.engines.items():
        yield f"- {engine}: {version}"
    disturbed = f"{record.disturbed_runs} of {record.num_runs} runs disturbed by others"
    yield f"- {caption(record.facts, disturbed)}"
    yield f"- repeat this row with: `{record.command}`\n"


def _others(others: dict[str, Any]) -> Iterator[str]:
    limits = others.get("limits")
    if limits and others.get("mbu") is not None:
        yield (
            f"- Twostroke at {others['mbu']:.0%} of the bandwidth ({limits['bandwidth'] / 1e9:.1f}"
            f" GB/s) and {others['mfu']:.0%} of the peak ({limits['peak'] / 1e12:.2f} T"
            f" operations/s, {limits['peak_kind']}): the most that was ever measured of either on"
            " this machine, the bandwidth over as many bytes as the model has (the caches' where it"
            " fits into them)"
        )
    if "same_first_tokens" in others:
        share = others["same_first_tokens"]
        yield f"- {share:.0%} of the prompts got one first token from all (other bits aside)"
    if bare := others.get("bare_tokens_per_s"):
        yield f"- the bare engine: {Spread.of(bare).text(1)} tokens/s"
    for name, figures in others.get("latency", {}).items():
        ttft = " / ".join(f"{1000 * figures[key]:,.0f}" for key in ("ttft_p50_s", "ttft_p95_s"))
        itl = " / ".join(f"{1000 * figures[key]:,.1f}" for key in ("itl_p50_s", "itl_p95_s"))
        used = f"processor: clients {figures['client_s']:.2f} s, engine {figures['server_s']:.2f} s"
        yield f"- {name}: TTFT p50 / p95 {ttft} ms, ITL {itl} ms, {used}"
    for name, mb in others.get("anonymous_mb", {}).items():
        yield f"- {name}, without the mapped file: {mb:,.0f} MB"


def _quality_parts(records: list[Record]) -> Iterator[str]:
    """Yield each model's newest quality table: a speed says nothing without it."""
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(records, key=lambda each: str(each.facts["date"])):
        if record.others.get("quality"):
            newest[record.model, record.setting] = record
    for (model, setting), record in sorted(newest.items()):
        lines = [Quality(**line).cells() for line in record.others["quality"]]
        yield f"### {model}: quality{f' ({setting})' if setting else ''}\n"
        yield table(Quality.header(), lines) + "\n"
        yield f"- {caption(record.facts)}\n"


def _figure(value: float, unit: str) -> str:
    digits = 2 if unit in {"s", "ms"} else 0
    return f"{value:,.{digits}f} {unit}"


if __name__ == "__main__":
    main()
