"""Checks of the GPU benchmark: logits, sampled tokens, and `--same-tokens`. Used by campaign.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.gpu.models import program_of, random_tensors
from benchmarks.gpu.products import products
from twostroke.backends.sampling.reference import draw
from twostroke.backends.sampling.rows import RowTable
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE: Final = 16
_SEQUENCES: Final = 500
_NUM_DRAWS: Final = 100_000
_MOST_KL, _LEAST_TOP1 = 1e-3, 0.98


def correct(fmt: str) -> dict[str, Any]:
    """Return how far logits are from the reference's, for a format of weights."""
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.gpu.device import find_device
    from twostroke.backends.reference import ReferenceBackend
    from twostroke.lab.measure.divergence import compare

    rng, differences = np.random.default_rng(1), {}
    count = 1100 if fmt == "FP8" else 200  # from 1,024 rows on a library multiplies E4M3
    for model in ("small", "small-experts"):
        program = program_of(model)
        tokens = rng.integers(0, program.vocab_size, count).tolist()
        tensors = random_tensors(program, fmt, rng)
        right = ReferenceBackend(program, tensors, 1, _PAGE).score(tokens)
        for kv in ("f16", "int8", "fp8") if fmt == "BF16" else ("f16",):
            kwargs: Any = {"kv_format": kv, "max_rows": max(256, count)}
            ours: Any = GpuBackend(program, tensors, 80, _PAGE, find_device(), **kwargs)
            result = compare([(right, ours.score(tokens), tokens)])
            ours.close()
            difference = {"mean_kl": result.mean_kl, "top1": result.top1_agreement}
            if kv == "f16" and not fmt.startswith("FP8"):  # others round keys or rows, too
                difference["is_close"] = (
                    result.mean_kl <= _MOST_KL and result.top1_agreement >= _LEAST_TOP1
                )
            differences[f"{model}, {kv} pages"] = difference
    return differences


def sampler(count: int = _NUM_DRAWS) -> dict[str, Any]:
    """Return how many tokens differ from those of the sampler's definition."""
    import torch

    from twostroke.backends.gpu import sampling
    from twostroke.backends.gpu.device import find_device
    from twostroke.backends.gpu.step_input import LOGIT_ROWS
    from twostroke.backends.gpu.step_sampler import StepSampler

    rng, gpu, differ = np.random.default_rng(3), find_device().gpu(torch.float32), 0
    drawing, vocabulary = StepSampler(gpu, 1000, on_host=False), 1000
    for first in range(0, count, LOGIT_ROWS):
        rows = min(LOGIT_ROWS, count - first)
        logits = (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32)
        requests = [
            Request(f"{first + i}", [1, 2], 2, _params(rng), seed=int(rng.integers(1 << 60)))
            for i in range(rows)
        ]
        table = RowTable()  # owns what its rows point to
        results = torch.zeros((rows, sampling.RESULT_INTS), dtype=torch.int32, device=gpu.device)
        drawing.begin(table.rows(requests))
        drawing.draw(torch.from_numpy(logits).to(gpu.device), 0, results)
        tokens = results[:, sampling.TOKEN].tolist()
        right = [draw(*pair, (), None)[0] for pair in zip(requests, logits, strict=True)]
        differ += sum(a != b for a, b in zip(tokens, right, strict=True))
    return {"rows": count, "differ": differ}


def _params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0, 0.5, 1, 2])),
        top_k=int(rng.choice([0, 1, 40])),
        top_p=float(rng.choice([0.5, 0.9, 1])),
        min_p=float(rng.choice([0, 0.05])),
    )


def same_tokens(count: int = _SEQUENCES) -> dict[str, Any]:
    """Return how many sequences' log-probabilities differ from those of each computed alone."""
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.gpu.device import find_device

    rng, differing = np.random.default_rng(2), {}
    params = SamplingParams(temperature=0, logprobs=5)
    for model, fmt in (("small", "BF16"), ("small", "Q4_K"), ("small-experts", "Q4_K")):
        program = program_of(model)
        arguments = program, random_tensors(program, fmt, rng), 16 * 20, _PAGE, find_device()
        backend: Any = GpuBackend(*arguments, max_rows=1024, same_tokens=True)
        expected_logprobs, differ = [], {"batched": 0, "chunked": 0, "drafted": 0}
        requests = []
        for number in range(count):
            tokens = rng.integers(0, program.vocab_size, rng.integers(20, 300)).tolist()
            request = Request(f"{number}", tokens, len(tokens), params, seed=1)
            request.pages = [[*range(20 * (number % 16), 20 * (number % 16) + 20)]]
            requests.append(request)
            expected_logprobs.append(backend.run(StepPlan((_part(request, 0),))).logprobs)
        for first in range(0, count, 3):
            together = [_part(request, 0) for request in requests[first : first + 3]]
            result = backend.run(StepPlan(tuple(together))).logprobs
            differ["batched"] += sum(
                [logprob] != right
                for logprob, right in zip(result, expected_logprobs[first : first + 3], strict=True)
            )
        for request, right in zip(requests, expected_logprobs, strict=True):
            middle = 2 * len(request.tokens) // 3
            backend.run(StepPlan((Slice(request, 0, middle, samples=False),)))
            differ["chunked"] += backend.run(StepPlan((_part(request, middle),))).logprobs != right
            last = len(request.tokens) - 3
            part = Slice(request, 0, last, samples=True)
            part.drafts = tuple(request.tokens[last:])
            differ["drafted"] += backend.run(StepPlan((part,))).logprobs[-1:] != right
            backend.forget(request)
        backend.close()
        differing[f"{model} {fmt}"] = {"sequences": count, "differ": differ}
    return differing


def _part(request: Request, start: int) -> Slice:
    return Slice(request, start, len(request.tokens) - start, samples=True)


CHECKS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    **{
        f"correct-{fmt.lower().replace(' ', '_')}": partial(correct, fmt)
        for fmt in ("BF16", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "FP8", "FP8 blocks")
    },
    "products": products,
    "sampler": sampler,
    "same-tokens": same_tokens,
}
