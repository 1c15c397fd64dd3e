"""Files of measured runs: a record with every chunk, which `simulate --trace` reads, and CSV."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import UsageError
from twostroke.core.files import atomic_output, read_regular_file
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json
from twostroke.lab.bench.answers import MeasuredAnswer  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
)


class RunSetup(Frozen):
    """How a run was made, as a record keeps it.

    Attributes:
        url, model, api: the endpoint.
        load: the requests in words.
        num_clients: clients of a closed loop; None for an open loop.
        rate: mean requests per second of the schedule; None for a closed loop.
        date: when the run began, in ISO 8601.
        verdict: the audit's first line.
    """

    url: str
    model: str
    api: str
    load: str
    num_clients: int | None
    rate: float | None
    date: str
    verdict: str


class RunRecord(Frozen):
    """A measured run, as it is in a file."""

    setup: RunSetup
    answers: tuple[MeasuredAnswer, ...]


def write_record(path: Path, record: RunRecord) -> None:
    """Write a run to a file, whose `requests` are as in the files of `simulate --record`."""
    rows: list[dict[str, Any]] = []
    for answer in record.answers:
        row = msgspec.structs.asdict(answer)
        del row["log"]
        row["chunk_times_s"] = [round(at_s, 6) for at_s in answer.chunk_times_s]
        rows.append(row)
    fields = {
        "setup": record.setup,
        "requests": [answer.log for answer in record.answers],
        "answers": rows,
    }
    with atomic_output(path) as part:
        part.write_bytes(encode_json(fields) + b"\n")


def read_record(path: Path) -> RunRecord:
    """Return the run in a file.

    Raises:
        UsageError: the file cannot be read, or is not a record of `bench`.
    """
    try:
        fields = msgspec.json.decode(read_regular_file(path))
        rows = [
            {"log": log, **row}
            for log, row in zip(fields["requests"], fields["answers"], strict=True)
        ]
        return msgspec.convert({"setup": fields["setup"], "answers": rows}, RunRecord)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        reason = f"{path.name} is not a run of bench: write one by bench URL --record FILE."
        raise UsageError(reason) from None


def write_csv(path: Path, answers: Sequence[MeasuredAnswer]) -> None:
    """Write a line for each request to a file."""
    with atomic_output(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_CSV_COLUMNS)
        writer.writerows(map(_csv_row, answers))


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
