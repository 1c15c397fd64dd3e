"""Rounds a model's matrices, to given formats or to formats that reach a goal."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.lab.compress.allocate import (
    QuantizationGoal,
    formats_within_kl,
    formats_within_size,
    size_limit,
)
from twostroke.lab.compress.calibrate import generated_pieces, text_pieces
from twostroke.lab.compress.report import TextFacts
from twostroke.lab.compress.round import round_matrix
from twostroke.lab.compress.saved_work import SavedWork
from twostroke.lab.compress.sensitivity import DivergenceTrials, formats_for, sensitivity_of
from twostroke.lab.compress.walk import round_products, with_progress
from twostroke.model.loader import build_tokenizer
from twostroke.model.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

    Notice = Callable[[str], None]

_NUM_ATTEMPTS: Final = 4
_MIN_KL_RATIO: Final = 0.85  # an attempt this close below the requested divergence is accepted
_TARGET_KL_RATIO: Final = 0.9  # ratio to the requested divergence that the next attempt aims at


class CalibrationText:
    """The text with which quantization measures the inputs of matrices.

    It is a user's text, or the model's own answers. It is made when it is first needed.
    `saved_work` has the results of an interrupted command.
    """

    def __init__(
        self, source: LoadedModel, text: str | None, num_tokens: int, notice: Notice
    ) -> None:
        """Prepare calibration text for the model `source`: a user's `text`, else its own answers.

        `num_tokens` is the number of tokens to use.
        """
        self._source = source
        self._text = text
        self._num_tokens = num_tokens
        self._notice = notice
        self.saved_work = SavedWork(source)
        self.facts: TextFacts | None = None

    @cached_property
    def pieces(self) -> list[list[int]]:
        """The calibration text as token sequences."""
        text = self._text
        if text is None:
            pieces = self.saved_work.pieces(self._num_tokens, self._generate)
            text = "\n".join(map(build_tokenizer(self._source).decode, pieces))
        else:
            pieces = text_pieces(self._source, text, self._num_tokens)
        self.facts = TextFacts.of(text, pieces)
        return pieces

    def _generate(self) -> list[list[int]]:
        self._notice("Generating calibration text with the model")
        return generated_pieces(self._source, self._num_tokens)


def round_matrices(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    formats: Mapping[str, str],
    calibration: CalibrationText,
    notice: Notice,
) -> dict[str, QuantTensor]:
    """Round a model's matrices to `formats`, and return the rounded matrices by name.

    Matrices that an interrupted command has rounded and saved are loaded instead.
    """
    pieces = calibration.pieces
    store = calibration.saved_work.matrices(tensors, sorted(formats.items()), pieces)
    matrices = round_products(
        program,
        tensors,
        names=formats,
        pieces=pieces,
        round_weight=lambda name, weight, moments: round_matrix(weight, moments, formats[name]),
        load_rounded=lambda name: store.get(name, tensors[name].shape, FORMATS[formats[name]]),
    )
    return store.all_of(with_progress(matrices, len(formats), notice))


def max_matrix_bytes(
    tensors: Mapping[str, QuantTensor],
    names: Iterable[str],
    goal: QuantizationGoal,
    other_bytes: int,
) -> float:
    """Return an upper bound for the size of the matrices `names` in a file that reaches a goal.

    `quantize` checks the free disk space with it before hours of work.

    Raises:
        UsageError: no mix of formats is small enough for the goal.
    """
    shapes = {name: tensors[name].shape for name in names}
    formats = {name: formats_for(shape[1]) for name, shape in shapes.items()}
    num_values = {name: prod(shape) for name, shape in shapes.items()}
    largest = sum(
        max(FORMATS[format_name].num_bytes(num_values[name]) for format_name in formats[name])
        for name in names
    )
    return min(size_limit(formats, num_values, goal, other_bytes), largest)


class FormatChooser:
    """Chooses the format of each matrix so that a quantized file reaches a goal.

    The choice uses the measured sensitivity of the model's output to each matrix.
    """

    def __init__(
        self,
        program: Program,
        source: LoadedModel,
        tensors: Mapping[str, QuantTensor],
        names: Sequence[str],
        calibration: CalibrationText,
        notice: Notice,
    ) -> None:
        """Load the model's sensitivity to its matrices, or measure it.

        `tensors` are the source's tensors, some of them already in their final format. `names` are
        the matrices whose formats are chosen.
        """
        self._program = program
        self._tensors = tensors
        self._calibration = calibration
        self._notice = notice
        self._trials = DivergenceTrials(program, source.tensors, str(source.path))
        sensitivity = sensitivity_of(
            program,
            source.tensors,
            names=names,
            pieces=calibration.pieces,
            trials=self._trials,
            notice=notice,
        )
        self._kl = sensitivity.kl
        self._sizes = {name: tensors[name].num_values for name in names}

    def reach(self, goal: QuantizationGoal, other_bytes: int) -> dict[str, QuantTensor]:
        """Round the matrices to formats with which the file reaches `goal`; return them by name.

        `other_bytes` is the size of the file without these matrices.

        Raises:
            UsageError: no mix of formats reaches the goal.
            TwostrokeError: all attempts missed the requested divergence.
        """
        if goal.kl is None:
            return self._rounded(formats_within_size(self._kl, self._sizes, goal, other_bytes))
        fixed_kl = self._trials.kl(self._tensors)  # of embeddings and logits
        available_kl = goal.kl - fixed_kl
        budget = available_kl
        if available_kl <= 0:
            message = f"is too small: embeddings and logits alone have a KL of {fixed_kl:.3g}."
            raise UsageError(message, field="kl")
        best: tuple[float, dict[str, QuantTensor]] | None = None
        lowest_kl = float("inf")
        for _ in range(_NUM_ATTEMPTS):
            matrices = self._rounded(formats_within_kl(self._kl, self._sizes, budget))
            kl = self._trials.kl({**self._tensors, **matrices})
            self._notice(f"KL on the validation text: {kl:.3g}; requested: {goal.kl:g}")
            lowest_kl = min(lowest_kl, kl)
            if kl <= goal.kl and (best is None or kl > best[0]):
                best = kl, matrices
            if _MIN_KL_RATIO * goal.kl <= kl <= goal.kl:
                break
            budget *= _TARGET_KL_RATIO * available_kl / max(kl - fixed_kl, available_kl / 8)
        if best is None:
            raise TwostrokeError(
                f"No attempt reached a KL of {goal.kl:g}: the lowest was {lowest_kl:.3g}."
            )
        return best[1]

    def _rounded(self, formats: dict[str, str]) -> dict[str, QuantTensor]:
        return round_matrices(
            self._program, self._tensors, formats, self._calibration, self._notice
        )
