"""The options of training."""

from __future__ import annotations

import math

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.models.heads import KINDS

MAX_DEPTH = 16


class TrainOptions(Frozen):
    """How heads are trained.

    `data` is "self" or a file of prompts; heads learn from `num_tokens` of the model's answers to
    them. `minutes` limits the training time of all runs into one folder together. Heads guess one
    of the `vocab_size` most frequent tokens. `depth` is the number of guesses in a row, which for
    Medusa is the number of blocks. `ffn_size` None means two thirds of the model's. A head's
    attention sees `window` tokens.
    """

    kind: str = "eagle"
    data: str = "self"
    num_tokens: int = 250_000
    minutes: float = 30.0
    vocab_size: int = 4096
    depth: int = 4
    ffn_size: int | None = None
    window: int = 256
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; UsageError for a value outside."""
        if self.kind not in KINDS:
            raise UsageError(f"must be one of {', '.join(KINDS)}, got '{self.kind}'.", field="kind")
        for name, low in (("num_tokens", 1), ("vocab_size", 16), ("window", 16), ("ffn_size", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"must be at least {low}, got {value}.", field=name)
        if not 1 <= self.depth <= MAX_DEPTH:
            raise UsageError(f"must be from 1 to {MAX_DEPTH}, got {self.depth}.", field="depth")
        for name in ("minutes", "learning_rate"):
            number = getattr(self, name)
            if not 0 < number < math.inf:
                raise UsageError(f"must be a finite number above 0, got {number:g}.", field=name)
