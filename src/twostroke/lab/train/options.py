"""The options of training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.yaml_file import YamlFile
from twostroke.model.families.heads import KINDS

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.families import ModelSpec

MAX_DEPTH = 16
_BLOCK: Final = 32  # values that one scale of the usual formats has


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
        check_least(self, num_tokens=1, seed=0)
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


class StudentShape(Frozen, forbid_unknown_fields=True):
    """The sizes of a student that is cut out of its teacher; None for as many as that has.

    `kv_heads` are heads of keys and values; the queries that share them go with them.
    `feed_forward` is the width between the two matrices of a feed-forward.
    """

    layers: int | None = None
    kv_heads: int | None = None
    feed_forward: int | None = None

    @classmethod
    def read(cls, path: Path) -> StudentShape:
        """Return the shape in a YAML file.

        Raises:
            UsageError: it is not one; with the line.
            ModelFormatError: it cannot be read.
        """
        needs = f"Shapes of students need the package pyyaml: run {install_command('train')}."
        return YamlFile(path, needs).read(cls)

    @property
    def is_narrower(self) -> bool:
        """Whether layers lose something, too."""
        return self.kv_heads is not None or self.feed_forward is not None

    def check(self, spec: ModelSpec) -> None:
        """Raise UsageError for what cannot be cut out of a teacher."""
        if spec.layer_factors:
            raise UsageError(f"{spec.name} cannot be cut: its layers differ from each other.")
        sizes = {
            "layers": (self.layers, spec.num_layers),
            "kv_heads": (self.kv_heads, spec.num_kv_heads),
            "feed_forward": (self.feed_forward, spec.ffn_size),
        }
        for field, (wanted, most) in sizes.items():
            if wanted is not None and not 1 <= wanted <= most:
                reason = f"must be from 1 to {most}, as many as {spec.name} has; got {wanted}."
                raise UsageError(reason, field=field)
        if self.feed_forward is not None and self.feed_forward % _BLOCK:
            reason = f"must be a multiple of {_BLOCK}, got {self.feed_forward}."
            raise UsageError(reason, field="feed_forward")
        if self.is_narrower and spec.experts is not None:
            raise UsageError(f"{spec.name} is a mixture of experts: only its layers can be cut.")
        if all(wanted in (None, most) for wanted, most in sizes.values()):
            raise UsageError(f"The student would be as large as {spec.name}: cut something.")


def check_least(options: LearnOptions, **least: int) -> None:
    """Refuse fields of `options` that are below their least values; None passes."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"must be at least {low}, got {value}.", field=name)
