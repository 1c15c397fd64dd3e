"""Reads workloads from traces of requests: published traces, CSV, JSON Lines, recorded runs."""

from __future__ import annotations

import csv
import json
import math
import urllib.request
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core import env
from twostroke.core.errors import DownloadError, UsageError, nearest
from twostroke.core.files import move_into_place, open_regular_file, read_regular_file
from twostroke.core.frozen import Frozen
from twostroke.lab.measure.requests import RequestLog  # noqa: TC001 - msgspec reads it
from twostroke.lab.simulator.load import MAX_REQUESTS, RequestArrival, Workload, sorted_workload
from twostroke.lab.simulator.recorded_traces import is_recorded_trace, read_recorded_trace
from twostroke.model.hub.disk import file_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_AZURE: Final = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
)
_MOONCAKE: Final = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
    "3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces"
)
_MAX_BYTES: Final = 1 << 30
_BLOCK_TOKENS: Final = 512  # tokens of the block that a hash id identifies
_TIME_COLUMNS: Final = ("arrival_s", "at_s", "timestamp")
_PROMPT_COLUMNS: Final = (
    "prompt_tokens",
    "input_length",
    "contexttokens",
    "input_tokens",
    "num_prompt",
)
_OUTPUT_COLUMNS: Final = ("output_tokens", "output_length", "generatedtokens", "num_output")


class PublishedTrace(Frozen):
    """A public trace of requests to a real service: its file's address and checksum."""

    url: str
    sha256: str


