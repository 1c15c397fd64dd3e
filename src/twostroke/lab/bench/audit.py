"""Audits a run: whether its figures can be trusted, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.bench.bootstrap import PooledValues, difference_interval
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.measure.requests import MIN_P99_SAMPLES, steady_window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.report import BenchReport

BUSY_CLIENT: Final = "busy client"
_MAX_LATENESS_SHARE: Final = 0.1  # of the median TTFT
_MIN_LATENESS_S: Final = 0.001  # less is never material
_MAX_CLIENT_SHARE: Final = 0.9  # of one core; a client that uses more is the bottleneck
_MAX_FAILED_SHARE: Final = 0.01
_MIN_SAMPLES: Final = 100
_MIN_DURATION_RATIO: Final = 3.0  # time of the steady window, to the mean time of a request
_MIN_DRIFT_RATIO: Final = 1.25
_MIN_DRIFT_SAMPLES: Final = 10  # in each third of the window
_DRIFT_LEVEL: Final = 0.99
_MIN_STALL_S: Final = 1.0
_MIN_STALL_RATIO: Final = 20.0  # to the median gap
_BLOCK_TOKENS: Final = 32  # of a prefix cache: prompts may share a block with the template
_MIN_REUSED_SHARE: Final = 0.8  # of the history that the server has computed
_MAX_PROMPT_ERROR: Final = 0.05
_MIN_OUTPUT_SHARE: Final = 0.9  # of the wanted tokens of answers
_MAX_WRONG_SHARE: Final = 0.01  # of answers whose counts contradict themselves
_MAX_COUNT_ERROR: Final = 0.2  # between the server's count and its tokenizer's
_MAX_TOKENS_PER_CHUNK: Final = 1.5


class RunFacts(Frozen):
    """Facts about a run, besides its answers.

    Attributes:
        is_open: whether requests had a schedule.
        is_interrupted: whether the user ended the run early.
        is_hopeless: whether the run ended early because too few requests could still meet the
            objectives.
        load_changes: whether the load is meant to change, as a trace's load is.
        shares_prefixes: whether prompts were meant to share prefixes.
        wants_lengths: whether answers were asked to have exact lengths.
        ignores_end: whether the endpoint accepts `ignore_eos`.
        has_usage: whether the endpoint reports counts of tokens.
        context_length: most tokens of a prompt and its answer; 0 if unknown.
        lacks_tools: whether tool calls were wanted, but the endpoint does not support tools.
        prompt_overhead: tokens that every prompt has besides its text, such as the chat template's.
        client_share: processor time of the client, as a share of one core.
        tokenized: for some answers, the tokens of their texts by the endpoint's tokenizer, by
            request number.
    """

    is_open: bool
    is_interrupted: bool = False
    is_hopeless: bool = False
    load_changes: bool = False
    shares_prefixes: bool = False
    wants_lengths: bool = False
    ignores_end: bool = False
    has_usage: bool = True
    context_length: int = 0
    lacks_tools: bool = False
    prompt_overhead: int = 0
    client_share: float = 0.0
    tokenized: dict[int, int] = {}  # noqa: RUF012 - msgspec copies it


class AuditFinding(Frozen):
    """A reason not to trust a run, or to read its figures with care.

    Attributes:
        name: the reason in two or three words.
        text: the observation, and a remedy if there is one.
        is_fatal: whether the figures are not valid.
    """

    name: str
    text: str
    is_fatal: bool = False


class RunAudit(Frozen):
    """The findings about a run; fatal findings come first."""

    findings: tuple[AuditFinding, ...]

    @property
    def is_valid(self) -> bool:
        """Whether no finding is fatal."""
        return not any(finding.is_fatal for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The first line of a report: whether the run can be trusted, and the reasons if not."""
        names = ", ".join(finding.name for finding in self.findings)
        if not self.is_valid:
            return f"This run is NOT VALID: {names}."
        if names:
            return f"Read this run with care: {names}."
        return "This run can be trusted: the audit has no findings."


