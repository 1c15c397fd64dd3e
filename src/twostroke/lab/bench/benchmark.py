"""Runs a benchmark of an endpoint: asks it, sends the load, reports, audits."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.process_tuning import raise_open_file_limit, without_garbage_collection
from twostroke.fleet.router.upstream import Address
from twostroke.lab.bench.audit import RunFacts, audit_run
from twostroke.lab.bench.endpoint import EndpointClient
from twostroke.lab.bench.preflight import ask_endpoint, count_tokens
from twostroke.lab.bench.prompts import PromptWriter
from twostroke.lab.bench.record import RunRecord, RunSetup
from twostroke.lab.bench.report import make_bench_report
from twostroke.lab.bench.requests_to_send import DatasetSource, WorkloadSource
from twostroke.lab.bench.runner import AnswerSender, LoadRunner, RunClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.audit import RunAudit
    from twostroke.lab.bench.preflight import EndpointFacts
    from twostroke.lab.bench.report import BenchReport
    from twostroke.lab.bench.request_form import RequestForm
    from twostroke.lab.bench.requests_to_send import DatasetPrompt, RequestSource
    from twostroke.lab.bench.runner import RunLimits
    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator.load import Workload

DEFAULT_TIMEOUT_S: Final = 600.0
_MIN_TOKENIZED_CHARS: Final = 40  # shorter answers say little about a count of tokens
_WATCH_INTERVAL_S: Final = 0.5


class BenchLoad(Frozen):
    """The load of a run.

    Attributes:
        workload: arrival times and lengths. With `prompts`, only the times are used.
        limits: clients of a closed loop, and the duration.
        prompts: the prompts of a file; empty for texts of the workload's lengths.
        max_output: the most tokens of an answer to a prompt of a file.
    """

    workload: Workload
    limits: RunLimits
    prompts: tuple[DatasetPrompt, ...] = ()
    max_output: int = 0

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at scheduled times."""
        return self.limits.num_clients is None

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts are meant to share prefixes; unknown, so true, for prompts of a file."""
        arrivals = self.workload.arrivals
        return bool(self.prompts) or any(a.blocks or a.num_shared for a in arrivals)

    def source(self, facts: EndpointFacts, salt: int) -> RequestSource:
        """Return the requests in the form that an endpoint takes."""
        if self.prompts:
            times_s = tuple(arrival.at_s for arrival in self.workload.arrivals)
            return DatasetSource(
                self.prompts, facts.form, default_max_output=self.max_output, times_s=times_s
            )
        return WorkloadSource(self.workload, PromptWriter(facts.sizes, salt), facts.form)


class BenchResult(Frozen):
    """A measured run: its record, its figures, and whether they can be trusted."""

    record: RunRecord
    report: BenchReport
    audit: RunAudit
    facts: RunFacts


class Benchmark:
    """A benchmark of an endpoint, from the first question to the audit."""

    def __init__(
        self, url: str, form: RequestForm, *, key: str | None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Prepare a benchmark of the endpoint at `url`, in the form that the user wants.

        Raises:
            UsageError: `url` is not the URL of a server.
        """
        self._form = form
        self._clock = RunClock()
        self._client = EndpointClient(
            Address.of(url, field="url"), key, now_s=self._clock.now_s, timeout_s=timeout_s
        )
        self._runner: LoadRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End the run now, from any thread or signal handler; its answers so far are reported."""
        if self._loop is not None and self._runner is not None:
            self._loop.call_soon_threadsafe(self._runner.stop)
        else:
            raise KeyboardInterrupt

    async def run(
        self,
        load: BenchLoad,
        objectives: Objectives,
        watch: Callable[[LoadRunner, float], None] = lambda _runner, _now_s: None,
    ) -> BenchResult:
        """Ask the endpoint, run the load, and return the result.

        `watch` is called twice a second with the runner and the time.

        Raises:
            EndpointRefusedError: the endpoint cannot be measured.
            KeyboardInterrupt: `stop` was called before the first answer.
            UsageError: the endpoint has several models, and none was named; or the duration ends
                before the first request.
        """
        raise_open_file_limit()
        try:
            endpoint = await ask_endpoint(self._client, self._form)
            source = load.source(endpoint, random.SystemRandom().randrange(1 << 62))
            sender = AnswerSender(self._client, endpoint.form)
            runner = LoadRunner(sender.send, source, self._clock, load.limits)
            self._runner, self._loop = runner, asyncio.get_running_loop()
            date = datetime.now(UTC).isoformat(timespec="seconds")
            watcher = asyncio.create_task(_watch(runner, self._clock, watch))
            cpu_s, wall_s = time.process_time(), time.monotonic()
            try:
                with without_garbage_collection():
                    await runner.run()
            finally:
                watcher.cancel()
            cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
            answers = sorted(runner.answers, key=lambda answer: answer.log.timings.arrival_s)
            if not answers and runner.is_stopped:
                raise KeyboardInterrupt
            if not answers:
                raise UsageError("ends before the first request is due.", field="duration_s")
            facts = RunFacts(
                is_open=load.is_open,
                is_interrupted=runner.is_stopped,
                shares_prefixes=load.shares_prefixes,
                wants_lengths=not load.prompts,
                ignores_end=endpoint.form.ignores_end,
                has_usage=endpoint.has_usage,
                prompt_overhead=endpoint.sizes.overhead,
                client_share=cpu_s / max(wall_s, 1e-9),
                tokenized=await self._tokenize(answers, endpoint),
            )
        finally:
            self._client.close()
        report = make_bench_report(answers, objectives)
        audit = audit_run(answers, report, facts)
        setup = RunSetup(
            url=self._client.address.url,
            model=endpoint.form.model,
            api=endpoint.form.api,
            load=load.workload.name,
            num_clients=load.limits.num_clients,
            rate=load.workload.rate if load.is_open else None,
            date=date,
            verdict=audit.verdict,
        )
        # Texts were for the audit; a record without them is smaller, and has no private text.
        without_texts = tuple(replace(answer, text="") for answer in answers)
        return BenchResult(RunRecord(setup, without_texts), report, audit, facts)

    async def _tokenize(
        self, answers: Sequence[MeasuredAnswer], endpoint: EndpointFacts
    ) -> dict[int, int]:
        """Return the tokens of some answers' texts by the endpoint's tokenizer, by number."""
        counts: dict[int, int] = {}
        if not endpoint.has_tokenizer:
            return counts
        for answer in answers:
            if answer.is_completed and len(answer.text) >= _MIN_TOKENIZED_CHARS:
                count = await count_tokens(self._client, endpoint.form.model, answer.text)
                if count is not None:
                    counts[answer.number] = count
        return counts


async def _watch(
    runner: LoadRunner, clock: RunClock, watch: Callable[[LoadRunner, float], None]
) -> None:
    while True:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        watch(runner, clock.now_s())
