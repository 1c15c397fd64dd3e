"""Stored results of `make bench WHAT=speculation`, and their tables in BENCHMARKS.md.

A result is a task with a number of streams; a new measurement replaces the old one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.common.records import ROWS, machine_slug
from benchmarks.common.report import caption, machine_facts, read, spread, table, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MIN_SPEED_RATIO = 0.98  # of the speed without drafts that `auto` may never be below


@dataclass(frozen=True, slots=True)
class Line:
    """A task answered without and with drafts, round by round.

    `ratios` are the speed-ups by drafts, `steady` the speed-up if all steps of as many rows
    took the same time (`speculation.Usual`), `plain` and `guessed` tokens a second without and with
    drafts,
    `per_pass` the tokens of a stream that a step brought, `accepted` the share of accepted drafts.
    """

    task: str
    streams: int
    ratios: list[float]
    steady: float
    plain: list[float]
    guessed: list[float]
    per_pass: float
    accepted: float
    disturbed_runs: int
    facts: dict[str, Any] = field(default_factory=machine_facts)

    def cells(self) -> tuple[str, ...]:
        """Return the line as cells of a table."""
        return (
            self.task,
            str(self.streams),
            spread(self.plain),
            spread(self.guessed),
            spread(self.ratios, 2, " x"),
            f"{self.steady:.2f} x",
            f"{self.per_pass:.2f}",
            f"{self.accepted:.0%}",
            f"{self.disturbed_runs} of {len(self.plain) + len(self.guessed)}",
        )


@dataclass(frozen=True, slots=True)
class PredictionResult:
    """Answers with a prediction of which a chosen share of the tokens is right."""

    share: float
    ratios: list[float]
    accepted: float
    per_pass: float  # drafts a step

    @property
    def predicted(self) -> float:
        """The formula's speed-up: tokens a step, if `share` of the drafts are accepted."""
        if self.share == 1:
            return 1 + self.per_pass
        return float((1 - self.share ** (self.per_pass + 1)) / (1 - self.share))


@dataclass(slots=True)
class SpeculationResult:
    """All lines of one model and one proposer of drafts, by `name`."""

    name: str
    lines: list[Line]
    chosen: list[PredictionResult] = field(default_factory=list)

    def save(self) -> None:
        """Store the lines, in place of earlier ones of the same tasks on such a machine."""
        before = load_result(self.name)
        new = {(line.task, line.streams) for line in self.lines}
        self.lines += [line for line in before.lines if (line.task, line.streams) not in new]
        self.chosen = self.chosen or before.chosen
        path = _path(self.name)
        write(path, json.dumps(msgspec.to_builtins(self), indent=1) + "\n")

    def parts(self) -> Iterator[str]:
        """Yield the paragraphs of a report."""
        tasks = list(dict.fromkeys(line.task for line in self.lines))
        lines = sorted(self.lines, key=lambda line: (tasks.index(line.task), line.streams))
        header = (
            *("task", "streams", "without, tokens/s", "with", "faster", "steady"),
            *("tokens a step", "guesses right", "disturbed runs"),
        )
        yield f"### Speculation: {self.name}\n"
        yield table(header, [line.cells() for line in lines]) + "\n"
        yield (
            "Faster: the median of the rounds, as measured. Steady: the same steps, if all of one "
            "size took the same time.\n"
        )
        if self.chosen:
            yield from self._chosen_parts()
        newest = max(lines, key=lambda line: str(line.facts["date"]))
        yield f"- {caption(newest.facts, 'the newest line')}\n"

    def _chosen_parts(self) -> Iterator[str]:
        header = ("of the prediction right", "guesses right", "guesses a step", "faster", "if free")
        yield table(header, [_chosen_cells(row) for row in self.chosen]) + "\n"
        yield (
            "If free is (1 - a^(g + 1)) / (1 - a) for g guesses a step, each right with "
            "probability a: the speed-up if the rows of guesses took no time.\n"
        )


def load_result(name: str) -> SpeculationResult:
    """Return the stored result of a machine like this, empty if there is none.

    Raises:
        SystemExit: its file cannot be read.
    """
    path = _path(name)
    return read(path, SpeculationResult) if path.exists() else SpeculationResult(name, [])


def load_results(machine: str) -> list[SpeculationResult]:
    """Return all stored results of a machine."""
    return [
        read(path, SpeculationResult)
        for path in sorted((ROWS / machine / "guessing").glob("*.json"))
    ]


def describe_smallest_gain(lines: Sequence[Line]) -> str:
    """Describe the task with the smallest speed-up by drafts."""
    worst = min(lines, key=lambda line: line.steady)
    return (
        f"The least steady one is {worst.steady:.2f} x ({worst.task}, {worst.streams} "
        f"streams); `auto` is meant never to be below {MIN_SPEED_RATIO}."
    )


def _slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def _path(name: str) -> Path:
    return ROWS / machine_slug(machine_facts()) / "guessing" / f"{_slug(name)}.json"


def _chosen_cells(prediction: PredictionResult) -> tuple[str, ...]:
    return (
        f"{prediction.share:.0%}",
        f"{prediction.accepted:.0%}",
        f"{prediction.per_pass:.1f}",
        spread(prediction.ratios, 2, " x"),
        f"{prediction.predicted:.2f} x",
    )
