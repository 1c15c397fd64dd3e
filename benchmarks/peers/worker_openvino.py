"""OpenVINO GenAI's side of a comparison, run by a Python with OpenVINO GenAI (see pipe.py).

Its continuous batching reads the GGUF file itself; its prefix cache is off.
"""

from __future__ import annotations

import argparse
import itertools
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.common.pipe import claim_output, serve
from benchmarks.common.workload import Stamps, Timing

_CACHE_GB = 4
_MAX_STREAMS = 64


def main() -> None:
    """Load the model, then answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    args, answers = parser.parse_args(), claim_output()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = _MAX_STREAMS
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        args.model, scheduler, "CPU", properties
    )  # fmt: skip
    ids = itertools.count()

    def run(prompts: list[list[int]], num_tokens: int, num_kept: int) -> dict[str, Any]:
        del num_kept  # such rows are not asked of it
        return _run(pipeline, ids, prompts, num_tokens).as_json()

    about = {"version": version("openvino-genai")}
    serve({"about": lambda: about, "run": run, "forget": dict}, answers)


def _run(
    pipeline: Any, ids: itertools.count[int], prompts: list[list[int]], num_tokens: int
) -> Timing:
    """Answer all prompts together, and count tokens as its steps give them out."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    start_s = time.monotonic()
    handles = [
        pipeline.add_request(next(ids), openvino.Tensor(np.array([prompt], np.int64)), config)
        for prompt in prompts
    ]
    stamps: list[Stamps] = [[] for _ in prompts]
    firsts = [0] * len(prompts)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.monotonic()
        for i, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    if not stamps[i]:
                        firsts[i] = int(output.generated_ids[0])
                    stamps[i].append((now, len(output.generated_ids)))
    return Timing.of_stamps(prompts, start_s, stamps, firsts)


if __name__ == "__main__":
    main()
