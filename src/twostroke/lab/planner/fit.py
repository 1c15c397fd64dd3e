"""Which models fit a device: within memory, objectives and a KL budget, and the best of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_range
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.fit_models import kv_kl
from twostroke.lab.planner.plan import ACCEPTANCE_RATE, NUM_DRAFTS, expected_tokens_per_round
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import MEMORY_SHARE
from twostroke.lab.planner.roofline import request_bytes
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.lab.planner.calibration import Calibration
    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.fit_models import FitFile
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.reference_calibration import ReferenceCalibration

    # Returns measured steps that correct a model's times; None for none.
    CalibrationOf = Callable[[PlannedModel], Calibration | ReferenceCalibration | None]

_UNKNOWN_RATIO: Final = float("inf")  # of a limit whose figure is unknown


class FitQuestion(Frozen):
    """The limits that a model must keep.

    Attributes:
        load: the requests, their number at once (`streams`), and the latency objectives.
        context: tokens of each request for which there must be memory.
        max_kl: the largest mean KL divergence that weights, keys and values together may cause;
            None for any.
        kv_formats: number formats of keys and values to consider.
    """

    load: Question
    context: int
    max_kl: float | None
    kv_formats: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a limit is out of range or excludes the load."""
        check_range(self, "context", low=1, high=1 << 27)
        check_range(self, "max_kl", low=0, high=100)
        if self.load.prompt + self.load.output > self.context:
            reason = "must be at least {limit}, the prompt and the output together, got {value}."
            limit = self.load.prompt + self.load.output
            raise UsageError(reason, field="context", limit=limit, value=self.context)

    @property
    def streams(self) -> int:
        """The number of requests at once."""
        return self.load.streams or 1


class LimitExcess(Frozen):
    """A limit that a candidate exceeds.

    Attributes:
        limit: the name of the limit: memory, context, TTFT, TPOT or KL.
        text: the figure and the limit.
        ratio: the figure divided by the limit; infinite if the figure is unknown.
    """

    limit: str
    text: str
    ratio: float


class FitCandidate(Frozen):
    """A model's file with a format of keys and values, and with or without a draft model.

    Attributes:
        name, label: the file's name for `pull`, and its number format.
        kv_format: the number format of keys and values.
        draft: the draft model's name; empty for none.
        num_weights: the model's parameters.
        mean_kl: the estimated divergence that weights, keys and values cause; None if unknown.
        kl_source: the source of the weights' share of `mean_kl`.
        memory_bytes: weights, and keys, values and states of all requests at their full context.
        ttft_s, tpot_s, tokens_per_s: latencies, and the throughput of all requests at once.
        usd_per_million: per million output tokens; None without a price.
        is_here: whether the file is on this machine.
        excesses: the limits that it exceeds; empty if it fits.
        is_best: whether no other candidate that fits is at least as good in all respects.
    """

    name: str
    label: str
    kv_format: str
    draft: str
    num_weights: int
    mean_kl: float | None
    kl_source: str
    memory_bytes: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    usd_per_million: float | None
    is_here: bool
    excesses: tuple[LimitExcess, ...] = ()
    is_best: bool = False

    @property
    def fits(self) -> bool:
        """Whether the candidate exceeds no limit."""
        return not self.excesses

    @property
    def worst_ratio(self) -> float:
        """The largest ratio of a figure to its limit; 0 if the candidate fits."""
        return max((excess.ratio for excess in self.excesses), default=0.0)


def find_candidates(
    files: Sequence[FitFile],
    device: Device,
    question: FitQuestion,
    calibration_of: CalibrationOf = lambda _model: None,
) -> list[FitCandidate]:
    """Return all ways to run one of the `files` on a device, each with its figures and limits.

    First come candidates that fit, ordered by size, KL and speed, then the rest, nearest to the
    limits first.

    A candidate is a file with one of the question's KV formats, with or without its draft model.
    """
    candidates = [
        candidate
        for file in files
        for kv_format in question.kv_formats
        for candidate in _candidates(file, kv_format, device, question, calibration_of)
    ]
    fitting = [candidate for candidate in candidates if candidate.fits]
    marked = [
        replace(candidate, is_best=candidate.fits and not _is_beaten(candidate, fitting))
        for candidate in candidates
    ]
    return sorted(marked, key=_order)


def nearest_text(candidates: Sequence[FitCandidate]) -> str:
    """Return the clause about the candidate that is nearest to the limits, if none fits."""
    nearest = min(candidates, key=lambda candidate: candidate.worst_ratio)
    draft = f" with the draft model {nearest.draft}" if nearest.draft else ""
    reasons = "; ".join(excess.text for excess in nearest.excesses)
    return (
        f"the nearest is {nearest.name} ({nearest.label}, keys and values {nearest.kv_format})"
        f"{draft}: {reasons}"
    )


def _order(candidate: FitCandidate) -> tuple[float, ...]:
    kl = _UNKNOWN_RATIO if candidate.mean_kl is None else candidate.mean_kl
    return (candidate.worst_ratio, -candidate.num_weights, kl, candidate.tpot_s)


def _is_beaten(candidate: FitCandidate, others: Sequence[FitCandidate]) -> bool:
    """Return whether another candidate is at least as good in all respects, and better in one."""
    figures = _costs(candidate)
    for other in others:
        other_figures = _costs(other)
        if other_figures != figures and all(
            mine >= theirs for mine, theirs in zip(figures, other_figures, strict=True)
        ):
            return True
    return False


