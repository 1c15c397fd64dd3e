"""Runs a benchmark: asks the endpoint for its facts, sends the load, reports and audits."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke import __version__
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.process_tuning import raise_open_file_limit, without_garbage_collection
from twostroke.fleet.router.upstream import Address
from twostroke.lab.bench.audit import RunFacts, audit_run
from twostroke.lab.bench.conversations import ConversationShape, ConversationSource
from twostroke.lab.bench.endpoint import EndpointClient, TlsTrust
from twostroke.lab.bench.preflight import ask_endpoint, count_tokens, send_short_prompt
from twostroke.lab.bench.prompts import PromptWriter
from twostroke.lab.bench.record import RunRecord, RunSetup
from twostroke.lab.bench.report import make_bench_report
from twostroke.lab.bench.requests_to_send import DatasetSource, WorkloadSource
from twostroke.lab.bench.resources import BenchMachine, ResourceMeter
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

    Watch = Callable[[LoadRunner, float], None]  # gets the runner and the time of the run's clock

DEFAULT_TIMEOUT_S: Final = 600.0
_MIN_TOKENIZED_CHARS: Final = 40  # shorter answers say little about a count of tokens
_WATCH_INTERVAL_S: Final = 0.5


class BenchLoad(Frozen):
    """The load of a run.

    Attributes:
        workload: arrival times and lengths. With `prompts`, only the times are used.
        limits: clients of a closed loop, and the duration.
        changes: whether the load is meant to change, as a trace's load is.
        prompts: the prompts of a file; empty if texts of the workload's lengths are sent.
        max_output: the most tokens of an answer to a prompt of a file.
        conversation: how requests form conversations; None for independent requests.
        keeps_texts: whether all texts are stored, so that the endpoint's tokenizer counts the
            tokens of all answers after the run; otherwise of a few.
    """

    workload: Workload
    limits: RunLimits
    changes: bool = False
    prompts: tuple[DatasetPrompt, ...] = ()
    max_output: int = 0
    conversation: ConversationShape | None = None
    keeps_texts: bool = False

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at scheduled times."""
        return self.limits.num_clients is None

    @property
    def has_calls(self) -> bool:
        """Whether requests ask for tool calls."""
        return self.conversation is not None and self.conversation.num_calls > 0

    @property
    def num_planned(self) -> int:
        """The number of requests; an open loop counts the requests due within the duration."""
        arrivals, duration_s = self.workload.arrivals, self.limits.duration_s
        count = len(self.prompts) or len(arrivals)
        if not self.is_open or duration_s is None:
            return count
        return max(1, sum(arrival.at_s <= duration_s for arrival in arrivals[:count]))

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts are meant to share prefixes; unknown, so true, for prompts of a file."""
        arrivals = self.workload.arrivals
        if self.conversation is not None and self.conversation.num_requests > 1:
            return True
        return bool(self.prompts) or any(a.blocks or a.num_shared for a in arrivals)

    def source(self, facts: EndpointFacts, salt: int) -> RequestSource:
        """Return the requests in the form that the endpoint with these `facts` accepts.

        `salt` makes the prompts differ from the prompts of other runs.
        """
        if self.prompts:
            times_s = tuple(arrival.at_s for arrival in self.workload.arrivals)
            return DatasetSource(
                self.prompts, facts.form, default_max_output=self.max_output, times_s=times_s
            )
        writer = PromptWriter(facts.sizes, salt)
        if self.conversation is not None:
            return ConversationSource(
                self.workload, self.conversation, writer, facts.form, has_tools=facts.has_tools
            )
        return WorkloadSource(self.workload, writer, facts.form)


class BenchResult(Frozen):
    """A measured run: its record, its figures, and whether they can be trusted."""

    record: RunRecord
    report: BenchReport
    audit: RunAudit
    facts: RunFacts


class Benchmark:
    """A benchmark of an endpoint: asks for its facts, runs the load, and audits the result.

    Attributes:
        is_stopped: whether `stop` was called.
    """

    def __init__(
        self,
        url: str,
        form: RequestForm,
        *,
        key: str | None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        machine: BenchMachine = BenchMachine(),  # noqa: B008 - it is frozen
        command: str = "",
        trust: TlsTrust = TlsTrust(),  # noqa: B008 - it is frozen
    ) -> None:
        """Prepare a benchmark of the endpoint at `url`, with requests of the given form.

        `machine` describes the endpoint's machine. `command` is stored in the record. `trust` says
        which certificates are accepted.

        Raises:
            UsageError: `url` is not the URL of a server; or energy must be counted, and cannot be.
        """
        self.is_stopped = False
        self._form = form
        self._clock = RunClock()
        self._client = EndpointClient(
            Address.of(url, field="url"),
            key,
            now_s=self._clock.now_s,
            timeout_s=timeout_s,
            trust=trust,
        )
        self._meter = ResourceMeter(self._client, machine)
        self._command = command
        self._endpoint: EndpointFacts | None = None
        self._runner: LoadRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End the run now; the answers so far are reported.

        May be called from any thread or signal handler.
        """
        self.is_stopped = True
        if self._loop is not None and self._runner is not None:
            self._loop.call_soon_threadsafe(self._runner.stop)
        else:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Close all connections to the endpoint."""
        self._client.close()

    async def run(
        self, load: BenchLoad, objectives: Objectives, watch: Watch = lambda _runner, _now_s: None
    ) -> BenchResult:
        """Measure one load, as `measure` does, and close the connections."""
        try:
            return await self.measure(load, objectives, watch)
        finally:
            self.close()

    async def measure(
        self, load: BenchLoad, objectives: Objectives, watch: Watch = lambda _runner, _now_s: None
    ) -> BenchResult:
        """Ask the endpoint for its facts, once, then run the load and return the result.

        `watch` is called twice a second with the runner and the time.

        Raises:
            EndpointRefusedError: the endpoint cannot be measured.
            KeyboardInterrupt: `stop` was called before the first answer.
            UsageError: the endpoint has several models, and the user named none; or the duration
                ends before the first request.
        """
        raise_open_file_limit()
        if self._endpoint is None:
            self._endpoint = await ask_endpoint(self._client, self._form, asks_tools=load.has_calls)
        endpoint = self._endpoint
        source = load.source(endpoint, random.SystemRandom().randrange(1 << 62))
        sender = AnswerSender(self._client, endpoint.form, keeps_texts=load.keeps_texts)
        runner = LoadRunner(sender.send, source, self._clock, load.limits)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        watcher = asyncio.create_task(_watch(runner, self._clock, watch))
        try:
            async with self._meter.measure(endpoint.form.model):
                self._runner, self._loop = runner, asyncio.get_running_loop()
                cpu_s, wall_s = time.process_time(), time.monotonic()
                with without_garbage_collection():
                    await runner.run()
                cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        finally:
            watcher.cancel()
            self._runner = None
        answers = sorted(runner.answers, key=lambda answer: answer.log.timings.arrival_s)
        if not answers and runner.is_stopped:
            raise KeyboardInterrupt
        if not answers:
            raise UsageError("ends before the first request is due.", field="duration_s")
        facts = RunFacts(
            is_open=load.is_open,
            is_interrupted=runner.is_stopped and not runner.is_hopeless,
            is_hopeless=runner.is_hopeless,
            load_changes=load.changes,
            shares_prefixes=load.shares_prefixes,
            wants_lengths=not (load.prompts or load.has_calls),
            ignores_end=endpoint.form.ignores_end,
            has_usage=endpoint.has_usage,
            context_length=endpoint.context_length,
            prompt_overhead=endpoint.sizes.overhead,
            lacks_tools=load.has_calls and not endpoint.has_tools,
            client_share=cpu_s / max(wall_s, 1e-9),
            tokenized=await self._tokenize(answers, endpoint),
        )
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
            objectives=objectives,
            is_interrupted=facts.is_interrupted,
            is_hopeless=facts.is_hopeless,
        )
        return BenchResult(self._record(setup, answers, report, audit), report, audit, facts)

    def _record(
        self,
        setup: RunSetup,
        answers: Sequence[MeasuredAnswer],
        report: BenchReport,
        audit: RunAudit,
    ) -> RunRecord:
        """Return the record of a run, without the answers' texts, which only the audit needs."""
        return RunRecord(
            setup,
            tuple(replace(answer, text="", reply=None) for answer in answers),
            findings=audit.findings,
            resources=self._meter.resources(answers, report),
            command=self._command,
            client_version=__version__,
        )

    async def wait_until_idle(self) -> None:
        """Wait until the endpoint answers a short prompt.

        This is for the time after a run that ended early, while the endpoint still has its
        requests.
        """
        if self._endpoint is not None:
            await send_short_prompt(self._client, self._endpoint.form)

    async def _tokenize(
        self, answers: Sequence[MeasuredAnswer], endpoint: EndpointFacts
    ) -> dict[int, int]:
        """Return how many tokens some answers' texts have, by request number.

        The endpoint's tokenizer counts them.
        """
        counts: dict[int, int] = {}
        if not endpoint.has_tokenizer:
            return counts
        for answer in answers:
            if answer.is_completed and len(answer.text) >= _MIN_TOKENIZED_CHARS:
                count = await count_tokens(self._client, endpoint.form.model, answer.text)
                if count is not None:
                    counts[answer.number] = count
        return counts


async def _watch(runner: LoadRunner, clock: RunClock, watch: Watch) -> None:
    while True:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        watch(runner, clock.now_s())
