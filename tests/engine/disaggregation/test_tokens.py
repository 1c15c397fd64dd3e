"""A prompt that a prefill engine computes is answered as if one engine had computed all."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.disaggregation import (
    LINKS,
    SAMPLED,
    SECRET,
    answers,
    check_clean,
    options,
    pair,
    random_prompts,
    view,
)
from support.tiny import tiny_of, write_tiny_gguf
from twostroke import LLM, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

CASES = [
    ("llama", "f16", "shared"),
    ("gemma3", "int8", "shared"),
    ("gemma2", "int16", "tcp"),
    ("qwen3-moe", "int8", "tcp"),
    ("llama", "auto", "sockets"),
    ("qwen3.5", "f16", "shared"),
    ("qwen3-next", "int8", "tcp"),
]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", SECRET)


@pytest.mark.parametrize(("family", "kv_format", "link"), CASES)
def test_the_tokens_are_those_of_one_engine(
    tmp_path: Path, family: str, kv_format: str, link: str
) -> None:
    assert link in LINKS
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of(family))
    prompts = random_prompts(random.Random(1), 12)
    kwargs = {"kv_format": kv_format}
    if link == "sockets":
        kwargs["backend"] = "reference"
    with LLM(path, options(**kwargs)) as alone:
        expected = answers(alone, prompts, SAMPLED)
    with pair(path, link, kv_format=kv_format) as (first, second):
        assert answers(second, prompts, SAMPLED) == expected
        decode_side = view(second).decode_side
        assert set(decode_side.transfers) == {"done"}
        assert decode_side.transfers["done"] >= 8
        assert decode_side.peers[0].link == ("shared memory" if link == "shared" else "socket")
        assert view(first).prefill_side.num_expired_leases == 0
        hits = second.engine.client.loop.snapshot().scheduler.num_hit_tokens
        assert hits > sum(map(len, prompts)) - 16 * len(prompts) - 1
        for llm in (first, second):
            check_clean(llm)


def test_several_answers_of_a_prompt_share_one_transfer(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=3, ignore_eos=True)
    prompts = random_prompts(random.Random(2), 4)
    with LLM(path, options()) as alone:
        expected = answers(alone, prompts, params)
    with pair(path, "shared", speculate="ngram") as (_, second):
        assert answers(second, prompts, params) == expected
        assert view(second).decode_side.transfers["done"] <= len(prompts)


def test_a_prompt_that_was_read_there_is_not_read_again(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    prompts = random_prompts(random.Random(4), 1)
    with pair(path, "shared") as (first, second):
        expected = answers(first, prompts, SAMPLED)
        before = first.engine.client.loop.snapshot().phases
        assert answers(second, prompts, SAMPLED) == expected
        assert view(second).decode_side.transfers == {"done": 1}
        assert first.engine.client.loop.snapshot().phases == before


def test_a_small_pool_reads_here_what_it_has_no_room_for(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    prompts = random_prompts(random.Random(3), 30)
    with LLM(path, options()) as alone:
        expected = answers(alone, prompts, SAMPLED)
        page_bytes = alone.engine.client.loop.pages.memory.page_bytes
    with pair(path, "shared", memory=60 * page_bytes) as (first, second):
        assert answers(second, prompts, SAMPLED) == expected
        assert view(second).decode_side.decisions["full"] > 0
        for llm in (first, second):
            check_clean(llm)
