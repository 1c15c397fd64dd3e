"""Kinds of text that differ in how predictable they are, with fresh prompts each time."""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from twostroke.core.sampling import SamplingParams
from twostroke.engine.prompts import encode_chat, encode_text
from twostroke.lab.measure.compare import held_out_text

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from twostroke.engine.model_card import ModelCard

_MODULES = ("argparse", "textwrap", "configparser", "calendar", "heapq", "statistics", "fractions")
_TOPICS = (
    "the sea", "bread", "bicycles", "old maps", "the moon", "learning to swim", "chess", "rain",
    "paper", "small gardens", "trains", "the history of tea", "bees", "snow", "clocks", "ships",
)  # fmt: skip
_QUESTIONS = (
    "Tell me something that few people know about {}.",
    "Write three short tips about {} for a beginner.",
    "Explain {} to a child of ten.",
    "What would you ask an expert on {}?",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of text: `prompt(card, rng)` makes a fresh prompt, at a temperature."""

    name: str
    prompt: Callable[[ModelCard, random.Random], list[int]]
    temperature: float = 0.0
    ignores_end: bool = False

    def params(self, num_tokens: int) -> SamplingParams:
        """Return how it is answered."""
        return SamplingParams(
            max_tokens=num_tokens,
            temperature=self.temperature,
            seed=1,
            ignore_eos=self.ignores_end,
        )


def _chat(card: ModelCard, rng: random.Random) -> list[int]:
    return _ask(card, rng.choice(_QUESTIONS).format(rng.choice(_TOPICS)))


def _prose(card: ModelCard, rng: random.Random) -> list[int]:
    words = held_out_text().split()
    start = rng.randrange(len(words) - 150)
    return encode_text(card, " ".join(words[start : start + 100]))


def _code(card: ModelCard, rng: random.Random) -> list[int]:
    """The first half of a function of the standard library, to be gone on with."""
    lines = rng.choice(_functions()).splitlines()
    return encode_text(card, "\n".join(lines[: max(6, len(lines) // 2)]) + "\n")


def _edit(card: ModelCard, rng: random.Random) -> list[int]:
    """A function to be written out again with one name changed."""
    code = rng.choice([code for code in _functions() if len(code) < 1200])
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    name = rng.choice([arg.arg for arg in function.args.args])
    new = rng.choice(("item", "given", "current", "entry", "source"))
    return _ask(
        card,
        f"Rename `{name}` to `{new}_{rng.randrange(100)}` in this function. Answer with the whole "
        f"function in one code block and nothing else.\n\n```python\n{code}\n```",
    )


def _quote(card: ModelCard, rng: random.Random) -> list[int]:
    """A passage, and its beginning once more: models go on with what they have just read."""
    words = held_out_text().split()
    start = rng.randrange(len(words) - 260)
    text_part = " ".join(words[start : start + 240])
    return encode_text(card, f"{text_part}\n\n{' '.join(words[start : start + 40])}")


def _random(card: ModelCard, rng: random.Random) -> list[int]:
    size = card.tokenizer.num_text_ids
    return [rng.randrange(size // 2) for _ in range(100)]


TASKS = {
    task.name: task
    for task in (
        Task("chat", _chat),
        Task("chat at temperature 1", _chat, temperature=1.0),
        Task("prose", _prose, ignores_end=True),
        Task("code", _code, ignores_end=True),
        Task("edit", _edit),
        Task("quote", _quote, ignores_end=True),
        Task("random", _random, temperature=1.0, ignores_end=True),
    )
}


def _ask(card: ModelCard, text: str) -> list[int]:
    if card.chat_template is None:
        return encode_text(card, text + "\n")
    return encode_chat(card, [{"role": "user", "content": text}])


@cache
def _functions() -> list[str]:
    """Functions of some length and with arguments, out of the standard library's sources."""
    results = []
    for name in _MODULES:
        source = inspect.getsource(importlib.import_module(name))
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.args.args:
                code = ast.get_source_segment(source, node) or ""
                if 12 <= code.count("\n") <= 60:
                    results.append(code)
    return results
