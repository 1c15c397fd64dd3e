"""Records requests as a trace for `twostroke simulate`: times, lengths, shared beginnings."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from twostroke.core.errors import UsageError
from twostroke.core.recorded_trace import SharedPrefixes, TracedRequest, TraceHeader
from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.output import Timings, Usage
    from twostroke.server.http.request_context import ServedRequest

_TENANT_DIGITS: Final = 6
_NUM_COMPARED_BYTES: Final = len('{"recorded_trace":')  # of a header, before its version
_logger = logging.getLogger("twostroke.serve")


@runtime_checkable
class RecordedWork(Protocol):
    """The work on a request whose answers are recorded; embeddings are not."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of each prompt."""

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""

    @property
    def results(self) -> Mapping[int, tuple[FinishReason, Usage, Timings]]:
        """The results of the answers that have ended, by index."""

    @property
    def service_tier(self) -> str:
        """The service tier of the request."""

    @property
    def used(self) -> Usage | None:
        """The tokens that all answers have used so far."""


def check_trace_file(path: Path) -> None:
    """Check that a trace can be recorded to `path`, before a model is loaded.

    Raises:
        UsageError: the file cannot be written, is something else, or another server records to it.
    """
    os.close(_open_trace(path))


class TraceRecorder:
    """Appends a line to a trace for each answer of a request that has ended."""

    def __init__(self, path: Path) -> None:
        """Open the trace at `path`, which may have the requests of earlier runs.

        Raises:
            UsageError: the file cannot be written, is something else, or another server records
                to it.
        """
        self._path = path
        self._descriptor: int | None = _open_trace(path)
        self._epoch_s = time.time() - time.monotonic()  # a clock that is set has no effect
        self._tenant_key = secrets.token_bytes(16)
        self._prefixes = SharedPrefixes()
        self._write([msgspec.json.encode(TraceHeader())])

    def observe(self, served_request: ServedRequest) -> None:
        """Record the answers of a request that the engine has accepted."""
        work = served_request.running
        if self._descriptor is None or not isinstance(work, RecordedWork):
            return
        lines = []
        for index in range(len(work.prompts) * work.params.n):
            prompt = work.prompts[index // work.params.n]
            shared = self._prefixes.add(served_request.tenant, prompt)
            lines.append(
                msgspec.json.encode(self._traced(served_request, work, index, prompt, shared))
            )
        self._write(lines)

    def close(self) -> None:
        """Close the file; every line is already written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _traced(
        self,
        served_request: ServedRequest,
        work: RecordedWork,
        index: int,
        prompt: Sequence[int],
        shared: tuple[int, int] | None,
    ) -> TracedRequest:
        """Return the line of one answer of a request."""
        arrival_s = served_request.began_s
        result = work.results.get(index)
        if result is None:
            timings, outcome = None, "cancelled" if served_request.is_client_gone else "failed"
            num_cached, num_output = 0, self._num_unfinished_tokens(work)
        else:
            reason, usage, timings = result
            outcome = "failed" if reason is FinishReason.CANCEL else "completed"
            num_cached, num_output = usage.cached_tokens, usage.completion_tokens
        return TracedRequest(
            arrival_s=round(self._epoch_s + arrival_s, 3),
            prompt_tokens=len(prompt),
            output_tokens=num_output,
            cached_tokens=num_cached,
            ttft_s=None if timings is None else round(timings.first_token_s - arrival_s, 4),
            e2e_s=None if timings is None else round(timings.last_token_s - arrival_s, 4),
            service_tier=work.service_tier,
            outcome=outcome,
            tenant=self._tenant(served_request.tenant),
            shared=shared,
        )

    @staticmethod
    def _num_unfinished_tokens(work: RecordedWork) -> int:
        """Return the mean number of tokens of the answers that have not ended."""
        num_open = len(work.prompts) * work.params.n - len(work.results)
        num_in_ended = sum(usage.completion_tokens for _, usage, _ in work.results.values())
        num_in_all = 0 if work.used is None else work.used.completion_tokens
        return max(0, num_in_all - num_in_ended) // num_open

    def _tenant(self, name: str) -> str:
        """Return a short hash of a tenant's name, whose key is never stored."""
        if not name:
            return ""
        import hashlib

        digest = hashlib.blake2b(name.encode(), key=self._tenant_key, digest_size=8)
        return digest.hexdigest()[:_TENANT_DIGITS]

    def _write(self, lines: list[bytes]) -> None:
        """Append whole lines; stop recording if the disk is full, for example."""
        assert self._descriptor is not None
        text = b"".join(line + b"\n" for line in lines)
        try:
            size = os.fstat(self._descriptor).st_size
            if os.write(self._descriptor, text) < len(text):
                os.ftruncate(self._descriptor, size)  # without half a line
                raise OSError("the disk is full")  # noqa: TRY301 - one place stops the recording
        except OSError as error:
            reason = error.strerror or error
            _logger.warning("The trace %s is not recorded any further: %s.", self._path, reason)
            self.close()


def _open_trace(path: Path) -> int:
    """Return a descriptor of a trace that no other process records."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}."
        raise UsageError(reason, field="record_trace") from None
    reason = ""
    if not _is_trace_or_empty(descriptor):
        reason = f"must be a new file or a recorded trace, which {path.name} is not."
    with suppress(OSError):  # a file system without locks
        try:
            # Lines name earlier lines by their distance, so two servers cannot share a file.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = f"must be another file: another server records to {path.name}."
    if reason:
        os.close(descriptor)
        raise UsageError(reason, field="record_trace")
    return descriptor


def _is_trace_or_empty(descriptor: int) -> bool:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return True
    begin = msgspec.json.encode(TraceHeader())[:_NUM_COMPARED_BYTES]
    return os.pread(descriptor, len(begin), 0) in (b"", begin)
