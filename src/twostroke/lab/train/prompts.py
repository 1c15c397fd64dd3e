"""Generates prompts for training: heads and students learn from a model's answers to them.

A seeded generator combines the words of prompts.toml into many thousands of prompts: questions,
advice, code, and texts to continue, quote or rewrite.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import tomllib
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_WORDS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_CHAT_SHARE = 0.7


class TrainingPrompt(Frozen):
    """A prompt to which a model's answer is recorded: a chat message, or a text to continue."""

    text: str
    is_chat: bool


def prompts(seed: int, *, chat: bool) -> Iterator[TrainingPrompt]:
    """Yield built-in training prompts without end; equal seeds give equal prompts.

    Without `chat`, for models without a chat template, all prompts are texts to continue.
    """
    rng = random.Random(seed)
    while True:
        is_chat = chat and rng.random() < _CHAT_SHARE
        kinds = _CHAT_KINDS if is_chat else _TEXT_KINDS
        (make,) = rng.choices(list(kinds), list(kinds.values()))
        yield TrainingPrompt(make(rng), is_chat)


def _question(rng: random.Random) -> str:
    return _filled(rng, rng.choice(_WORDS["questions"]), _WORDS["subjects"])


def _plain(rng: random.Random) -> str:
    return _filled(rng, rng.choice(_WORDS["plain"]), [str(number) for number in range(2, 60)])


def _program(rng: random.Random) -> str:
    pattern, language, task = _sampled_words(rng, "code", "languages", "tasks")
    task = pattern.format(language=language, task=task)
    return task if rng.random() < 0.7 else f"{task} {rng.choice(_WORDS['wishes'])}"


def _edit(rng: random.Random) -> str:
    return f"{rng.choice(_WORDS['edits'])}\n\n{_sample_story(rng, rng.randrange(3, 9))}"


def _edit_code(rng: random.Random) -> str:
    code = rng.choice(_functions())
    return f"{rng.choice(_WORDS['code_edits'])}\n\n```python\n{_first_lines(rng, code, 24)}\n```"


def _story(rng: random.Random) -> str:
    return _sample_story(rng, rng.randrange(2, 7))


def _article(rng: random.Random) -> str:
    subject = rng.choice(_WORDS["subjects"])
    return f"{subject[0].upper()}{subject[1:]} {rng.choice(_WORDS['openings'])}"


def _code(rng: random.Random) -> str:
    return _first_lines(rng, rng.choice(_functions()), 40) + "\n"


def _stub(rng: random.Random) -> str:
    """Return the first lines of an invented Python function, as a training prompt."""
    verb, name, kind, task = _sampled_words(rng, "verbs", "names", "types", "tasks")
    return f'def {verb}_{name}({name}: {kind}):\n    """A function that {task}."""\n'


_CHAT_KINDS: dict[Callable[[random.Random], str], float] = {
    _question: 6, _plain: 0.5, _program: 2.5, _edit: 1, _edit_code: 1,
}  # fmt: skip
_TEXT_KINDS: dict[Callable[[random.Random], str], float] = {
    _code: 3, _stub: 1, _story: 1.5, _article: 1.5,
}  # fmt: skip


def _sampled_words(rng: random.Random, *kinds: str) -> list[str]:
    """Return a random word of each kind, to be put into a training prompt."""
    return [rng.choice(_WORDS[kind]) for kind in kinds]


def _filled(rng: random.Random, text: str, words: Sequence[str]) -> str:
    while "{}" in text:
        text = text.replace("{}", rng.choice(words), 1)
    return text


def _sample_story(rng: random.Random, num_sentences: int) -> str:
    people = rng.sample(_WORDS["people"], 2)
    sentences = []
    for _ in range(num_sentences):
        person = rng.choice(people)
        place_name, deed, pattern, subject = _sampled_words(
            rng, "places", "deeds", "sentences", "subjects"
        )
        sentence = pattern.format(who=person, place=place_name, deed=deed, subject=subject)
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences)


def _first_lines(rng: random.Random, code: str, max_lines: int) -> str:
    """Return the first lines of a function's code, at most `max_lines`, as a training prompt."""
    lines = code.splitlines()
    return "\n".join(lines[: min(max_lines, max(3, rng.randrange(len(lines))))])


@cache
def _functions() -> list[str]:
    """Return the source of functions and methods of the installed standard library."""
    functions = []
    for name in _WORDS["modules"]:
        try:
            source = inspect.getsource(importlib.import_module(name))
        except (ImportError, OSError):  # not installed, or without source
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                function_lines = lines[node.lineno - 1 : node.end_lineno]
                if 6 <= len(function_lines) <= 60:
                    functions.append(dedent("\n".join(function_lines)))
    return functions
