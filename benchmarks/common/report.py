"""Printed and stored reports: medians with their spread, Markdown tables, JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from twostroke.core.files import write_text
from twostroke.core.hardware import memory_total, num_cores, processor_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def spread(values: Iterable[float], digits: int = 0, unit: str = "") -> str:
    """Return `median (lowest to highest)` of several runs."""
    every = list(values)
    middle, low, high = (
        f"{value:,.{digits}f}" for value in (statistics.median(every), min(every), max(every))
    )
    return f"{middle}{unit} ({low} to {high})"


def positive(text: str) -> int:
    """Return the number in an argument, for argparse; it must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def non_negative(text: str) -> int:
    """Return the number in an argument, for argparse; it must be at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
    return number


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


def caption(facts: dict[str, Any], *more_facts: str) -> str:
    """Return the facts as the line under a table."""
    parts = [facts["date"], f"{facts['processor']}, {facts['cores']} cores"]
    return " · ".join([*parts, *more_facts, f"commit {facts['commit']}"])


def save(name: str, result: dict[str, Any], text: str) -> None:
    """Print a report, and keep it as Markdown and its figures as JSON under `results/`."""
    print(text)
    write(RESULTS / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write(RESULTS / f"{name}.md", text + "\n")


def write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a failure leaves the old text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}.") from None


def read(path: Path, kind: type[T]) -> T:
    """Return what `write` stored as JSON, as a dataclass."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"{path} is damaged ({error}): delete it, and measure again.") from None


def note(message: str) -> None:
    """Print progress to standard error, apart from the report."""
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
