"""What the scripts print and keep: medians with their spread, Markdown tables, JSON, the date."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from twostroke.core.hardware import memory_total, num_cores, processor_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Spread:
    """A median between the lowest and the highest of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Sum up runs."""
        every = list(values)
        return cls(statistics.median(every), min(every), max(every))

    def text(self, digits: int = 0, unit: str = "") -> str:
        """Return `median (low to high)`."""
        shown = (f"{value:,.{digits}f}" for value in (self.median, self.low, self.high))
        median, low, high = shown
        return f"{median}{unit} ({low} to {high})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def machine_facts() -> dict[str, Any]:
    """Return when, where and from which commit a result is."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor_name(),
        "cores": num_cores(),
        "memory_bytes": memory_total(),
        "python": sys.version.split()[0],
        "commit": _commit(),
    }


def caption(facts: dict[str, Any], *more: str) -> str:
    """Return the facts as the line that stands under a table."""
    parts = [facts["date"], f"{facts['processor']}, {facts['cores']} cores"]
    return " · ".join([*parts, *more, f"commit {facts['commit']}"])


def save(name: str, result: dict[str, Any], text: str) -> None:
    """Print a report, and keep it as Markdown and its figures as JSON under `results/`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    print(text)
    write(RESULTS / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write(RESULTS / f"{name}.md", text + "\n")


def write(path: Path, text: str) -> None:
    """Put a text into a file, which keeps what it had if this fails half-way."""
    half = path.with_name(path.name + ".part")
    try:
        half.write_text(text)
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise SystemExit(f"{path} cannot be written: {error.strerror}.") from None


def note(message: str) -> None:
    """Say what goes on, beside the report."""
    print(message, file=sys.stderr, flush=True)


def _commit() -> str:
    """Return the commit's short name, with a + when the tree has changes; 'unknown' outside git."""
    try:
        name, changes = (
            subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + "+" * bool(changes)
