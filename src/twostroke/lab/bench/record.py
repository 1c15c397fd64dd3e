"""Files of measured runs: records with every chunk, which `simulate --trace` reads, and CSV."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import UsageError
from twostroke.core.files import atomic_output, read_regular_file
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.lab.bench.answers import MeasuredAnswer  # noqa: TC001 - msgspec reads it
from twostroke.lab.bench.audit import AuditFinding  # noqa: TC001
from twostroke.lab.bench.capacity import GoodputCapacity, LoadPoint  # noqa: TC001
from twostroke.lab.bench.resources import RunResources
from twostroke.lab.measure.requests import Objectives

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RECORD_VERSION: Final = 1  # raise it when this version's readers would misunderstand a record
_CSV_COLUMNS: Final = (
    "number",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "last_token_s",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "chunks",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "outcome",
    "failure",
    "run",
)


class RunSetup(Frozen):
    """The conditions of a run, as its record stores them.

    Attributes:
        url, model, api: the endpoint.
        load: the requests in words.
        num_clients: clients of a closed loop; None for an open loop.
        rate: mean requests per second of the schedule; None for a closed loop.
        date: when the run began, in ISO 8601.
        verdict: the audit's first line.
        objectives: the objectives whose share of requests was counted.
        is_interrupted: whether Ctrl-C ended the run.
        is_hopeless: whether the run ended early because too few requests could still meet the
            objectives.
    """

    url: str
    model: str
    api: str
    load: str
    num_clients: int | None
    rate: float | None
    date: str
    verdict: str
    objectives: Objectives = Objectives()
    is_interrupted: bool = False
    is_hopeless: bool = False

    @property
    def load_name(self) -> str:
        """The load in a few words, such as "8 clients" or "2/s"."""
        if self.num_clients is not None:
            return counted_noun(self.num_clients, "client")
        return self.load if self.rate is None else f"{self.rate:.3g}/s"


class RunRecord(Frozen):
    """A measured run, as it is in a file.

    Attributes:
        setup: how the run was made.
        answers: every request.
        findings: the audit's findings.
        resources: energy, work and costs.
        command: the command that made the run; empty if it was called from Python.
        client_version: the version of Twostroke that made the run.
    """

    setup: RunSetup
    answers: tuple[MeasuredAnswer, ...]
    findings: tuple[AuditFinding, ...] = ()
    resources: RunResources = RunResources()
    command: str = ""
    client_version: str = ""


class SweepRecord(Frozen):
    """The measured runs of a sweep, as they are in a file.

    Attributes:
        points: the runs, in the order in which they were made.
        loads: the figures of each run for the search.
        capacity: the result of a search; None for a list of loads.
        is_interrupted: whether Ctrl-C ended the sweep; its last run may then be incomplete.
    """

    points: tuple[RunRecord, ...]
    loads: tuple[LoadPoint, ...] = ()
    capacity: GoodputCapacity | None = None
    is_interrupted: bool = False


def write_record(path: Path, record: RunRecord) -> None:
    """Write a run to a file, whose `requests` are as in the files of `simulate --record`."""
    _write_json(path, _run_fields(record))


def write_sweep(path: Path, sweep: SweepRecord) -> None:
    """Write the runs of a sweep to a file; each of its `points` is like the file of one run."""
    fields = {"version": RECORD_VERSION, **msgspec.structs.asdict(sweep)}
    _write_json(path, fields | {"points": [_run_fields(record) for record in sweep.points]})


def read_record(path: Path) -> RunRecord:
    """Return the run in a file.

    Raises:
        UsageError: the file cannot be read, or is not the record of one run of `bench`.
    """
    sweep = read_sweep(path)
    if sweep.loads:
        reason = f"{path.name} is a sweep of several loads, not the run of one load."
        raise UsageError(reason)
    return sweep.points[0]


def read_sweep(path: Path) -> SweepRecord:
    """Return the runs in a file: the loads of a sweep, or a single run.

    Raises:
        UsageError: the file cannot be read, or is not a record that this version understands.
    """
    fields = _read_fields(path)
    try:
        if "points" not in fields:
            return SweepRecord((_run_of_fields(fields),))
        points = tuple(map(_run_of_fields, fields["points"]))
        about = msgspec.convert({**fields, "points": []}, SweepRecord)
        return msgspec.structs.replace(about, points=points)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError):
        reason = f"{path.name} is not a run of bench: write one by bench URL --record FILE."
        raise UsageError(reason) from None


def _read_fields(path: Path) -> dict[str, Any]:
    """Return the JSON object of a record of this version."""
    try:
        fields = msgspec.json.decode(read_regular_file(path))
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UsageError(
            f"{path.name} is not a run of bench, or it is cut off: it is not JSON."
        ) from None
    if not isinstance(fields, dict):
        fields = {}
    version = fields.get("version", RECORD_VERSION)
    if version != RECORD_VERSION:
        raise UsageError(
            f"{path.name} was written by another version of Twostroke: its record has version "
            f"{version!r}, and this version reads {RECORD_VERSION}."
        )
    return fields


def _run_of_fields(fields: dict[str, Any]) -> RunRecord:
    rows = [
        {"log": log, **row} for log, row in zip(fields["requests"], fields["answers"], strict=True)
    ]
    return msgspec.convert({**fields, "answers": rows}, RunRecord)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    with atomic_output(path) as part:
        part.write_bytes(encode_json(fields) + b"\n")


def _run_fields(record: RunRecord) -> dict[str, Any]:
    """Return the fields of a run in a file."""
    rows: list[dict[str, Any]] = []
    for answer in record.answers:
        row = msgspec.structs.asdict(answer)
        del row["log"]
        for name in ("chunk_times_s", "empty_chunk_times_s"):
            row[name] = [round(at_s, 6) for at_s in row[name]]
        rows.append(row)
    return {
        "version": RECORD_VERSION,
        "setup": record.setup,
        "findings": record.findings,
        "resources": record.resources,
        "command": record.command,
        "client_version": record.client_version,
        "requests": [answer.log for answer in record.answers],
        "answers": rows,
    }


def write_csv(path: Path, runs: Sequence[Sequence[MeasuredAnswer]]) -> None:
    """Write a line for each request to a file; the column `run` has the number of its run."""
    with atomic_output(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_CSV_COLUMNS)
        for number, answers in enumerate(runs, 1):
            writer.writerows([*_csv_row(answer), number] for answer in answers)


def _csv_row(answer: MeasuredAnswer) -> list[object]:
    log = answer.log
    timings, latencies = log.timings, log.latencies
    times_s = (timings.arrival_s, log.sent_s, timings.first_token_s, timings.last_token_s)
    in_ms = [
        "" if value is None or not answer.is_completed else round(value * 1e3, 3)
        for value in (latencies["ttft"], latencies["tpot"], latencies["e2e"])
    ]
    return [
        answer.number,
        *("" if not at_s and answer.failure else round(at_s, 6) for at_s in times_s),
        log.num_prompt,
        log.num_output,
        log.num_cached,
        len(answer.chunk_times_s),
        *in_ms,
        log.outcome,
        answer.failure,
    ]
