"""Trains scales, norms and biases of a quantized model towards its source; codes stay unchanged.

The scale of each block, its smallest value if it has one, and each value of norms and biases are
multiplied by trained factors. The training minimizes the KL divergence from the source's
distributions for its own answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from twostroke.backends.torch import TorchModel
from twostroke.core.errors import MemoryLimitError
from twostroke.core.hardware import memory_available
from twostroke.lab.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from twostroke.lab.train.descent import Descent, train
from twostroke.lab.train.imitate import StudentTrainer
from twostroke.lab.train.teach import Teacher, untranslated_examples
from twostroke.model.families import build_program
from twostroke.model.program import ops
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.quant.floats import SCALE_OFFSETS, multiply_scales, terms_by_scale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from twostroke.lab.train.descent import Report
    from twostroke.lab.train.record import RecordedAnswer
    from twostroke.model.program import Program
    from twostroke.model.weights import LoadedModel

_MAX_TOKENS: Final = 256  # of a sequence
_LEARNING_RATE: Final = 1e-3
_ABOUT: Final = {"kind": "tuning"}  # the folder's name identifies the rest
_NUM_WEIGHT_COPIES: Final = 4  # in float32: parts, products with factors, and their gradients


def tune(
    source: LoadedModel,
    tensors: Mapping[str, QuantTensor],
    answers: Sequence[RecordedAnswer],
    minutes: float,
    folder: Path,
    report: Report,
) -> dict[str, QuantTensor]:
    """Train the scales of a quantized model for some minutes; return the changed tensors.

    If the model did not improve, the result is empty. `answers` are the source's answers with their
    hidden states. A checkpoint in `folder` lets the same call continue after an interruption.

    Raises:
        MemoryLimitError: several float32 copies of the weights do not fit into memory.
    """
    program = build_program(source.spec)
    needed = (
        4 * _NUM_WEIGHT_COPIES * sum(tensors[name].num_values for name in program.weight_shapes)
    )
    if needed > memory_available():
        raise MemoryLimitError(
            f"Tuning {source.name} needs {needed / 1e9:.1f} GB, and {memory_available() / 1e9:.1f} "
            "GB of memory are free."
        )
    tuned_model = _TunedModel(program, tensors)
    descent = Descent(tuned_model.offsets, _LEARNING_RATE, 60 * minutes)
    examples = list(untranslated_examples(answers, _MAX_TOKENS))
    imitator = StudentTrainer(
        tuned_model.model,
        tuned_model.weights,
        descent=descent,
        teacher=Teacher(source),
        examples=examples,
        seed=0,
    )
    before = last = imitator.test().loss
    report(f"Before tuning: KL {before:.4f} on held-out answers")
    if (saved := load_checkpoint(folder, _ABOUT)) is not None:
        descent.restore(saved.arrays, saved.seconds, saved.num_steps)

    def save() -> str:
        nonlocal last
        last = imitator.test().loss
        checkpoint = Checkpoint(_ABOUT, (), descent.seconds, descent.num_steps, descent.arrays())
        save_checkpoint(folder, checkpoint)
        return f"Tuned for {descent.seconds / 60:.1f} minutes: KL {last:.4f}"

    train(descent, imitator.stepper(), save, "tuning so far was kept", report)
    return tuned_model.stored() if last < before else {}


class _TunedModel:
    """A quantized model in training, whose scales are multiplied by 1 + `offsets`."""

    def __init__(self, program: Program, tensors: Mapping[str, QuantTensor]) -> None:
        self.model = TorchModel(program, tensors)
        self._tensors = tensors
        matrices = {op.weight for op in program.ops if isinstance(op, ops.Linear)}
        self._parts: dict[str, tuple[Tensor, ...]] = {}
        self.offsets: dict[str, Tensor] = {}
        for name, weight in self.model.weights.items():
            tensor = tensors[name]
            if name in matrices and tensor.format.name in SCALE_OFFSETS:
                self._parts[name] = tuple(map(torch.from_numpy, terms_by_scale(tensor)))
            elif weight.ndim == 1:
                self._parts[name] = (weight,)
        for name, parts in self._parts.items():
            for index, part in enumerate(parts):
                self.offsets[f"{name}:{index}"] = torch.zeros(part.shape[:2], requires_grad=True)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the model's Program with the current factors."""
        weights = dict(self.model.weights)
        for name, parts in self._parts.items():
            terms = [self._scaled(name, index, part) for index, part in enumerate(parts)]
            weights[name] = sum(terms[1:], terms[0]).reshape(weights[name].shape)
        return weights

    def stored(self) -> dict[str, QuantTensor]:
        """Return the trained tensors in their quantized formats; vectors become float32."""
        stored_tensors = {}
        for name, parts in self._parts.items():
            tensor, offsets = self._tensors[name], self._offsets(name, parts)
            if len(tensor.shape) == 1:
                values = (self.model.weights[name] * (1 + offsets[0].detach())).numpy()
                stored_tensors[name] = QuantTensor.from_floats(values, FORMATS["F32"])
            else:
                factors = tuple((1 + offset.detach()).numpy() for offset in offsets)
                stored_tensors[name] = multiply_scales(tensor, factors)
        return stored_tensors

    def _offsets(self, name: str, parts: tuple[Tensor, ...]) -> list[Tensor]:
        return [self.offsets[f"{name}:{index}"] for index in range(len(parts))]

    def _scaled(self, name: str, index: int, part: Tensor) -> Tensor:
        factor = 1 + self.offsets[f"{name}:{index}"]
        return part * (factor[..., None] if part.ndim == 3 else factor)
