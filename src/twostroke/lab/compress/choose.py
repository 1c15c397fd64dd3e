"""Rounds a model's matrices: to given formats, or to those that reach a goal best."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.lab.compress.allocate import Goal, size_limit, within_kl, within_size
from twostroke.lab.compress.calibrate import own_pieces, text_pieces
from twostroke.lab.compress.report import TextFacts
from twostroke.lab.compress.round import round_matrix
from twostroke.lab.compress.saved_work import SavedWork
from twostroke.lab.compress.sensitivity import Trials, formats_for, sensitivity_of
from twostroke.lab.compress.walk import round_products, watched
from twostroke.model.loader import build_tokenizer
from twostroke.model.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

    Notice = Callable[[str], None]

_NUM_ATTEMPTS: Final = 4
_NEAR: Final = 0.85  # of a divergence that is asked for: good enough
_AIM: Final = 0.9  # of it, in the next attempt


class CalibrationText:
    """The text that a model is calibrated on: of the user, or the model's own answers.

    `kept` has what was made of the model before.
    """

    def __init__(
        self, source: LoadedModel, text: str | None, num_tokens: int, notice: Notice
    ) -> None:
        """Take what the text is made from; it is made when it is first needed."""
        self._source, self._given, self._num_tokens = source, text, num_tokens
        self._notice, self.kept = notice, SavedWork(source)
        self.facts: TextFacts | None = None

    @cached_property
    def pieces(self) -> list[list[int]]:
        """The text as tokens."""
        text = self._given
        if text is None:
            pieces = self.kept.pieces(self._num_tokens, self._asked)
            text = "\n".join(map(build_tokenizer(self._source).decode, pieces))
        else:
            pieces = text_pieces(self._source, text, self._num_tokens)
        self.facts = TextFacts.of(text, pieces)
        return pieces

    def _asked(self) -> list[list[int]]:
        self._notice("Asking the model for text to calibrate on")
        return own_pieces(self._source, self._num_tokens)


def rounded_to(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    formats: Mapping[str, str],
    calibration: CalibrationText,
    notice: Notice,
) -> dict[str, QuantTensor]:
    """Return the matrices in `formats`, rounded, by name; after an interruption, the others."""
    pieces = calibration.pieces
    store = calibration.kept.matrices(tensors, sorted(formats.items()), pieces)
    matrices = round_products(
        program,
        tensors,
        formats,
        pieces,
        lambda name, weight, moments: round_matrix(weight, moments, formats[name]),
        lambda name: store.get(name, tensors[name].shape, FORMATS[formats[name]]),
    )
    return store.all_of(watched(matrices, len(formats), notice))


def check_size(
    tensors: Mapping[str, QuantTensor], names: Iterable[str], goal: Goal, other_bytes: int
) -> float:
    """Return the bytes that these matrices have at most.

    Raises:
        UsageError: no formats are so small; before hours of work.
    """
    shapes = {name: tensors[name].shape for name in names}
    formats = {name: formats_for(shape[1]) for name, shape in shapes.items()}
    values = {name: prod(shape) for name, shape in shapes.items()}
    largest = (max(FORMATS[one].num_bytes(values[name]) for one in formats[name]) for name in names)
    return min(size_limit(formats, values, goal, other_bytes), sum(largest))


class FormatChooser:
    """Finds the formats that reach a goal, by what was measured of the model."""

    def __init__(
        self,
        program: Program,
        source: LoadedModel,
        tensors: Mapping[str, QuantTensor],
        names: Sequence[str],
        calibration: CalibrationText,
        notice: Notice,
    ) -> None:
        """Measure the model's sensitivity, if it is not known.

        `tensors` are the source's, but for those that have their format already; `names` are the
        matrices to choose for.
        """
        self._program, self._tensors, self._calibration = program, tensors, calibration
        self._notice = notice
        self._trials = Trials(program, source.tensors, str(source.path))
        known = source.tensors, names, calibration.pieces, self._trials, notice
        self._kl = sensitivity_of(program, *known).kl
        self._sizes = {name: tensors[name].num_values for name in names}

    def reach(self, goal: Goal, other_bytes: int) -> dict[str, QuantTensor]:
        """Return the rounded matrices; `other_bytes` is what the file has besides them.

        Raises:
            UsageError: no mix reaches the goal.
        """
        if goal.kl is None:
            return self._rounded(within_size(self._kl, self._sizes, goal, other_bytes))
        fixed = self._trials.kl(self._tensors)  # of embeddings and logits
        budget = room = goal.kl - fixed
        if room <= 0:
            message = f"is too small: embeddings and logits alone have a KL of {fixed:.3g}."
            raise UsageError(message, field="kl")
        best: tuple[float, dict[str, QuantTensor]] | None = None
        nearest = float("inf")
        for _ in range(_NUM_ATTEMPTS):
            found = self._rounded(within_kl(self._kl, self._sizes, budget))
            measured = self._trials.kl({**self._tensors, **found})
            self._notice(f"KL on the choosing text: {measured:.3g}, {goal.kl:g} asked for")
            nearest = min(nearest, measured)
            if measured <= goal.kl and (best is None or measured > best[0]):
                best = measured, found
            if _NEAR * goal.kl <= measured <= goal.kl:
                break
            budget *= _AIM * room / max(measured - fixed, room / 8)
        if best is None:
            raise TwostrokeError(f"The mixes that were tried have a KL of {nearest:.3g} at least.")
        return best[1]

    def _rounded(self, formats: dict[str, str]) -> dict[str, QuantTensor]:
        return rounded_to(self._program, self._tensors, formats, self._calibration, self._notice)
