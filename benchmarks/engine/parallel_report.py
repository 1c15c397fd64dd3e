"""The table of results of `make bench WHAT=parallel`, one line for each record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.common.report import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.common.records import Record

PREFIX = "parallel-"  # of the records' rows
HEADER = (
    "tokens/s: median (lowest to highest)", "base", "divided", "ratio", "goal",
    "in collectives", "predicted", "ranks wait", "disturbed runs",
)  # fmt: skip
_NOT_MEASURED = "–"
_ONE_PROCESS = "one process"


def line(record: Record) -> tuple[str, ...]:
    """Return the cells of a record, in the order of `HEADER`."""
    figures, names = record.others, list(record.engines)
    ratios, case = figures["ratios"], figures["case"]
    expected = figures["expected"]
    sides = [name.partition(", ")[2] for name in names[:2]]
    title = case["title"] if sides[0] == _ONE_PROCESS else " beside ".join([sides[1], sides[0]])
    title = f"{record.model}, {title}, {figures['link'] or 'no link'}"
    return (
        ": ".join([title, record.name.partition(": ")[2]]),
        *(_speed(record, name) for name in names[:2]),
        f"{figures['ratio']:.3f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "–",
        f"{case['at_least']:g}",
        f"{figures['collective_share']:.1%}" if figures["link"] else _NOT_MEASURED,
        _predicted(expected) if expected else _NOT_MEASURED,
        _shares(figures.get("waiting", ())),
        f"{record.disturbed_runs} of {record.num_runs}",
    )


def _speed(record: Record, name: str) -> str:
    best = record.best(name)
    return spread(best.runs) if best else record.failures.get(name, _NOT_MEASURED)


def _predicted(expected: dict[str, float]) -> str:
    parts = [f"{expected['collective_share']:.1%}"]
    if "waiting_share" in expected:
        shares = expected["waiting_share"], expected["moving_share"]
        parts.append("{:.1%} waiting, {:.1%} moving".format(*shares))
    return f"{' = '.join(parts)}; ratio {expected['ratio']:.2f}"


def _shares(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares) or _NOT_MEASURED
