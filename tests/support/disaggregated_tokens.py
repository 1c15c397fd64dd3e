"""Prompts answered by one engine, and by a decode engine with a prefill engine in a process."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common.servers import Server, free_port, our_command
from support.disaggregation import check_clean, view
from support.waiting import wait_for
from twostroke import LLM, SamplingParams
from twostroke.core.constraint import Constraint
from twostroke.core.distributed_options import DisaggregationOptions
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.lab.measure.compare import held_out_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.engine.output import Completion

_CONTEXT, _BUDGET = 512, 64
_LONGEST = 300  # tokens of a prompt
_MOST_TOGETHER = 16
_FORMS = (
    Constraint("regex", "[A-Z][a-z ]{4,20}[.]"),
    Constraint("choice", '["yes", "no", "perhaps"]'),
    Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}}'),
)


class Case(NamedTuple):
    """A way to transfer prompts; the answers are compared with the answers of one engine.

    `host` is the prefill engine's address, `speculate` the decode engine's speculation method.
    """

    model: str
    kv_format: str = "f16"
    host: str = "127.0.0.1"  # any other is not known as this machine, so pages are sent
    speculate: str = "off"
    link: str = "socket"  # --peer-link, where no memory is shared


class Comparison(NamedTuple):
    """The result of a comparison: answers compared, prompts that differ, and KV transfers."""

    num_answers: int
    different: list[int]
    transfers: dict[str, int]
    num_bytes: int


def compare(case: Case, count: int, seed: int, folder: Path) -> Comparison:
    """Answer `count` prompts with one engine and with two, in batches; no page may stay held."""
    with LLM(case.model, _options(case)) as alone:
        prompts = list(_prompts(alone, count, seed))
        params = [_params(number) for number in range(count)]
        expected = list(map(_all_of, alone.generate(prompts, params)))
    with ExitStack() as stack:
        address = f"{case.host}:{free_port()}"
        command = (*our_command(case.model, 1), "--accept-quality", "--no-access-log")
        role = ("--role", "prefill", "--peer-address", address)
        cache = ("--kv-format", case.kv_format, "--context-length", str(_CONTEXT))
        Server("prefill", (*command, *role, *cache), folder, stack)
        disaggregation = DisaggregationOptions("decode", None, (address,), "always", case.link)
        llm = stack.enter_context(LLM(case.model, _options(case, disaggregation)))
        wait_for(lambda: view(llm).decode_side.peers[0].state == "up")
        result: list[Any] = []
        rng = random.Random(seed)
        while len(result) < count:
            part = slice(len(result), len(result) + rng.randint(1, _MOST_TOGETHER))
            result += map(_all_of, llm.generate(prompts[part], params[part]))
        check_clean(llm)
        decode_side = view(llm).decode_side
    different = [
        n for n, pair in enumerate(zip(result, expected, strict=True)) if pair[0] != pair[1]
    ]
    return Comparison(
        sum(map(len, result)), different, decode_side.transfers, decode_side.num_bytes
    )


def _options(case: Case, disaggregation: DisaggregationOptions | None = None) -> EngineOptions:
    """Return the options of a decode engine, or of one engine that computes all prompts itself."""
    is_alone = disaggregation is None
    return EngineOptions(
        ComputeOptions(num_threads=1),
        CacheOptions(context_length=_CONTEXT, kv_format=case.kv_format, prefix_cache=not is_alone),
        BatchOptions(token_budget=_BUDGET),
        SpeculationOptions("off" if is_alone else case.speculate),
        accept_quality=True,
        disaggregation=disaggregation or DisaggregationOptions(),
    )


def _prompts(llm: LLM, count: int, seed: int) -> Iterator[list[int]]:
    """Yield pieces of prose and code as prompts, some of which begin alike."""
    rng = random.Random(seed)
    text = llm.engine.card.tokenizer.encode(held_out_text())
    begins = [text[start : start + _LONGEST // 2] for start in (0, 500, 1000)]
    for _ in range(count):
        length = rng.randint(1, _LONGEST // 2)
        start = rng.randrange(len(text) - length)
        yield (rng.choice(begins) if rng.random() < 0.6 else []) + text[start : start + length]


def _params(number: int) -> SamplingParams:
    """Return sampling parameters: greedy or sampled, some with a constraint or several answers."""
    return SamplingParams(
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        max_tokens=4 + number % 16,
        logprobs=None if number % 6 else 2,
        frequency_penalty=0.0 if number % 7 else 0.5,
        n=1 if number % 5 else 3,
        constraint=_FORMS[number // 4 % len(_FORMS)] if number % 4 == 1 else None,
    )


def _all_of(answer: list[Completion]) -> list[tuple[object, ...]]:
    return [
        (completion.token_ids, completion.text, completion.finish_reason.value, completion.logprobs)
        for completion in answer
    ]
