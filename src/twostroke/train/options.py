"""The options of training."""

from __future__ import annotations

import math

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.models.heads import KINDS

MAX_DEPTH = 16


class LearnOptions(Frozen):
    """From what a model's answers are made, and for how long something learns from them.

    `data` is "self" or a file of prompts; `num_tokens` of the model's answers to them are learned
    from. `minutes` limits the training time of all runs into one folder together.
    """

    data: str = "self"
    num_tokens: int = 250_000
    minutes: float = 30.0
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; UsageError for a value outside."""
        check_least(self, num_tokens=1)
        for name in ("minutes", "learning_rate"):
            number = getattr(self, name)
            if not 0 < number < math.inf:
                raise UsageError(f"must be a finite number above 0, got {number:g}.", field=name)


class TrainOptions(LearnOptions):
    """How heads are trained.

    They guess one of the `vocab_size` most frequent tokens. `depth` is the number of guesses in a
    row, which for Medusa is the number of blocks. `ffn_size` None means two thirds of the model's.
    A head's attention sees `window` tokens.
    """

    kind: str = "eagle"
    vocab_size: int = 4096
    depth: int = 4
    ffn_size: int | None = None
    window: int = 256

    def __post_init__(self) -> None:
        """Check the ranges; UsageError for a value outside."""
        super().__post_init__()
        if self.kind not in KINDS:
            raise UsageError(f"must be one of {', '.join(KINDS)}, got '{self.kind}'.", field="kind")
        check_least(self, vocab_size=16, window=16, ffn_size=1)
        if not 1 <= self.depth <= MAX_DEPTH:
            raise UsageError(f"must be from 1 to {MAX_DEPTH}, got {self.depth}.", field="depth")


class DistillOptions(LearnOptions):
    """How a student is trained: `length` is the most tokens of a sequence."""

    learning_rate: float = 1e-4
    length: int = 512

    def __post_init__(self) -> None:
        """Check the ranges; UsageError for a value outside."""
        super().__post_init__()
        check_least(self, length=32)


def check_least(options: LearnOptions, **least: int) -> None:
    """Refuse fields of `options` that are below their least values; None passes."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"must be at least {low}, got {value}.", field=name)
