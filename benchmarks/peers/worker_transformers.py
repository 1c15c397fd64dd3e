"""transformers' side of a comparison, run by a Python with transformers (see pipe.py).

Greedy decoding with its default attention and dynamic cache, with all streams in one batch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.common.pipe import claim_output, serve
from benchmarks.common.workload import Timing


def main() -> None:
    """Load the model, then answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder with safetensors")
    parser.add_argument("--threads", type=int, required=True)
    args, answers = parser.parse_args(), claim_output()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    version = f"{transformers.__version__} with torch {torch.__version__}, bf16"

    def run(prompts: list[list[int]], num_tokens: int, num_kept: int) -> dict[str, Any]:
        del num_kept  # such rows are not asked of it
        return _run(model, prompts, num_tokens).as_json()

    def score(tokens: list[int], path: str) -> dict[str, Any]:
        logits = model(torch.tensor([tokens])).logits[0].float().numpy()
        np.save(path, logits)
        return {}

    serve(
        {"about": lambda: {"version": version}, "run": run, "score": score, "forget": dict}, answers
    )


def _run(model: Any, prompts: list[list[int]], num_tokens: int) -> Timing:
    """Answer prompts of one length together."""
    cache = DynamicCache()
    start_s = time.perf_counter()
    tokens = first = _next(model, torch.tensor(prompts), cache)
    prefilled = time.perf_counter()
    for _ in range(num_tokens - 1):
        tokens = _next(model, tokens[:, None], cache)
    end_s = time.perf_counter()
    return Timing(
        prompt_tokens=sum(map(len, prompts)),
        prefill_s=prefilled - start_s,
        decode_tokens=len(prompts) * (num_tokens - 1),
        decode_s=end_s - prefilled,
        wall_s=end_s - start_s,
        first_tokens=first.tolist(),
    )


def _next(model: Any, tokens: Any, cache: Any) -> Any:
    """Return the likeliest next token (streams,) after `tokens` (streams, new tokens)."""
    answer = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return answer.logits[:, -1].argmax(dim=-1)


if __name__ == "__main__":
    main()
