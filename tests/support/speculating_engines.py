"""Engines with speculation, and all answers to some prompts, which speculation must not change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.native import native_dir
from twostroke import LLM, SamplingParams
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.engine.output import Completion

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, max_tokens=40, seed=1, logprobs=2),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.95, max_tokens=40, seed=2, n=3),
    SamplingParams(max_tokens=40, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=60, min_tokens=40, stop=["e", "th"]),
    SamplingParams(max_tokens=40, seed=4, logit_bias={20: 5.0, 21: -50.0}, min_p=0.02),
]
PROMPTS = ["hello the world is in the world is in", "the and the and the and", "a", "ing er is of"]


def engine_of(
    path: Path, backend: str = "cpu", cache: CacheOptions | None = None, **speculation: Any
) -> LLM:
    """Start a model on a backend; `cpu:avx2` names one of its instruction-set levels."""
    level = None
    if backend.startswith("cpu"):
        native_dir()
        backend, _, level = backend.partition(":")
    compute = ComputeOptions(backend=backend, level=level or None)
    cache = cache or CacheOptions(memory_bytes=6_000_000 if backend == "cpu" else None)
    speculation_options = SpeculationOptions(**speculation)
    return LLM(str(path), EngineOptions(compute, cache, speculation=speculation_options))


def comparable_fields(answers: list[list[Completion]]) -> list[Any]:
    """Return the parts of answers that must be equal with and without speculation."""
    return [
        (
            output.text,
            output.token_ids,
            output.logprobs,
            output.finish_reason,
            output.stop,
            output.usage.completion_tokens,
        )
        for answer in answers
        for output in answer
    ]


def everything(llm: LLM, **hints: Any) -> list[Any]:
    """Return a model's answers to all prompts with all sampling parameters."""
    return [
        *comparable_fields(llm.generate(PROMPTS, GREEDY, **hints)),
        *(
            comparable_field
            for params in SAMPLED
            for comparable_field in comparable_fields(llm.generate(PROMPTS, params, **hints))
        ),
    ]