def audit_run(answers: Sequence[MeasuredAnswer], report: BenchReport, facts: RunFacts) -> RunAudit:
    """Return the findings about a run, which has at least one request."""
    completed = [answer for answer in answers if answer.is_completed]
    findings = [
        *_client_findings(report, facts),
        *_load_findings(answers, report, facts),
        *_drift_findings(answers, completed, facts),
        *_stall_findings(completed),
        *_prompt_findings(completed, facts),
        *_conversation_findings(completed, facts),
        *_output_findings(completed, report, facts),
    ]
    return RunAudit(tuple(sorted(findings, key=lambda finding: not finding.is_fatal)))


def _client_findings(report: BenchReport, facts: RunFacts) -> Iterator[AuditFinding]:
    lateness_s = report.run.lateness_p99_s
    ttft = report.run.latencies.get("server_ttft")
    median_s = ttft.percentiles["p50"].value if ttft else 0.0
    if lateness_s > max(_MAX_LATENESS_SHARE * median_s, _MIN_LATENESS_S):
        share = f", {lateness_s / median_s:.0%} of the median TTFT" if median_s else ""
        yield AuditFinding(
            "late client",
            f"The client sent requests up to {format_ms(lateness_s)} ms late (p99){share}. Lower "
            "the load, or run the client on a machine with a free core.",
            is_fatal=True,
        )
    if facts.client_share > _MAX_CLIENT_SHARE:
        yield AuditFinding(
            BUSY_CLIENT,
            f"The client used {facts.client_share:.0%} of one core, which is all that it can use: "
            "the endpoint may be able to do more. Divide the load over several clients.",
            is_fatal=True,
        )


def _load_findings(
    answers: Sequence[MeasuredAnswer], report: BenchReport, facts: RunFacts
) -> Iterator[AuditFinding]:
    run = report.run
    num_failed = run.num_requests - run.num_completed
    if num_failed:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(report.failures.items()))
        message = next((answer.message for answer in answers if answer.message), "")
        quote = f' The first message: "{message}"' if message else ""
        yield AuditFinding(
            "failed requests",
            f"{num_failed:,} of {counted_noun(run.num_requests, 'request', form=',')} failed "
            f"({kinds}). Latencies are of the others.{quote}",
            is_fatal=num_failed > _MAX_FAILED_SHARE * run.num_requests,
        )
    if facts.is_interrupted:
        yield AuditFinding(
            "interrupted",
            "The run was interrupted. Requests in progress are not counted, which leaves out long "
            "answers.",
        )
    if facts.is_hopeless:
        yield AuditFinding(
            "ended early",
            "The run ended when too few requests could still meet the objectives: its figures are "
            "of the first requests.",
        )
    if run.num_completed < _MIN_SAMPLES:
        yield AuditFinding(
            "few samples",
            f"{counted_noun(run.num_completed, 'request', form=',')} completed: the intervals are "
            f"wide, and p99 needs {MIN_P99_SAMPLES}.",
        )
    if run.is_growing and facts.is_open:
        yield AuditFinding(
            "growing queue",
            f"{format_number(run.offered_per_s)} requests/s arrive and "
            f"{format_number(run.requests_per_s)} end: latencies depend on the length of the run. "
            "Lower the rate.",
            is_fatal=True,
        )
    begin_s, end_s = steady_window([answer.log for answer in answers])
    e2e = run.latencies.get("e2e")
    if e2e is not None and end_s - begin_s < _MIN_DURATION_RATIO * e2e.mean:
        yield AuditFinding(
            "short run",
            f"Rates are counted in {format_number(end_s - begin_s)} s, and a request takes "
            f"{format_number(e2e.mean)} s: send more requests.",
        )


