"""Random rounds of engines whose recurrent states are evicted, stored, loaded and handed over."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.disaggregation import SECRET, check_clean, decode, options, prefill, view
from support.stored_pages import DAMAGES
from support.tiny import tiny_of, write_tiny_gguf
from twostroke import LLM, SamplingParams
from twostroke.core.distributed_options import OffloadOptions
from twostroke.core.request import Hints
from twostroke.engine.kv_offload.disk import stored_pages
from twostroke.engine.kv_offload.manager import OffloadManager

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from pathlib import Path

_FAMILIES = ("qwen3.5", "qwen3-next", "kimi-linear", "lfm2", "granite-hybrid", "nemotron-h")
_LINKS = ("shared", "tcp")
_NUM_PROMPTS = 10
_MAX_TOKENS = 400
_SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True)


def run_recurrent_round(
    seed: int, folder: Path, counts: Counter[str], families: Sequence[str] = _FAMILIES
) -> None:
    """Answer prompts that begin alike in several engines, one after another, with one page cache.

    Each engine has its own prefill engine or none, and a random number of slots. Between prompts,
    pages, snapshots and stored files are lost or damaged. All tokens must be those of an engine
    without prefix cache.
    """
    rng = random.Random(seed)
    path = write_tiny_gguf(folder / "m.gguf", tiny_of(rng.choice(families)))
    kv_format = rng.choice(("f16", "int8"))
    prompts = _prompts(rng)
    plain = options(kv_format=kv_format)
    plain = replace(plain, cache=replace(plain.cache, prefix_cache=False))
    with LLM(path, plain) as alone:
        expected = [_answer(alone, [prompt])[0] for prompt in prompts]
    tiers = OffloadOptions(page_cache=str(folder / "pages"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_PEER_SECRET", SECRET)
        for _ in range(3):
            memory = rng.choice((1_500_000, 4_000_000))
            kwargs: dict[str, Any] = {
                "kv_format": kv_format,
                "memory": memory,
                "budget": rng.choice((16, 48, 128)),
            }
            with ExitStack() as opened:
                if rng.random() < 0.5:
                    link = rng.choice(_LINKS)
                    _, address = opened.enter_context(prefill(path, link, **kwargs))
                    llm = opened.enter_context(decode(path, address, tiers=tiers, **kwargs))
                else:
                    llm = opened.enter_context(LLM(path, options(tiers=tiers, **kwargs)))
                _play(rng, llm, prompts, expected)
                check_clean(llm)
                _count(llm, counts)
            _damage(rng, folder / "pages")
    counts["rounds"] += 1


def _prompts(rng: random.Random) -> list[list[int]]:
    """Return prompts, most of which continue or repeat a beginning of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(_NUM_PROMPTS):
        begin = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        begin = begin[: rng.choice((len(begin), len(begin), rng.randint(0, 300)))]
        continuation = [rng.randrange(3, 250) for _ in range(rng.randint(1, 150))]
        prompts.append([*begin, *continuation][:_MAX_TOKENS])
    return prompts


def _play(
    rng: random.Random,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> None:
    """Answer random prompts, several at the same time, and lose pages and snapshots between."""
    pages = llm.engine.client.loop.pages
    owners = [getattr(function, "__self__", None) for function in pages.on_submit]
    (manager,) = (owner for owner in owners if isinstance(owner, OffloadManager))
    # So slow that loading always pays; the tiny model is faster than any disk.
    manager._prefill_s = lambda first, end: (end - first) * 0.01
    manager._is_measured = lambda: True
    for _ in range(6):
        chosen_indices = rng.choices(range(len(prompts)), k=rng.randint(1, 4))
        keep_s = rng.choice((0.0, 60.0))
        answers = _answer(llm, [prompts[number] for number in chosen_indices], keep_s)
        for number, answer in zip(chosen_indices, answers, strict=True):
            assert answer == expected[number], f"prompt {number}"
        assert pages.flush(10.0)
        with pages.lock:
            recurrent = pages.scheduler._recurrent
            assert recurrent is not None
            if rng.random() < 0.4:
                recurrent.pool.evict_all()
            if rng.random() < 0.3:
                pages.scheduler._pool.evict_all()


def _answer(
    llm: LLM, prompts: Sequence[Sequence[int]], keep_s: float = 0.0
) -> list[tuple[int, ...]]:
    """Return the tokens of the answers to prompts that are submitted at the same time."""
    client = llm.engine.client
    hints = Hints(keep_s=keep_s)
    generations = [client.generate(prompt, _SAMPLED, hints=hints) for prompt in prompts]
    return [generation.wait()[0].token_ids for generation in generations]


def _damage(rng: random.Random, folder: Path) -> None:
    """Remove or damage some of the stored files."""
    paths = sorted(stored_pages(folder))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents, strict=True):
        chance = rng.random()
        if chance < 0.03:
            path.unlink()
        elif chance < 0.08:
            path.write_bytes(rng.choice([*DAMAGES.values()])(rng, content, contents))


def _count(llm: LLM, counts: Counter[str]) -> None:
    loop = llm.engine.client.loop
    (totals,) = loop.snapshot().tiers
    state_memory, memory = loop.pages.state_memory, loop.pages.memory
    assert state_memory is not None
    assert memory is not None
    num_state_bytes = totals.bytes_read - totals.pages_read * memory.page_bytes
    counts["loaded pages"] += totals.pages_read
    counts["loaded states"] += num_state_bytes // state_memory.page_bytes
    counts["hit tokens"] += loop.snapshot().scheduler.num_hit_tokens
    if llm.engine.client.disaggregation_stats is not None:
        counts["handed over"] += view(llm).decode_side.transfers.get("done", 0)
