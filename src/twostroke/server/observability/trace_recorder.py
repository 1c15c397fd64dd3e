"""Records requests as a trace for `twostroke simulate`: times, lengths and shared prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec.structs import replace

from twostroke.core.prompt_partings import PartingFinder
from twostroke.core.recorded_trace import SharedPrefixes, TracedRequest
from twostroke.core.request import FinishReason
from twostroke.server.storage.trace_file import TraceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from twostroke.core.recorded_trace import ServerSettings
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.output import Timings, Usage
    from twostroke.server.http.request_context import ServedRequest


@runtime_checkable
class RecordedWork(Protocol):
    """The part of `RunningAnswers` that a trace needs; requests without it are not recorded."""

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
        """The tokens of all answers of this request so far; None if it was never started."""


class TraceRecorder:
    """Records a workload for `twostroke simulate`: a JSON line for each answer that has ended.

    A line has times, lengths and shared prefixes (`TracedRequest`), but no text. These traces have
    nothing to do with OpenTelemetry's (`traces.py`).
    """

    def __init__(
        self, path: Path, settings: Callable[[], ServerSettings | None] = lambda: None
    ) -> None:
        """Open the trace at `path`; `settings()` returns the server's settings, if known.

        Raises:
            UsageError: as `TraceFile`.
        """
        self._settings = settings
        self._last_settings = settings()
        self._file = TraceFile(path, self._last_settings)
        self._prefixes = SharedPrefixes()
        self._partings = PartingFinder()

    def observe(self, served_request: ServedRequest) -> None:
        """Record the answers of a request that the engine has accepted."""
        work = served_request.running
        if not self._file.is_open or not isinstance(work, RecordedWork):
            return
        present_settings = self._settings()
        if present_settings is not None and present_settings != self._last_settings:
            self._last_settings = present_settings
            self._file.change_settings(present_settings)
        requests = []
        for index in range(len(work.prompts) * work.params.n):
            prompt = work.prompts[index // work.params.n]
            hashes = self._prefixes.hashes(served_request.tenant, prompt)
            shared = self._prefixes.add(hashes)
            request = self._traced(served_request, work, index, prompt, shared)
            parting = self._partings.add(served_request.tenant, prompt)
            if parting is not None:
                request = replace(
                    request, parts_at=parting.position, repeated_tokens=parting.num_repeated
                )
            requests.append(request)
        self._file.write(requests)

    def close(self) -> None:
        """Close the file; every line is already written."""
        self._file.close()

    def _traced(
        self,
        served_request: ServedRequest,
        work: RecordedWork,
        index: int,
        prompt: Sequence[int],
        shared: tuple[int, int] | None,
    ) -> TracedRequest:
        """Return the trace line for the answer `index` of a request.

        `prompt` has the token ids of this answer's prompt. `shared` has the number of lines back to
        the most similar earlier prompt, and the tokens that both share; None without one.
        """
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
            arrival_s=self._file.unix_s(arrival_s),
            prompt_tokens=len(prompt),
            output_tokens=num_output,
            cached_tokens=num_cached,
            ttft_s=None if timings is None else round(timings.first_token_s - arrival_s, 4),
            e2e_s=None if timings is None else round(timings.last_token_s - arrival_s, 4),
            service_tier=work.service_tier,
            outcome=outcome,
            tenant=self._file.tenant_hash(served_request.tenant),
            shared=shared,
        )

    @staticmethod
    def _num_unfinished_tokens(work: RecordedWork) -> int:
        """Return the mean number of tokens of a request's answers that have not ended."""
        num_open = len(work.prompts) * work.params.n - len(work.results)
        num_in_ended = sum(usage.completion_tokens for _, usage, _ in work.results.values())
        num_in_all = 0 if work.used is None else work.used.completion_tokens
        return max(0, num_in_all - num_in_ended) // num_open