def _drift_findings(
    answers: Sequence[MeasuredAnswer], completed: Sequence[MeasuredAnswer], facts: RunFacts
) -> Iterator[AuditFinding]:
    """Compare the first and the last third of the steady window; yield a finding if they differ.

    Under a load that is meant to change, such as a trace's, a drift is not fatal.
    """
    begin_s, end_s = steady_window([answer.log for answer in answers])
    third_s = (end_s - begin_s) / 3
    reason = "the load changes, too" if facts.load_changes else "the run is not steady"
    for name in ("ttft", "tpot"):
        thirds: tuple[list[float], ...] = ([], [], [])
        for answer in completed:
            value = answer.log.latencies[name]
            at_s = answer.log.timings.arrival_s
            if value is not None and third_s and begin_s <= at_s <= end_s:
                thirds[min(int((at_s - begin_s) / third_s), 2)].append(value)
        if min(len(thirds[0]), len(thirds[2])) < _MIN_DRIFT_SAMPLES:
            continue
        first, last = PooledValues(thirds[0]), PooledValues(thirds[2])
        first_s, last_s = first.quantiles((0.5,))[0], last.quantiles((0.5,))[0]
        low, high = difference_interval(first, last, 0.5, _DRIFT_LEVEL)
        is_certain = low > 0 or high < 0
        if is_certain and max(first_s, last_s) > _MIN_DRIFT_RATIO * min(first_s, last_s):
            yield AuditFinding(
                f"drift of {name.upper()}",
                f"The median {name.upper()} went from {format_ms(first_s)} ms in the first third "
                f"of the window to {format_ms(last_s)} ms in the last: {reason}.",
                is_fatal=not facts.load_changes,
            )


def _stall_findings(completed: Sequence[MeasuredAnswer]) -> Iterator[AuditFinding]:
    gaps_s = [np.diff(answer.chunk_times_s) for answer in completed]
    pooled_s = np.concatenate(gaps_s) if gaps_s else np.empty(0)
    if not len(pooled_s):
        return
    limit_s = max(_MIN_STALL_S, _MIN_STALL_RATIO * float(np.median(pooled_s)))
    num_stalled = sum(bool((gaps > limit_s).any()) for gaps in gaps_s)
    if num_stalled:
        yield AuditFinding(
            "stalls",
            f"{counted_noun(num_stalled, 'answer', form=',')} stalled: the longest gap between "
            f"chunks is {format_number(float(pooled_s.max()))} s, the median "
            f"{format_ms(float(np.median(pooled_s)))} ms.",
        )


def _prompt_findings(
    completed: Sequence[MeasuredAnswer], facts: RunFacts
) -> Iterator[AuditFinding]:
    num_prompt = sum(answer.log.num_prompt for answer in completed)
    num_cached = sum(answer.log.num_cached for answer in completed)
    num_shared = len(completed) * (facts.prompt_overhead + _BLOCK_TOKENS)
    if not facts.shares_prefixes and num_cached > num_shared:
        yield AuditFinding(
            "cached prompts",
            f"{num_cached / num_prompt:.0%} of the prompt tokens came from the prefix cache, "
            "although no prompts were meant to share more than the template: TTFT is too good.",
            is_fatal=True,
        )
    with_wanted = [answer for answer in completed if answer.wanted_prompt and answer.has_usage]
    if with_wanted:
        ratios = [answer.log.num_prompt / answer.wanted_prompt for answer in with_wanted]
        ratio = float(np.median(ratios))
        if abs(ratio - 1) > _MAX_PROMPT_ERROR:
            yield AuditFinding(
                "prompt lengths",
                f"Prompts have {ratio:.0%} of the wanted tokens by the server's count (median).",
            )


def _conversation_findings(
    completed: Sequence[MeasuredAnswer], facts: RunFacts
) -> Iterator[AuditFinding]:
    if facts.lacks_tools:
        yield AuditFinding(
            "no tools",
            "The endpoint does not answer with a tool call when one is required: calls and results "
            "were sent as plain messages.",
        )
    with_call = [answer for answer in completed if answer.wanted_call]
    num_missing = sum(not answer.num_calls for answer in with_call)
    if num_missing:
        yield AuditFinding(
            "missing tool calls",
            f"{counted_noun(num_missing, 'answer', form=',')} of {len(with_call):,} had no tool "
            "call, although one was required.",
        )
    later = [answer for answer in completed if answer.num_reusable and answer.reports_cached]
    num_reusable = sum(max(0, answer.num_reusable - _BLOCK_TOKENS) for answer in later)
    num_cached = sum(answer.log.num_cached for answer in later)
    if num_cached < _MIN_REUSED_SHARE * num_reusable:
        yield AuditFinding(
            "missed prefixes",
            f"{num_cached / num_reusable:.0%} of the history that the turn before had computed "
            "came from the prefix cache: it is off or full, or the template changes the history.",
        )