def _costs(candidate: FitCandidate) -> tuple[float, ...]:
    """Return the figures that should be small: KL, latencies, memory, price, and minus the size.

    The size is the number of weights, which should be large.
    """
    return (
        -candidate.num_weights,
        _UNKNOWN_RATIO if candidate.mean_kl is None else candidate.mean_kl,
        candidate.tpot_s,
        candidate.ttft_s,
        candidate.memory_bytes,
        candidate.usd_per_million or 0.0,
    )


def _candidates(
    file: FitFile,
    kv_format: str,
    device: Device,
    question: FitQuestion,
    calibration_of: CalibrationOf,
) -> Iterator[FitCandidate]:
    """Yield the candidates of a file: alone, and with its draft model.

    The candidates have the KV format `kv_format`. `calibration_of` is as in `find_candidates`.
    """
    load = replace(question.load, kv_format=kv_format)
    planner = Planner(file.model, device, load, calibration_of(file.model))
    yield _candidate(file, planner, question)
    if file.draft_model is not None:
        draft_planner = Planner(file.draft_model, device, load, calibration_of(file.draft_model))
        yield _candidate(file, planner, question, draft_planner)


def _candidate(
    file: FitFile, planner: Planner, question: FitQuestion, draft: Planner | None = None
) -> FitCandidate:
    """Return a candidate with its figures; `draft` plans its draft model."""
    load, streams = planner.question, question.streams
    models = [file.model] if draft is None else [file.model, draft.model]
    memory_bytes = sum(
        model.all_bytes + streams * request_bytes(model, load, question.context) for model in models
    )
    step_s, ttft_s = planner.step_s(streams), planner.ttft_s(streams)
    if draft is not None:
        step_s = _round_s(planner, draft, streams)
        ttft_s += draft.ttft_s(streams)
    tokens_per_s = load.output / (planner.prompt_s(streams) + load.output * step_s / streams)
    usd = planner.usd_per_hour
    kl_of_cache = kv_kl(load.kv_format)
    mean_kl = (
        None if file.kl is None or kl_of_cache is None else (file.kl.mean_kl + kl_of_cache.mean_kl)
    )
    candidate = FitCandidate(
        name=file.name,
        label=file.label,
        kv_format=load.kv_format,
        draft="" if draft is None else file.draft,
        num_weights=file.model.num_weights,
        mean_kl=mean_kl,
        kl_source=file.kl.source if file.kl is not None else "",
        memory_bytes=memory_bytes,
        ttft_s=ttft_s,
        tpot_s=planner.tpot_s(streams, step_s),
        tokens_per_s=tokens_per_s,
        usd_per_million=None if usd is None else usd_per_million_tokens(usd, tokens_per_s),
        is_here=file.is_here,
    )
    excesses = _excesses(candidate, file.model, planner.device, question)
    return replace(candidate, excesses=tuple(excesses))


def _round_s(planner: Planner, draft: Planner, streams: int) -> float:
    """Return the seconds per token with speculation, at the acceptance rate that plans assume.

    A round has the steps of the draft model, and a step that verifies its tokens.
    """
    num_rows = NUM_DRAFTS + 1
    contexts = (planner.question.mean_context,) * streams
    batch = BatchShape(contexts, (num_rows,) * streams, streams * num_rows)
    round_s = planner.roofline.step(batch).seconds + NUM_DRAFTS * draft.step_s(streams)
    return round_s / expected_tokens_per_round(ACCEPTANCE_RATE, NUM_DRAFTS)


def _excesses(
    candidate: FitCandidate, model: PlannedModel, device: Device, question: FitQuestion
) -> Iterator[LimitExcess]:
    """Yield the limits that a candidate exceeds."""
    context_length = model.program.context_length
    if question.context > context_length:
        text = f"its context has {context_length:,} tokens, {question.context:,} are asked"
        yield LimitExcess("context", text, question.context / context_length)
    if device.memory_bytes is not None:
        usable = device.memory_bytes * question.load.count * MEMORY_SHARE
        if candidate.memory_bytes > usable:
            needed, limit = (
                format_number(num_bytes / 1e9) for num_bytes in (candidate.memory_bytes, usable)
            )
            text = f"it needs {needed} GB, and {limit} GB are there"
            yield LimitExcess("memory", text, candidate.memory_bytes / usable)
    for name, seconds, limit_s in (
        ("TTFT", candidate.ttft_s, question.load.ttft_s),
        ("TPOT", candidate.tpot_s, question.load.tpot_s),
    ):
        if limit_s is not None and seconds > limit_s:
            ratio = seconds / limit_s
            text = f"{name} is {format_ms(seconds)} ms, {ratio:.2f} times the objective"
            yield LimitExcess(name, text, ratio)
    if question.max_kl is not None:
        if candidate.mean_kl is None:
            yield LimitExcess("KL", f"the KL of {candidate.label} is not known", _UNKNOWN_RATIO)
        elif candidate.mean_kl > question.max_kl:
            ratio = candidate.mean_kl / question.max_kl if question.max_kl else _UNKNOWN_RATIO
            text = f"its KL is about {candidate.mean_kl:.2g}, {question.max_kl:.2g} is the most"
            yield LimitExcess("KL", text, ratio)
