"""Measured answers of a bench, made up for tests."""

from __future__ import annotations

from typing import Any

from twostroke.engine.output import Timings
from twostroke.lab.bench.answers import MeasuredAnswer
from twostroke.lab.measure.requests import COMPLETED, FAILED, RequestLog


def make_answer(
    number: int,
    at_s: float,
    *,
    ttft_s: float = 0.1,
    gap_s: float = 0.01,
    num_output: int = 11,
    num_chunks: int | None = None,
    num_prompt: int = 100,
    num_cached: int = 0,
    late_s: float = 0.0,
    failure: str = "",
    **fields: Any,
) -> MeasuredAnswer:
    """Return the answer of a request that was due at `at_s`, with chunks at equal gaps."""
    num_chunks = num_output if num_chunks is None else num_chunks
    times_s = tuple(at_s + ttft_s + gap_s * index for index in range(num_chunks))
    log = RequestLog(
        timings=Timings(at_s, 0.0, times_s[0], times_s[-1]),
        sent_s=at_s + late_s,
        num_prompt=num_prompt,
        num_output=num_output,
        num_cached=num_cached,
        outcome=FAILED if failure else COMPLETED,
    )
    defaults: dict[str, Any] = {
        "ended_s": times_s[-1],
        "wanted_prompt": num_prompt,
        "max_output": num_output,
        "has_usage": True,
        "finish_reason": "length",
    }
    return MeasuredAnswer(
        log=log, number=number, chunk_times_s=times_s, failure=failure, **{**defaults, **fields}
    )