def _output_findings(
    completed: Sequence[MeasuredAnswer], report: BenchReport, facts: RunFacts
) -> Iterator[AuditFinding]:
    if not facts.has_usage:
        yield AuditFinding(
            "no token counts",
            "The endpoint reports no usage: each chunk counts as one token, and prompts have one "
            "token for each word.",
        )
    full = [answer for answer in completed if _fills_context(answer, facts)]
    if full:
        length = max(answer.log.num_prompt + answer.log.num_output for answer in full)
        yield AuditFinding(
            "full context",
            f"{counted_noun(len(full), 'answer', form=',')} ended before the wanted length, with "
            f"prompt and answer up to a length of {length:,}: the model's context is full, or the "
            "server has its own limit of answers. Shorten --prompt or --output.",
        )
    full_numbers = {answer.number for answer in full}
    wrong = [
        "" if answer.number in full_numbers else _contradiction(answer, facts)
        for answer in completed
    ]
    first_wrong = next(filter(None, wrong), "")
    if first_wrong:
        num_wrong = sum(map(bool, wrong))
        yield AuditFinding(
            "token counts",
            f"The server's counts of output tokens contradict "
            f"{counted_noun(num_wrong, 'answer', form=',')}, such as {first_wrong}: TPOT and "
            "throughput are wrong.",
            is_fatal=num_wrong > _MAX_WRONG_SHARE * len(completed),
        )
    num_wanted = sum(answer.max_output for answer in completed)
    num_output = sum(answer.log.num_output for answer in completed)
    if facts.wants_lengths and num_output < _MIN_OUTPUT_SHARE * num_wanted and not full:
        reason = "" if facts.ignores_end else ", because the endpoint does not take ignore_eos"
        yield AuditFinding(
            "short answers",
            f"Answers have {num_output / num_wanted:.0%} of the wanted tokens{reason}.",
        )
    if report.tokens_per_chunk > _MAX_TOKENS_PER_CHUNK:
        yield AuditFinding(
            "batched chunks",
            f"A chunk has {report.tokens_per_chunk:.1f} tokens on average, so the gaps between "
            "chunks (ITL) are not gaps between tokens: read ITL per token. Speculative decoding, "
            "or tokens without text, can be the reason.",
        )


def _fills_context(answer: MeasuredAnswer, facts: RunFacts) -> bool:
    """Whether an answer ended before its limit of tokens because the model's context was full.

    If the context length is unknown, this is assumed when the server reported as many tokens as
    chunks came.
    """
    log = answer.log
    is_short = log.num_output < answer.max_output and answer.finish_reason == "length"
    if not (is_short and answer.has_usage):
        return False
    if facts.context_length:
        return log.num_prompt + log.num_output >= facts.context_length - 1
    return len(answer.chunk_times_s) == log.num_output


def _contradiction(answer: MeasuredAnswer, facts: RunFacts) -> str:
    """Return how an answer contradicts its reported number of tokens; empty if it does not."""
    if not answer.has_usage:
        return ""
    count, limit, num_chunks = answer.log.num_output, answer.max_output, len(answer.chunk_times_s)
    reported = f"{counted_noun(count, 'token')} reported"
    if limit and count > limit:
        return f"{reported} with a limit of {limit}"
    if limit and answer.finish_reason == "length" and count < limit:
        return f"{reported} for an answer that ended at its limit of {limit}"
    if num_chunks > 1.05 * count + 1:
        return f"{reported} in {counted_noun(num_chunks, 'chunk')}"
    num_tokenized = facts.tokenized.get(answer.number)
    if num_tokenized is None:
        return ""
    is_few = num_tokenized > (1 + _MAX_COUNT_ERROR) * count + 2
    # Tokens without text, such as an ignored end token, are in the server's count only.
    is_many = not facts.ignores_end and num_tokenized < (1 - _MAX_COUNT_ERROR) * count - 2
    return f"{reported}, {num_tokenized} by its tokenizer" if is_few or is_many else ""
