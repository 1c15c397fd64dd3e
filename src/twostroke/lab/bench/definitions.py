"""The figures of one run by the definitions of other load generators, side by side.

The definitions were read in the sources of vLLM 0.32 (`vllm bench serve`), aiperf 0.13, guidellm
0.8.1 and inference-perf 0.5.0. Latencies are of completed requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.report import BenchReport

TOOLS: Final = ("twostroke", "vllm", "aiperf", "guidellm", "inference-perf")
LATENCY_TITLES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
_STATISTICS: Final = ("mean", "p50", "p90")


class DefinedFigure(Frozen):
    """A figure of a run, computed by the definition of each benchmark tool.

    Attributes:
        name: such as "ttft_p50"; latencies are in seconds, and rates per second.
        title: such as "TTFT P50".
        values: by tool (`TOOLS`); None where the tool has no such figure.
        is_rate: whether it is a rate.
    """

    name: str
    title: str
    values: dict[str, float | None]
    is_rate: bool = False


class WeightedValues(Frozen):
    """Values of a latency, and how much each weighs in means and percentiles."""

    values: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def statistic(self, name: str) -> float | None:
        """Return the mean or a percentile such as "p50"; None without values."""
        if not self.values:
            return None
        values = np.asarray(self.values)
        weights = np.asarray(self.weights) if self.weights else np.ones(len(values))
        if name == "mean":
            return float(np.average(values, weights=weights))
        share = float(name.removeprefix("p")) / 100
        if not self.weights:
            return float(np.quantile(values, share))
        order = np.argsort(values, kind="stable")
        sums = np.cumsum(weights[order])
        index = int(np.searchsorted(sums, share * sums[-1]))
        return float(values[order][min(index, len(order) - 1)])


def defined_figures(
    answers: Sequence[MeasuredAnswer], report: BenchReport, own_counts: Mapping[int, int]
) -> list[DefinedFigure]:
    """Return the figures of a run by each definition; the run has a completed request.

    `own_counts` has output tokens counted by a tokenizer, by the number of the request; aiperf and
    inference-perf count so by default. For other requests, the server's count is used.
    """
    completed = [answer for answer in answers if answer.is_completed]
    latencies = {
        "vllm": _vllm_latencies(completed),
        "aiperf": _aiperf_latencies(completed, own_counts),
        "guidellm": _guidellm_latencies(completed),
        "inference-perf": _inference_perf_latencies(completed, own_counts),
    }
    figures = []
    for name, title in LATENCY_TITLES.items():
        for statistic in _STATISTICS:
            values = {"twostroke": _reported_statistic(report, name, statistic)}
            for tool, by_name in latencies.items():
                values[tool] = by_name[name].statistic(statistic)
            figures.append(DefinedFigure(f"{name}_{statistic}", f"{title} {statistic}", values))
    return figures + _rates(completed, report, own_counts)


def _reported_statistic(report: BenchReport, name: str, statistic: str) -> float | None:
    latency = report.run.latencies.get(name)
    if latency is None:
        return None
    if statistic == "mean":
        return latency.mean
    percentile = latency.percentiles.get(statistic)
    return percentile.value if percentile else None


def _vllm_latencies(completed: Sequence[MeasuredAnswer]) -> dict[str, WeightedValues]:
    """Return latencies as vLLM's benchmark: every chunk with choices counts, even without text."""
    ttft, tpot, itl, e2e = [], [], [], []
    for answer in completed:
        times_s = sorted((*answer.chunk_times_s, *answer.empty_chunk_times_s))
        sent_s, count = answer.log.sent_s, answer.log.num_output
        ttft.append(times_s[0] - sent_s)
        e2e.append(times_s[-1] - sent_s)
        itl.extend(np.diff(times_s).tolist())
        if count > 1:
            tpot.append((times_s[-1] - times_s[0]) / (count - 1))
    return _by_name(ttft=ttft, tpot=tpot, itl=itl, e2e=e2e)


