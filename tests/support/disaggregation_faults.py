"""Rounds of faults in KV transfers: messages are lost, late and duplicated, connections are cut."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from support.disaggregation import (
    KINDS,
    SAMPLED,
    SECRET,
    Network,
    answers,
    check_clean,
    options,
    pair,
    random_prompts,
    view,
)
from support.tiny import tiny_of, write_tiny_gguf
from support.waiting import wait_for
from twostroke import LLM
from twostroke.engine.disaggregation import prefill_connection, prefill_side

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence
    from pathlib import Path

FAULTS = ("lost", "late", "doubled", "cut")
_FAMILIES = ("llama", "llama", "gemma3", "qwen3-moe", "qwen3.5")
_NUM_PROMPTS = 6


def shorten_timeouts(patch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts after which a fault is noticed."""
    patch.setattr(prefill_connection, "STALL_TIMEOUT_S", 0.3)
    patch.setattr(prefill_side, "LEASE_S", 0.5)
    patch.setenv("TWOSTROKE_PEER_SECRET", SECRET)


def run_each_fault(
    folder: Path,
    link: str,
    counts: Counter[str],
    family: str = "llama",
    kinds: Sequence[str] = KINDS,
) -> None:
    """Apply each fault to one message of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_timeouts(patch)
        plan: list[str] = []
        Network(patch, _once(plan), counts)
        path = write_tiny_gguf(folder / "m.gguf", tiny_of(family))
        rng = random.Random(7)
        prompts = [random_prompts(rng, 3) for _ in range(len(kinds) * len(FAULTS))]
        kwargs: dict[str, Any] = {"backend": "reference"} if link == "sockets" else {}
        with LLM(path, options(**kwargs)) as alone:
            expected = [answers(alone, some, SAMPLED) for some in prompts]
        with pair(path, link) as (first, second):
            for (kind, fault), some, tokens in zip(
                itertools.product(kinds, FAULTS), prompts, expected, strict=True
            ):
                wait_for(lambda: view(second).decode_side.peers[0].state == "up")
                plan[:] = [kind, fault]
                if kind == "Abort":
                    second.engine.client.generate(some[0], SAMPLED).cancel()
                    wait_for(lambda: not plan)
                assert answers(second, some, SAMPLED) == tokens, f"{kind} {fault}"
                if kind == "Load":
                    wait_for(lambda: not plan)
                for llm in (first, second):
                    check_clean(llm)
            counts.update(
                {f"transfers {k}": n for k, n in view(second).decode_side.transfers.items()}
            )


def run_round(
    seed: int,
    folder: Path,
    counts: Counter[str],
    links: Sequence[str] = ("shared", "tcp"),
    use: Callable[[pytest.MonkeyPatch, Callable[[], str]], None] | None = None,
) -> None:
    """Play a random round: its model, its link, its faults, and its cancelled requests.

    `use` replaces NIXL processes by stand-ins, which then fail as often as messages do.
    """
    rng = random.Random(seed)
    link = rng.choice(links)
    fault_rate = rng.choice((0.02, 0.1, 0.3))
    kwargs: dict[str, Any] = {
        "kv_format": rng.choice(("f16", "bf16", "int8", "int16")),
        "budget": rng.choice((16, 48, 128)),
    }
    path = write_tiny_gguf(folder / "m.gguf", tiny_of(rng.choice(_FAMILIES)))
    prompts = random_prompts(rng, _NUM_PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        shorten_timeouts(patch)
        with LLM(path, options(**kwargs)) as alone:
            expected = answers(alone, prompts, SAMPLED)
        faults = random.Random(seed)
        is_on = [False]

        def choose(kind: str) -> str:
            del kind
            hits = is_on[0] and faults.random() < fault_rate
            return faults.choice(FAULTS) if hits else ""

        def choose_move() -> str:
            hits = is_on[0] and faults.random() < fault_rate / 2
            return faults.choice(("fails", "stuck")) if hits else ""

        Network(patch, choose, counts)
        if use is not None:
            use(patch, choose_move)
        with pair(path, link, **kwargs) as (first, second):
            is_on[0] = True
            client = second.engine.client
            requests = [client.generate(prompt, SAMPLED) for prompt in prompts]
            cancelled = {number for number in range(len(requests)) if rng.random() < 0.2}
            for number in cancelled:
                requests[number].cancel()
            for number, generation in enumerate(requests):
                (answer,) = generation.wait()
                if number not in cancelled:
                    assert [answer.token_ids] == expected[number], f"prompt {number}"
            is_on[0] = False
            for llm in (first, second):
                check_clean(llm)
            counts.update(
                {f"transfers {k}": n for k, n in view(second).decode_side.transfers.items()}
            )
    counts["rounds"] += 1


def _once(plan: list[str]) -> Callable[[str], str]:
    """Return a function that applies the fault in `plan` to one message of the kind in it."""

    def choose(kind: str) -> str:
        if not plan or plan[0] != kind:
            return ""
        _, fault = plan
        plan.clear()
        return fault

    return choose
