"""Reads the traces that `--record-trace` records, and reports where their prompts diverge."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.files import open_regular_file
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.prompt_partings import Parting, PartingStatistics
from twostroke.core.recorded_trace import (
    BLOCK_TOKENS,
    TRACE_VERSION,
    ServerSettings,
    TracedRequest,
)
from twostroke.lab.simulator.load import (
    MAX_REQUESTS,
    MAX_TOKENS,
    RequestArrival,
    Workload,
    sorted_workload,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_HEADER_KEY: Final = "recorded_trace"
_SNIFFED_BYTES: Final = 4096  # of a file, in which the first lines are looked for
_SNIFFED_LINES: Final = 2  # the first may be cut
_OWN_FIELDS: Final = frozenset(("shared", "outcome", "ttft_s", "e2e_s", "tenant", "cached_tokens"))
_MAX_TIME_S: Final = 1e12
_MAX_STEP_BACK_S: Final = 60.0  # of the end of a line; after a longer step the clock differs
_MAX_PAUSE_S: Final = 86_400.0  # without any request; a longer one is another clock
NEWEST_LINES: Final = 20_000  # of a trace that is read while a server records it
_BLOCK_BYTES: Final = 1 << 20  # of a file that is read from its end
_MAX_LINE_BYTES: Final = 1 << 10  # on average, in a file that is read from its end


class RecordedTrace(Frozen):
    """The valid requests of a recorded trace, in the order in which they ended.

    Attributes:
        requests: the requests, with their times on one clock.
        earlier: for each request, the index of an earlier request whose prompt begins in the same
            way.
        notes: sentences about the parts of the file that are missing or were changed.
        settings: the settings of the server in its last run; None if unknown.
        num_with_settings: how many of the last requests were served with these settings.
        shift_s: the seconds by which the times of the last requests differ from the server's clock.
    """

    requests: tuple[TracedRequest, ...]
    earlier: tuple[int | None, ...]
    notes: tuple[str, ...] = ()
    settings: ServerSettings | None = None
    num_with_settings: int = 0
    shift_s: float = 0.0

    def arrivals(self) -> list[RequestArrival]:
        """Return the requests; where their prompts share a beginning, they have equal blocks."""
        # Only blocks that some later request shares need an id.
        num_shared = [
            request.shared[1] // BLOCK_TOKENS if request.shared is not None else 0
            for request in self.requests
        ]
        num_needed = num_shared.copy()
        for count, earlier in zip(num_shared, self.earlier, strict=True):
            if earlier is not None:
                num_needed[earlier] = max(num_needed[earlier], count)
        blocks: list[tuple[int, ...]] = []
        arrivals, num_ids = [], 0
        first_timed = len(self.requests) - self.num_with_settings
        for number, request in enumerate(self.requests):
            is_timed = number >= first_timed and request.outcome == "completed"
            earlier = self.earlier[number]
            shared_blocks = () if earlier is None else blocks[earlier][: num_shared[number]]
            num_new = num_needed[number] - len(shared_blocks)
            blocks.append((*shared_blocks, *range(num_ids, num_ids + num_new)))
            num_ids += num_new
            arrivals.append(
                RequestArrival(
                    at_s=request.arrival_s,
                    num_prompt=request.prompt_tokens,
                    num_output=max(1, request.output_tokens),  # the prompt may have been computed
                    blocks=blocks[-1],
                    block_size=BLOCK_TOKENS if blocks[-1] else 0,
                    recorded_e2e_s=request.e2e_s if is_timed else None,
                )
            )
        return arrivals

    def workload(self, name: str) -> Workload:
        """Return the requests as a workload, in the order of arrival."""
        load = sorted_workload(name, self.arrivals(), self.notes)
        return replace(load, settings=self.settings)


def is_recorded_trace(path: Path) -> bool:
    """Return whether a file is a recorded trace; its beginning may be missing."""
    with open_regular_file(path) as file:
        lines = file.read(_SNIFFED_BYTES).splitlines()
    for line in lines[:_SNIFFED_LINES]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (
            _HEADER_KEY in row or ("arrival_s" in row and _OWN_FIELDS & row.keys())
        ):
            return True
    return False


def read_recorded_trace(path: Path, *, newest_lines: int | None = None) -> RecordedTrace:
    """Return the valid requests of a recorded trace.

    Lines that are not requests, and requests that another version recorded, are left out; the notes
    tell how many. Where the clock jumps, the times after the jump are moved.

    With `newest_lines`, only this number of lines at the file's end is read, and the settings of
    the server before them, so that a file of any size takes little memory.

    Raises:
        UsageError: the file has no valid request, or more than a million without `newest_lines`.
    """
    reader = _LineReader()
    with open_regular_file(path) as file:
        lines: Iterable[bytes] = file
        if newest_lines is not None:
            part = _read_newest_part(file, newest_lines)
            if part is not None:
                lines = part
                reader = _LineReader(newest_lines)
        for number, line in enumerate(lines, 1):
            if line.strip():
                reader.add_line(number, line)
            if len(reader.requests) > MAX_REQUESTS:
                raise UsageError(f"{path.name} has more than {MAX_REQUESTS:,} requests: cut it.")
    notes = tuple(f"{path.name}: {note}" for note in reader.notes())
    if not reader.requests:
        raise UsageError(" ".join(notes) or f"{path.name} has no requests.")
    return RecordedTrace(
        tuple(reader.requests),
        tuple(reader.earlier),
        notes,
        settings=reader.settings,
        num_with_settings=len(reader.requests) - reader.first_with_settings,
        shift_s=reader.shift_s,
    )


def _read_newest_part(file: IO[bytes], count: int) -> list[bytes] | None:
    """Return the last header before the newest lines of a file, and these lines.

    Returns None if the file has no more lines.
    """
    position = file.seek(0, os.SEEK_END)
    lowest = max(0, position - count * _MAX_LINE_BYTES)
    blocks: list[bytes] = []
    num_lines = 0
    while position > lowest and num_lines <= count:
        size = min(_BLOCK_BYTES, position - lowest)
        position -= size
        file.seek(position)
        blocks.append(file.read(size))
        num_lines += blocks[-1].count(b"\n")
    newest = b"".join(reversed(blocks)).splitlines(keepends=True)
    if position == 0 and len(newest) <= count:
        file.seek(0)
        return None
    part = newest[1:][-count:]  # the first line is cut
    part_start = position + sum(map(len, newest)) - sum(map(len, part))
    header = _last_header(file, part_start)
    return part if header is None else [header, *part]


def _last_header(file: IO[bytes], end: int) -> bytes | None:
    """Return the last header before a position of a file, which is the start of a line."""
    begin = f'{{"{_HEADER_KEY}":'.encode()
    position = end
    while position > 0:
        size = min(_BLOCK_BYTES, position)
        position -= size
        file.seek(position)
        # A header may begin in this block and end in the next.
        offset = file.read(min(size + _SNIFFED_BYTES, end - position)).rfind(begin)
        if offset >= 0:
            file.seek(position + offset)
            return file.readline(_SNIFFED_BYTES)
    return None


class TenantReport(Frozen):
    """The prompts of one tenant of a recorded trace.

    Attributes:
        tenant: the hash of the tenant; empty without keys.
        num_prompts, num_tokens: the prompts and their tokens.
        partings: positions at which prompts diverge; positions with the most repeated tokens come
            first.
    """

    tenant: str
    num_prompts: int
    num_tokens: int
    partings: tuple[PartingStatistics, ...]


def report_prompts(trace: RecordedTrace) -> list[TenantReport]:
    """Return where the prompts of each tenant diverge; tenants with the most tokens come first.

    A trace has no text, so all prompts that diverge at the same position count as one parting.
    """
    reports = []
    for tenant in dict.fromkeys(request.tenant for request in trace.requests):
        requests = [request for request in trace.requests if request.tenant == tenant]
        partings: dict[int, PartingStatistics] = {}
        for request in requests:
            position = request.parts_at
            if position is None:
                continue
            statistics = partings.setdefault(position, PartingStatistics(position))
            num_after = max(0, request.prompt_tokens - position)
            statistics.add(Parting(position, num_after, request.repeated_tokens, key=position))
        ordered = sorted(partings.values(), key=lambda point: (-point.num_repeated, point.position))
        num_tokens = sum(request.prompt_tokens for request in requests)
        reports.append(TenantReport(tenant, len(requests), num_tokens, tuple(ordered)))
    return sorted(reports, key=lambda report: -report.num_tokens)


class _LineReader:
    """Reads the lines of a recorded trace one after another."""

    def __init__(self, newest_lines: int | None = None) -> None:
        """Read all lines of a file, or only its `newest_lines` lines."""
        self._newest_lines = newest_lines
        self.requests: list[TracedRequest] = []
        self.earlier: list[int | None] = []
        self.settings: ServerSettings | None = None
        self.first_with_settings = 0  # index of a request
        self._run: list[int | None] = []  # index of the request of each line after the last header
        self._is_other_version = False
        self._other_version: object = None
        self._num_of_other_version = self._num_damaged = self._num_unknown = self._num_jumps = 0
        self._first_damage = ""
        self.shift_s = 0.0  # added to times, after the clock has jumped
        self._last_end_s: float | None = None
        self._last_arrival_s = 0.0

    def add_line(self, number: int, line: bytes) -> None:
        """Read the next line of the file, which is not empty."""
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is not a JSON object")  # noqa: TRY004, TRY301 - as other faults
        except (ValueError, RecursionError):
            is_cut = not line.endswith(b"\n")
            self._skip(number, "it is cut off" if is_cut else "it is not a JSON object")
            return
        if _HEADER_KEY in row:
            self._start_run(row)
        elif self._is_other_version:
            self._num_of_other_version += 1
        else:
            try:
                request = _request(row)
            except ValueError as error:
                self._skip(number, str(error))
            else:
                self._add(request)

    def notes(self) -> list[str]:
        """Return sentences about the lines that were left out or changed."""
        notes = []
        if self._newest_lines is not None:
            notes.append(f"only its newest {self._newest_lines:,} lines are read.")
        if self._num_of_other_version or (self._is_other_version and not self.requests):
            lines = counted_noun(self._num_of_other_version, "request")
            notes.append(
                f"another version of Twostroke recorded {lines} (format {self._other_version}, "
                f"this version reads format {TRACE_VERSION}); they are left out."
            )
        if self._num_damaged:
            lines = counted_noun(self._num_damaged, "line is", "lines are")
            notes.append(f"{lines} left out. {self._first_damage}")
        if self._num_unknown and self._newest_lines is None:
            lines = counted_noun(self._num_unknown, "prompt begins", "prompts begin")
            notes.append(f"{lines} like a prompt that is not in the file; nothing is shared there.")
        if self._num_jumps:
            jumps = counted_noun(self._num_jumps, "time")
            notes.append(f"the clock jumps {jumps}; later arrivals follow without the jump.")
        return notes

    def _start_run(self, header: dict[str, Any]) -> None:
        if header.get("continues") is not True:
            self._run = []
        version = header[_HEADER_KEY]
        self._is_other_version = (
            version != TRACE_VERSION or header.get("block_tokens") != BLOCK_TOKENS
        )
        if self._is_other_version:
            self._other_version = version
            return
        settings = None
        with suppress(msgspec.ValidationError):
            settings = msgspec.convert(header.get("settings"), ServerSettings | None)
        if settings != self.settings:
            self.settings, self.first_with_settings = settings, len(self.requests)

    def _skip(self, number: int, reason: str) -> None:
        self._run.append(None)
        self._num_damaged += 1
        self._first_damage = self._first_damage or f"Line {number}: {reason}."

    def _add(self, request: TracedRequest) -> None:
        earlier = None
        if request.shared is not None:
            line = len(self._run) - request.shared[0]
            earlier = self._run[line] if line >= 0 else None
            if earlier is None:
                self._num_unknown += 1
                request = replace(request, shared=None)
        self._run.append(len(self.requests))
        self.requests.append(self._on_one_clock(request))
        self.earlier.append(earlier)

    def _on_one_clock(self, request: TracedRequest) -> TracedRequest:
        """Return a request with its time moved, if the clock has jumped before it.

        Lines are in the order in which requests ended, so a much earlier end, or a pause of a day,
        shows a jump of the clock.
        """
        duration_s = request.e2e_s or 0.0
        end_s = request.arrival_s + duration_s + self.shift_s
        last_end_s = self._last_end_s
        if last_end_s is not None:
            is_back = request.e2e_s is not None and end_s < last_end_s - _MAX_STEP_BACK_S
            is_pause = end_s - duration_s > last_end_s + _MAX_PAUSE_S
            if is_back or is_pause:
                self._num_jumps += 1
                self.shift_s += last_end_s - end_s + (duration_s if is_pause else 0.0)
                end_s = request.arrival_s + duration_s + self.shift_s
        self._last_end_s = end_s if last_end_s is None else max(last_end_s, end_s)
        if not self.shift_s:
            return request
        return replace(request, arrival_s=request.arrival_s + self.shift_s)


def _request(row: dict[str, Any]) -> TracedRequest:
    """Return the request of a line; raise ValueError with the reason if it is not valid."""
    try:
        request = msgspec.convert(row, TracedRequest)
    except msgspec.ValidationError as error:
        reason = str(error)
        raise ValueError(reason[:1].lower() + reason[1:]) from None
    if not 1 <= request.prompt_tokens <= MAX_TOKENS:
        raise ValueError(f"prompt_tokens must be from 1 to {MAX_TOKENS:,}")
    if not 0 <= request.output_tokens <= MAX_TOKENS:
        raise ValueError(f"output_tokens must be from 0 to {MAX_TOKENS:,}")
    if not -_MAX_TIME_S < request.arrival_s < _MAX_TIME_S:
        raise ValueError("arrival_s must be seconds of Unix time")
    if request.e2e_s is not None and not 0 <= request.e2e_s < _MAX_TIME_S:
        raise ValueError("e2e_s must be 0 or more seconds")
    if not 0 <= request.repeated_tokens <= request.prompt_tokens:
        raise ValueError("repeated_tokens must be from 0 to prompt_tokens")
    if request.shared is not None:
        lines_back, num_tokens = request.shared
        if lines_back < 1 or not 1 <= num_tokens <= request.prompt_tokens:
            raise ValueError(
                "shared must be two whole numbers: lines back, and tokens of the prompt"
            )
    return request