def _aiperf_latencies(
    completed: Sequence[MeasuredAnswer], own_counts: Mapping[int, int]
) -> dict[str, WeightedValues]:
    """Return latencies as aiperf: its ITL is our TPOT, and its ICL is the gaps between chunks."""
    ttft, tpot, gaps, e2e = [], [], [], []
    for answer in completed:
        first_s, last_s = answer.chunk_times_s[0], answer.chunk_times_s[-1]
        count = own_counts.get(answer.number, answer.log.num_output)
        ttft.append(first_s - answer.log.sent_s)
        e2e.append(last_s - answer.log.sent_s)
        gaps.extend(np.diff(answer.chunk_times_s).tolist())
        if count > 1:
            tpot.append((last_s - first_s) / (count - 1))
    return _by_name(ttft=ttft, tpot=tpot, itl=gaps, e2e=e2e)


def _guidellm_latencies(completed: Sequence[MeasuredAnswer]) -> dict[str, WeightedValues]:
    """Return latencies as GuideLLM: TPOT counts from the sending, ITL from the first token."""
    ttft, e2e, itl, tpot = [], [], [], []
    tokens, further_tokens = [], []
    for answer in completed:
        first_s, last_s = answer.chunk_times_s[0], answer.chunk_times_s[-1]
        sent_s, count = answer.log.sent_s, answer.log.num_output
        ttft.append(first_s - sent_s)
        e2e.append(answer.ended_s - sent_s)
        tpot.append((last_s - sent_s) / max(count, 1))
        tokens.append(count)
        if count > 1:
            itl.append((last_s - first_s) / (count - 1))
            further_tokens.append(count - 1)
    figures = _by_name(ttft=ttft, e2e=e2e)
    figures["tpot"] = WeightedValues(tuple(tpot), tuple(map(float, tokens)))
    figures["itl"] = WeightedValues(tuple(itl), tuple(map(float, further_tokens)))
    return figures


def _inference_perf_latencies(
    completed: Sequence[MeasuredAnswer], own_counts: Mapping[int, int]
) -> dict[str, WeightedValues]:
    """Return latencies as inference-perf: the gaps between tokens of the same chunk are 0."""
    ttft, tpot, itl, e2e = [], [], [], []
    for answer in completed:
        times_s = answer.chunk_times_s
        sent_s = answer.log.sent_s
        e2e.append(answer.ended_s - sent_s)
        count = own_counts.get(answer.number, answer.log.num_output)
        if count < 2:
            continue
        ttft.append(times_s[0] - sent_s)
        tpot.append((times_s[-1] - times_s[0]) / (count - 1))
        gaps_s = np.diff(times_s).tolist()
        itl += gaps_s + [0.0] * max(0, count - 1 - len(gaps_s))
    return _by_name(ttft=ttft, tpot=tpot, itl=itl, e2e=e2e)


def _by_name(**latencies: Sequence[float]) -> dict[str, WeightedValues]:
    return {name: WeightedValues(tuple(values)) for name, values in latencies.items()}


def _rates(
    completed: Sequence[MeasuredAnswer], report: BenchReport, own_counts: Mapping[int, int]
) -> list[DefinedFigure]:
    """Return the rates: Twostroke's of the steady window, and other tools' of the whole run."""
    first_s = min(answer.log.sent_s for answer in completed)
    last_token_s = max(answer.log.timings.last_token_s for answer in completed)
    ended_s = max(answer.ended_s for answer in completed)
    seconds = {
        "vllm": ended_s - first_s,
        "aiperf": last_token_s - first_s,
        "guidellm": ended_s - first_s,
        "inference-perf": ended_s - first_s,
    }
    num_tokens = sum(answer.log.num_output for answer in completed)
    num_own = sum(own_counts.get(a.number, a.log.num_output) for a in completed)
    tokens = dict.fromkeys(seconds, num_tokens) | {"aiperf": num_own, "inference-perf": num_own}
    request_rates: dict[str, float | None] = {"twostroke": report.run.requests_per_s}
    token_rates: dict[str, float | None] = {"twostroke": report.run.output_per_s}
    for tool, tool_s in seconds.items():
        request_rates[tool] = len(completed) / max(tool_s, 1e-9)
        token_rates[tool] = tokens[tool] / max(tool_s, 1e-9)
    return [
        DefinedFigure("requests_per_s", "requests/s", request_rates, is_rate=True),
        DefinedFigure("output_per_s", "output tokens/s", token_rates, is_rate=True),
    ]