# Azure Public Dataset, 2023 (CC-BY 4.0); Mooncake, FAST'25 (Apache-2.0). Read on 2026-11-25.
PUBLISHED_TRACES: Final = {
    "azure-conv": PublishedTrace(
        f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    "azure-code": PublishedTrace(
        f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    "mooncake-conversation": PublishedTrace(
        f"{_MOONCAKE}/conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "mooncake-synthetic": PublishedTrace(
        f"{_MOONCAKE}/synthetic_trace.jsonl",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
}
_SUFFIXES: Final = (".csv", ".jsonl", ".json")


def read_trace(name: str, *, newest_lines: int | None = None) -> Workload:
    """Return the workload of a published trace of requests, or of a file.

    A CSV file names its columns in the first line, and each JSON line names its values: a time
    (`arrival_s` in seconds; `timestamp` as a date, or in milliseconds in JSON), the numbers of
    tokens of prompt and answer, and optionally `hash_ids` of the prompt's blocks. A `.json` file is
    a recorded run. A trace that `--record-trace` has recorded may have any name; with
    `newest_lines`, only this number of lines at its end is read, so that it may have any size.

    Raises:
        UsageError: there is no such trace, or a line is not a request; the message names the
            line.
        DownloadError: the trace cannot be fetched, or is damaged.
    """
    published = PUBLISHED_TRACES.get(name)
    path = env.expand_home(name) if published is None else _published_file(name, published)
    if path.suffix not in _SUFFIXES and not path.is_file():
        raise UsageError(
            f"must be {', '.join(PUBLISHED_TRACES)}, or a file; got '{{value}}'."
            f"{nearest(name, PUBLISHED_TRACES)}",
            field="trace",
            value=name,
        )
    try:
        load = _read_file(path, newest_lines)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not UTF-8 text.") from None
    return load.named(path.name if published is None else name)


def _read_file(path: Path, newest_lines: int | None = None) -> Workload:
    is_recorded = is_recorded_trace(path)
    if is_recorded and newest_lines is not None:
        return read_recorded_trace(path, newest_lines=newest_lines).workload(path.name)
    if path.stat().st_size > _MAX_BYTES:
        raise UsageError(f"{path.name} is larger than 1 GiB: cut it.")
    if is_recorded:
        return read_recorded_trace(path).workload(path.name)
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            f"{path.name} is not a trace that --record-trace has recorded; other files must be "
            f"{', '.join(_SUFFIXES)}."
        )
    arrivals = _recorded_run(path) if path.suffix == ".json" else _lines(path)
    if not arrivals:
        raise UsageError(f"{path.name} has no requests.")
    return sorted_workload(path.name, arrivals)


def _lines(path: Path) -> list[RequestArrival]:
    rows = _csv_rows(path) if path.suffix == ".csv" else _json_rows(path)
    arrivals: list[RequestArrival] = []
    for line, row in rows:
        if len(arrivals) == MAX_REQUESTS:
            raise UsageError(f"{path.name} has more than {MAX_REQUESTS:,} requests: cut it.")
        try:
            arrivals.append(_arrival(row, is_json=path.suffix == ".jsonl"))
        except ValueError as error:
            raise UsageError(f"{path.name}, line {line}: {error}.") from None
    return arrivals


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with TextIOWrapper(open_regular_file(path), "utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            head: list[str] = next((row for row in reader if "".join(row).strip()), [])
            if not head:
                return  # the file has no requests
            names = [name.strip().lower() for name in head]
            for columns in (_TIME_COLUMNS, _PROMPT_COLUMNS, _OUTPUT_COLUMNS):
                if not set(columns) & set(names):
                    reason = f"its first line must name a column {' or '.join(columns)}"
                    raise UsageError(f"{path.name}, line 1: {reason}.")
            for row in reader:
                if row:
                    yield reader.line_num, dict(zip(names, row, strict=False))
        except csv.Error as error:
            raise UsageError(f"{path.name}, line {reader.line_num}: {error}.") from None


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with TextIOWrapper(open_regular_file(path), "utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UsageError(f"{path.name}, line {number}: it is not a JSON object.")
            yield number, {str(name).lower(): value for name, value in row.items()}


def _arrival(row: Mapping[str, Any], *, is_json: bool) -> RequestArrival:
    """Return the request that a line of a trace describes.

    Raises ValueError, with the reason, if the line is not valid.
    """
    prompt, output = _count(row, _PROMPT_COLUMNS), _count(row, _OUTPUT_COLUMNS)
    ids = row.get("hash_ids", ()) if is_json else ()
    if not isinstance(ids, list | tuple) or not all(_is_id(value) for value in ids):
        raise ValueError("hash_ids must be a list of whole numbers from 0 on")
    return RequestArrival(
        at_s=_seconds(row, is_json=is_json),
        num_prompt=prompt,
        num_output=output,
        blocks=tuple(ids),
        block_size=_BLOCK_TOKENS if ids else 0,
    )


def _count(row: Mapping[str, Any], names: tuple[str, ...]) -> int:
    name, value = _value(row, names)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 1 <= number <= 1 << 24 or number != int(number):
        raise ValueError(f"{name} must be a whole number from 1 to {1 << 24}, got {value!r}")
    return int(number)


def _seconds(row: Mapping[str, Any], *, is_json: bool) -> float:
    name, value = _value(row, _TIME_COLUMNS)
    try:
        seconds = float(value)
        if is_json and name == "timestamp":
            seconds /= 1000
    except (TypeError, ValueError, OverflowError):
        try:
            date = datetime.fromisoformat(str(value).strip())
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            seconds = math.nan
    if not -1e12 < seconds < 1e12:
        raise ValueError(f"{name} must be seconds or a date, got {value!r}")
    return seconds


def _value(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the name and value of the first of several columns that a row of a trace has."""
    for name in names:
        if row.get(name) not in (None, ""):
            return name, row[name]
    raise ValueError(f"{' or '.join(names)} is missing")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _recorded_run(path: Path) -> list[RequestArrival]:
    """Return the requests of a recorded run, which was measured or simulated."""

    class Recorded(Frozen):
        requests: tuple[RequestLog, ...]

    text = read_regular_file(path)
    if not text.strip():
        return []
    try:
        recorded = msgspec.json.decode(text, type=Recorded)
    except msgspec.DecodeError as error:
        reason = f"{path.name} is not a recorded run, which has a list of requests: {error}."
        raise UsageError(reason) from None
    arrivals = []
    for number, request in enumerate(recorded.requests, 1):
        counts = {"num_prompt": request.num_prompt, "num_output": max(1, request.num_output)}
        try:
            row = {"arrival_s": request.timings.arrival_s, **counts}
            arrivals.append(_arrival(row, is_json=False))
        except ValueError as error:
            raise UsageError(f"{path.name}, request {number}: {error}.") from None
    return arrivals


def _published_file(name: str, trace: PublishedTrace) -> Path:
    """Return the path of a published trace's file, which is downloaded at the first use."""
    path = env.cache_dir() / "traces" / Path(trace.url).name
    advice = f"Fetch {trace.url} in another way, and put it there or give its path to --trace."
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            with urllib.request.urlopen(trace.url, timeout=30) as answer:  # noqa: S310 https, fixed
                part.write_bytes(answer.read(_MAX_BYTES))
            move_into_place(part, path)
        except OSError as error:  # also URLError
            reason = getattr(error, "reason", None) or error.strerror or error
            raise DownloadError(f"{name} cannot be fetched to {path}: {reason}. {advice}") from None
    if file_sha256(path, lambda _: None) != trace.sha256:
        raise DownloadError(f"{path} is not the published file: delete it. {advice}")
    return path
