"""Ranks of the torch backend: processes that reach each other through Gloo, on CPU tensors.

Matrices of other shapes may be multiplied in another order, so log-probabilities are only near
those of one process; tokens are equal.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.options import BatchOptions, CacheOptions, ComputeOptions, EngineOptions
from twostroke.core.sampling import SamplingParams
from twostroke.engine.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.output import Completion

PROMPTS = ["hello world", "the world is the world of the world", "a", "of the world to"]


def options(parallel: ParallelOptions) -> EngineOptions:
    return EngineOptions(
        ComputeOptions("torch", device="cpu"),
        CacheOptions(context_length=128),
        BatchOptions(token_budget=16),  # prompts come in chunks
        parallel=parallel,
    )


def answer(llm: LLM, prompts: Sequence[str] = PROMPTS) -> list[Completion]:
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0)
    return [completion for (completion,) in llm.generate(prompts, params)]


def assert_near(
    completions: list[Completion], expected: list[Completion], tolerance: float
) -> None:
    assert [completion.token_ids for completion in completions] == [
        completion.token_ids for completion in expected
    ]
    for ours, theirs in zip(completions, expected, strict=True):
        assert [token.logprob for token in ours.logprobs] == pytest.approx(
            [token.logprob for token in theirs.logprobs], abs=tolerance
        )


DIVISIONS = {
    "qwen2": (
        ParallelOptions(tensor=2, reduce="gather"),
        ParallelOptions(tensor=3, shares=(2, 1, 1), reduce="sum"),
        ParallelOptions(tensor=2, pipeline=2, reduce="sum"),
        ParallelOptions(context=2),
    ),
    "qwen3.5": (
        ParallelOptions(tensor=2, pipeline=2, reduce="gather"),
        ParallelOptions(tensor=3, shares=(2, 1, 1), reduce="sum"),
        ParallelOptions(context=2),
    ),
    "qwen3.5-moe": (ParallelOptions(expert=2),),
    "mixtral": (ParallelOptions(expert=2, context=2), ParallelOptions(expert=3)),
}


@pytest.mark.parametrize("family", DIVISIONS)
def test_tokens_are_those_of_one_process(family: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of(family, seed=3))
    with LLM(path, options(ParallelOptions())) as llm:
        expected = answer(llm)
    for parallel in DIVISIONS[family]:
        with LLM(path, options(parallel)) as llm:
            assert len(llm.engine.facts.ranks) == parallel.num_ranks
            assert_near(answer(llm), expected, 1e-4)


@pytest.mark.parametrize("reduce", ["gather", "sum"])
def test_smollm2_on_two_ranks(reduce: str, smollm2_path: Path) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):"]
    with LLM(smollm2_path, options(ParallelOptions())) as llm:
        expected = answer(llm, prompts)
    with LLM(smollm2_path, options(ParallelOptions(tensor=2, reduce=reduce))) as llm:
        assert_near(answer(llm, prompts), expected, 1e-3)
        own_rank, other = llm.engine.facts.ranks
        assert own_rank.weight_bytes < 0.55 * (own_rank.weight_bytes + other.weight_bytes)


def test_a_killed_rank_is_replaced_and_answers_go_on(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("llama", seed=3))
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    with LLM(path, options(ParallelOptions())) as llm:
        ((expected,),) = llm.generate(["hello world"], params)
    with LLM(path, options(ParallelOptions(tensor=3))) as llm:
        stream = llm.stream("hello world", params)
        token_ids = list(next(stream).token_ids)
        tasks = Path("/proc/self/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        os.kill(children[-1], signal.SIGKILL)
        token_ids += [token for output in stream for token in output.token_ids]
    assert tuple(token_ids) == expected.token_ids
