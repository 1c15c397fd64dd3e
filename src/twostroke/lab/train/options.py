"""Options of training, and the shapes of students."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_choice
from twostroke.core.yaml_file import YamlFile
from twostroke.model.families import ModelSpec, build_program
from twostroke.model.families.heads import KINDS

if TYPE_CHECKING:
    from pathlib import Path

MAX_DEPTH = 16
_BLOCK_SIZE: Final = 32  # values that share a scale in common formats


class LearnOptions(Frozen):
    """Options of every training on a model's answers.

    Attributes:
        data: "self" for built-in prompts, or a file of prompts.
        num_tokens: tokens of answers to train on.
        minutes: training time of all runs in one folder together.
        learning_rate: highest learning rate.
        seed: seed of prompts, first weights and batches.
    """

    data: str = "self"
    num_tokens: int = 250_000
    minutes: float = 30.0
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if an option of training is out of range."""
        check_minimums(self, num_tokens=1, seed=0)
        for name in ("minutes", "learning_rate"):
            number = getattr(self, name)
            if not 0 < number < math.inf:
                raise UsageError(f"must be a finite number above 0, got {number:g}.", field=name)


class TrainOptions(LearnOptions):
    """Options of training draft heads (EAGLE or Medusa).

    Attributes:
        kind: "eagle" or "medusa".
        vocab_size: how many tokens heads can propose; these are the most frequent tokens.
        depth: number of drafts in a row; for Medusa, the number of blocks.
        ffn_size: width of the feed-forward; None for two thirds of the model's width.
        window: number of tokens that the head's attention reads.
    """

    kind: str = "eagle"
    vocab_size: int = 4096
    depth: int = 4
    ffn_size: int | None = None
    window: int = 256

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if an option of training heads is out of range."""
        super().__post_init__()
        check_choice("kind", self.kind, KINDS)
        check_minimums(self, vocab_size=16, window=16, ffn_size=1)
        if not 1 <= self.depth <= MAX_DEPTH:
            raise UsageError(f"must be from 1 to {MAX_DEPTH}, got {self.depth}.", field="depth")


class DistillOptions(LearnOptions):
    """Options of training a smaller model; sequences have at most `length` tokens."""

    learning_rate: float = 1e-4
    length: int = 512

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if an option of distillation is out of range."""
        super().__post_init__()
        check_minimums(self, length=32)


class StudentShape(Frozen, forbid_unknown_fields=True):
    """The sizes of a smaller model that is cut out of its teacher; None for the teacher's size.

    Attributes:
        layers: number of layers.
        kv_heads: number of KV heads; query heads that share a removed KV head are removed, too.
        feed_forward: inner width of a feed-forward.
    """

    layers: int | None = None
    kv_heads: int | None = None
    feed_forward: int | None = None

    @classmethod
    def read(cls, path: Path) -> StudentShape:
        """Return the shape of a student model from a YAML file.

        Raises:
            UsageError: the file is not a shape; the message names the line.
            ModelFormatError: the file cannot be read.
        """
        needs = f"Shapes of students need the package pyyaml: run {install_command('train')}."
        return YamlFile(path, needs).read(cls)

    @property
    def is_narrower(self) -> bool:
        """Whether the student's layers are narrower than its teacher's."""
        return self.kv_heads is not None or self.feed_forward is not None

    def check(self, spec: ModelSpec) -> None:
        """Raise UsageError if this shape cannot be cut out of the teacher."""
        if spec.layer_factors:
            raise UsageError(f"{spec.name} cannot be cut: its layers differ from each other.")
        sizes = {
            "layers": (self.layers, spec.num_layers),
            "kv_heads": (self.kv_heads, spec.num_kv_heads),
            "feed_forward": (self.feed_forward, spec.ffn_size),
        }
        for field, (size, limit) in sizes.items():
            if size is not None and not 1 <= size <= limit:
                reason = f"must be from 1 to {limit}, as many as {spec.name} has; got {size}."
                raise UsageError(reason, field=field)
        if self.feed_forward is not None and self.feed_forward % _BLOCK_SIZE:
            reason = f"must be a multiple of {_BLOCK_SIZE}, got {self.feed_forward}."
            raise UsageError(reason, field="feed_forward")
        if self.is_narrower and spec.experts is not None:
            raise UsageError(f"{spec.name} is a mixture of experts: only its layers can be cut.")
        if all(size in (None, limit) for size, limit in sizes.values()):
            raise UsageError(f"The student would be as large as {spec.name}: cut something.")


def check_trainable(spec: ModelSpec, remedy: str) -> None:
    """Raise UsageError for a model whose layers cannot be trained; `remedy` says what to do.

    Recurrent layers change their states in place, so PyTorch cannot compute their gradients.
    """
    if build_program(spec).state_layers:
        raise UsageError(f"{spec.name} has recurrent layers, which cannot be trained: {remedy}.")


def check_minimums(options: LearnOptions, **minimums: int) -> None:
    """Raise UsageError for a training option below its minimum.

    `minimums` are by field of `options`; a field may be None.
    """
    for name, low in minimums.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"must be at least {low}, got {value}.", field=name)
