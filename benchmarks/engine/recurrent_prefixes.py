"""Count the prompt tokens that a model with recurrent layers computes, and a plain model does not.

Run it with `make bench WHAT=recurrent-prefixes`. It counts tokens and measures no times.

Two small random models answer the same chats with the real engine on the cpu. The first has
recurrent layers and attention in turn, the second attention alone. A plain model finds every cached
page. A model with recurrent layers finds a prefix only where it has kept a snapshot of its state.

The chats are: one of 20 turns whose answers come back as they were generated; one of 20 turns whose
chat template leaves out earlier reasoning; 8 chats at the same time that share a system prompt of
4,000 tokens; and the same 8 chats among others that come and go.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from support.family_templates import ALWAYS_THINKS
from support.tiny import tiny_of, write_tiny_gguf
from twostroke.core.options import BatchOptions, CacheOptions, EngineOptions, SpeculationOptions
from twostroke.core.request import NO_HINTS
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat_answer import encode_conversation
from twostroke.engine.engine import build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.core.request import Hints
    from twostroke.engine.engine import Engine

_HYBRID, _PLAIN = "qwen3.5", "qwen3"  # families of the two models
_CONTEXT = 8192
_CACHE_BYTES = 40_000_000
_ANSWER_TOKENS = 60
_GREEDY = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
_MAX_SHARE = 0.05  # of the prompt tokens, that only the hybrid model may compute
_FIRST_TOKEN, _END_TOKEN = 3, 250  # ordinary tokens of the tiny vocabulary


@dataclass(slots=True)
class Counts:
    """Prompt tokens of all requests, and how many of them were computed."""

    prompt: int = 0
    computed: int = 0


class Chats:
    """Answers requests with an engine, and counts their prompt tokens."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.counts = Counts()

    def message(self, count: int) -> list[int]:
        """Return the tokens of a new user message."""
        return [self.rng.randrange(_FIRST_TOKEN, _END_TOKEN) for _ in range(count)]

    def text(self, count: int) -> str:
        """Return the text of a new message."""
        return " ".join(str(self.rng.randrange(10_000)) for _ in range(count))

    def answer(self, prompts: Iterable[tuple[list[int], Hints]]) -> list[list[int]]:
        """Answer prompts at the same time; return the tokens of each prompt and its answer."""
        prompts = list(prompts)
        client = self.engine.client
        generations = [client.generate(tokens, _GREEDY, hints=hints) for tokens, hints in prompts]
        conversations = []
        for (tokens, _), generation in zip(prompts, generations, strict=True):
            (completion,) = generation.wait()
            assert completion.usage is not None
            self.counts.prompt += len(tokens)
            self.counts.computed += len(tokens) - completion.usage.cached_tokens
            conversations.append([*tokens, *completion.token_ids])
        return conversations


def _kept_answers(chats: Chats, num_turns: int) -> None:
    """Play a chat whose answers come back as they were generated."""
    tokens = chats.message(200)
    for _ in range(num_turns):
        tokens += chats.message(chats.rng.randint(20, 100))
        (tokens,) = chats.answer([(tokens, NO_HINTS)])


def _left_out_reasoning(chats: Chats, num_turns: int) -> None:
    """Play a chat whose template opens reasoning, and leaves out the reasoning of earlier turns."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": chats.text(30)}]
    for _ in range(num_turns):
        messages.append({"role": "user", "content": chats.text(chats.rng.randint(4, 20))})
        tokens, _, hints, *_ = encode_conversation(chats.engine.card, messages, _GREEDY, {})
        chats.answer([(tokens, hints)])
        content = f"<think>{chats.text(5)}</think>{chats.text(8)}"
        messages.append({"role": "assistant", "content": content})


def _shared_system_prompt(chats: Chats, num_turns: int, num_others: int = 0) -> None:
    """Play 8 chats that share a system prompt of 4,000 tokens, among `num_others` in each turn.

    Half of the chats end after their turn, and new ones with the same system prompt begin.
    """
    system = chats.message(4000)
    conversations = [list(system) for _ in range(8)]
    for _ in range(num_turns):
        prompts = [[*tokens, *chats.message(60)] for tokens in conversations]
        conversations = chats.answer((tokens, NO_HINTS) for tokens in prompts)
        if num_others:
            conversations[:4] = [list(system) for _ in range(4)]
            chats.answer((chats.message(150), NO_HINTS) for _ in range(num_others))


def _runs(num_turns: int) -> dict[str, Callable[[Chats], None]]:
    """Return each kind of chats with the function that plays it."""
    return {
        f"a chat of {num_turns} turns": lambda chats: _kept_answers(chats, num_turns),
        f"{num_turns} turns, earlier reasoning left out": lambda chats: _left_out_reasoning(
            chats, num_turns
        ),
        "8 chats with a system prompt of 4,000 tokens": lambda chats: _shared_system_prompt(
            chats, 5
        ),
        "the same, half of them new in each turn, among 12 others": lambda chats: (
            _shared_system_prompt(chats, 5, 12)
        ),
    }


def _engine(folder: Path, family: str, max_running: int) -> Engine:
    path = write_tiny_gguf(
        folder / f"{family}.gguf",
        tiny_of(family, context_length=_CONTEXT),
        {"tokenizer.chat_template": ALWAYS_THINKS},
    )
    options = EngineOptions(
        speculation=SpeculationOptions("off"),
        batch=BatchOptions(max_running=max_running),
        cache=CacheOptions(memory_bytes=_CACHE_BYTES, context_length=_CONTEXT),
    )
    return build(str(path), options)


def main() -> None:
    """Count, then print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=positive, default=20, help="of a chat alone")
    parser.add_argument(
        "--running", type=positive, default=8, help="requests at once; there are 4 slots for each"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the messages")
    args = parser.parse_args()
    result: dict[str, Any] = dict(machine_facts())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, play in _runs(args.turns).items():
            note(name)
            counts = {}
            for family in (_HYBRID, _PLAIN):
                with _engine(Path(folder), family, args.running) as engine:
                    chats = Chats(engine, args.seed)
                    play(chats)
                    counts[family] = chats.counts
                    result["slots"] = max(result.get("slots", 0), engine.facts.num_states)
            hybrid, plain = counts[_HYBRID], counts[_PLAIN]
            share = (hybrid.computed - plain.computed) / hybrid.prompt
            result[name] = {
                "prompt_tokens": hybrid.prompt,
                "computed": hybrid.computed,
                "computed_by_plain": plain.computed,
                "share": share,
            }
            figures = (hybrid.prompt, plain.computed, hybrid.computed)
            rows.append((name, *(f"{figure:,}" for figure in figures), f"{100 * share:.1f}%"))
    columns = ("chats", "prompt tokens", "computed, plain", "computed, hybrid", "more")
    caption_text = (
        f"{result['slots']} slots for recurrent states. Asked: at most {100 * _MAX_SHARE:g}% of"
    )
    text = [f"{caption_text} the prompt tokens are computed more.", "", table(columns, rows), ""]
    save("recurrent-prefixes", result, "\n".join([*text, caption(result)]))


if __name__ == "__main__":
    main()
