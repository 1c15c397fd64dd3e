"""Measure how far an engine's logits on the held-out text are from the float32 reference's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.backends.activation_bits.resolve import resolve_activation_bits
from twostroke.backends.create import create_backend
from twostroke.backends.kv_size import size_kv_cache
from twostroke.core.hardware import memory_available
from twostroke.core.options import BatchOptions, CacheOptions, ComputeOptions
from twostroke.lab.measure.divergence import LogitsComparison, compare
from twostroke.model.families import build_program

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from twostroke.backends.interface import Backend
    from twostroke.model.weights import LoadedModel

    Logits = list[NDArray[np.float32]]


_ANSWERED = 128  # tokens of a piece whose successors are asked, one by one


@dataclass(frozen=True, slots=True)
class Quality:
    """A line of the table: who, and the fields of a `LogitsComparison`, those that are known."""

    name: str
    comparison: dict[str, Any]

    @staticmethod
    def header() -> tuple[str, ...]:
        """Return the table's first line."""
        figures = ("mean KL, nats", "max KL", "same likeliest token", "perplexity", "change")
        return ("against the float32 reference", *figures)

    def cells(self) -> tuple[str, ...]:
        """Return the table's line."""
        comparison = self.comparison
        if "mean_kl" not in comparison:
            return (self.name, "–", "–", f"{comparison['top1_agreement']:.2%}", "–", "–")
        return (self.name, *LogitsComparison(**comparison).cells())


def reference_logits(loaded: LoadedModel, parts: list[list[int]]) -> Logits:
    """Return the reference's logits of each piece."""
    return engine_logits(loaded, parts, ComputeOptions("reference"))


def engine_logits(
    loaded: LoadedModel, parts: list[list[int]], compute: ComputeOptions
) -> list[NDArray[np.float32]]:
    """Return a backend's logits of each piece."""
    backend = _backend(loaded, compute)
    logits = [backend.score(part) for part in parts]
    backend.close()
    return logits


def engine_quality(
    loaded: LoadedModel, right: Logits, parts: list[list[int]], compute: ComputeOptions
) -> list[Quality]:
    """Compare one of our backends with the reference: one line for each arithmetic that it uses."""
    backend = _backend(loaded, compute)
    name = f"Twostroke, {backend.facts.detail}"
    rows = {name: False}
    if not backend.facts.one_arithmetic:
        rows = {f"{name}, prompt rows": False, f"{name}, generated rows": True}
    lines = []
    for line, generated in rows.items():
        scores = (backend.score(part, generated=generated) for part in parts)
        lines.append(
            Quality(line, msgspec.to_builtins(compare(zip(right, scores, parts, strict=True))))
        )
    backend.close()
    return lines


def answered_prompts(parts: list[list[int]]) -> list[list[int]]:
    """Return beginnings of the pieces, for engines that give no logits: what they answer counts."""
    return [part[:end] for part in parts for end in range(1, min(len(part), _ANSWERED) + 1, 2)]


def answers_quality(
    name: str, right: Logits, parts: list[list[int]], answers: list[int]
) -> Quality:
    """Compare greedy first tokens behind `answered_prompts` with the reference's likeliest."""
    ends = [(i, len(p)) for i, part in enumerate(parts) for p in answered_prompts([part])]
    likeliest = [int(right[i][end - 1].argmax()) for i, end in ends]
    same = sum(ours == theirs for ours, theirs in zip(likeliest, answers, strict=True))
    return Quality(f"{name} ({len(ends)} answers)", {"top1_agreement": same / len(ends)})


def _backend(loaded: LoadedModel, compute: ComputeOptions) -> Backend:
    program = build_program(loaded.spec)
    compute = resolve_activation_bits(compute, loaded, program)
    cache = CacheOptions(context_length=min(512, program.context_length))
    budget = BatchOptions().token_budget
    size = size_kv_cache(program, cache, budget, loaded.file_bytes, memory_available())
    return create_backend(loaded.tensors, program, compute, size, release=loaded.release)
