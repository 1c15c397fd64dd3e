"""Measure what `serve --record-trace` costs: processor time, and bytes of the file.

Run it with `make bench WHAT=recording`.

The recorder gets requests as a server's would be, with the lengths and the shared prompts of a
trace. It works once for each request, so its share of a step is the time of a request divided by
the seconds that the engine computes for the request: its part of the steps of 16 streams.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import caption, machine_facts, positive, save, table
from twostroke.core.request import FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.output import Timings, Usage
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import load_planned_model, this_machine
from twostroke.lab.planner.calibration import Calibration, measured_points
from twostroke.lab.planner.question import Question
from twostroke.lab.planner.roofline import Roofline
from twostroke.lab.simulator import read_trace
from twostroke.server.http.errors import OPENAI
from twostroke.server.http.request_context import ServedRequest
from twostroke.server.observability.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.simulator import RequestArrival, Workload

_STREAMS = 16
_MAX_SHARE, _MAX_BYTES = 0.01, 200
_TENANTS = 8
_SHAPES = (StepShape.decode(_STREAMS, 512), StepShape.prefill(256))


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The work on a request that has ended, as the recorder reads it."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    results: dict[int, tuple[FinishReason, Usage, Timings]]
    service_tier: str
    used: Usage
    num_open: int = 0

    def figures(self) -> dict[str, Any]:
        """Return what logs have of the request: nothing."""
        return {}


def ended_request(arrival: RequestArrival, number: int, vocab_size: int) -> ServedRequest:
    """Return a request of a trace as it would be after its answer."""
    tokens = arrival.tokens(number, vocab_size).tolist()
    usage = Usage(len(tokens), 0, arrival.num_output)
    timings = Timings(arrival.at_s, arrival.at_s, arrival.at_s + 0.1, arrival.at_s + 2)
    work = EndedRequest(
        prompts=[tokens],
        params=SamplingParams(max_tokens=arrival.num_output),
        results={0: (FinishReason.LENGTH, usage, timings)},
        service_tier="default",
        used=usage,
    )
    served = ServedRequest("req-1", OPENAI, "POST", "/v1/completions")
    served.began_s, served.tenant = arrival.at_s, f"tenant-{number % _TENANTS}"
    served.running = work
    return served


def measure(load: Workload, vocab_size: int, path: Path) -> tuple[list[float], float]:
    """Record the requests of a load; return the seconds of each, and bytes of a request."""
    requests = [
        ended_request(arrival, number, vocab_size) for number, arrival in enumerate(load.arrivals)
    ]
    recorder = TraceRecorder(path)
    seconds = []
    for request in requests:
        began_s = time.process_time()
        recorder.observe(request)
        seconds.append(time.process_time() - began_s)
    recorder.close()
    return seconds, path.stat().st_size / len(requests)


def main() -> None:
    """Record each trace, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--traces", nargs="+", default=["azure-conv", "mooncake-conversation"])
    parser.add_argument("--requests", type=positive, default=1000)
    args, result = parser.parse_args(), machine_facts()
    model = load_planned_model(args.model)
    points = measured_points(args.model, _SHAPES, lambda _: None)
    calibration = Calibration(points, "", 1)
    roofline = Roofline(model, this_machine(None), Question(), calibration)
    decode_s, prefill_s = (calibration.seconds(roofline, shape.batch) for shape in _SHAPES)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.traces:
            load = read_trace(name).first(args.requests)
            seconds, num_bytes = measure(load, model.program.vocab_size, Path(folder) / name)
            computed_s = statistics.fmean(
                arrival.num_prompt * prefill_s / 256 + arrival.num_output * decode_s / _STREAMS
                for arrival in load.arrivals
            )
            mean_s = statistics.fmean(seconds)
            figures[name] = {
                "seconds": mean_s,
                "p99_s": sorted(seconds)[-len(seconds) // 100],
                "share": mean_s / computed_s,
                "bytes": num_bytes,
            }
            rows.append(
                (
                    name,
                    f"{mean_s * 1e6:,.0f} µs, {figures[name]['p99_s'] * 1e6:,.0f} µs",
                    f"{computed_s * 1e3:,.0f} ms",
                    f"{mean_s / computed_s:.3%}",
                    f"{num_bytes:.0f}",
                )
            )
    header = (
        "trace",
        "a request: mean, P99",
        "its steps",
        f"share (asked: {_MAX_SHARE:.0%})",
        f"bytes (asked: {_MAX_BYTES})",
    )
    text = f"{table(header, rows)}\n\n{caption(result, args.model)}"
    save("recording", dict(result) | {"traces": figures}, text)


if __name__ == "__main__":
    main()
