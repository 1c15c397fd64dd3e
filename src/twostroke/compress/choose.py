"""Rounds a model's matrices: to given formats, or to those that reach a goal best."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from twostroke.compress.allocate import Goal, Menu, within_kl, within_size
from twostroke.compress.calibrate import own_pieces, text_pieces
from twostroke.compress.report import TextFacts
from twostroke.compress.round import round_matrix
from twostroke.compress.sensitivity import Trials, sensitivity_of
from twostroke.compress.walk import round_products, watched
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.engine.loading import build_tokenizer
from twostroke.models import build_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.compress.allocate import Measure
    from twostroke.program import Program
    from twostroke.quant import QuantTensor
    from twostroke.weights import LoadedModel

    Notice = Callable[[str], None]

_NUM_ATTEMPTS: Final = 4
_NEAR: Final = 0.85  # of a divergence that is asked for: good enough
_AIM: Final = 0.9  # of it, in the next attempt


class Calibration:
    """The text that a model is calibrated on: of the user, or the model's own answers."""

    def __init__(
        self, source: LoadedModel, text: str | None, num_tokens: int, notice: Notice
    ) -> None:
        """Take what the text is made from; it is made when it is first needed."""
        self._source, self._given, self._num_tokens = source, text, num_tokens
        self._notice = notice
        self.facts: TextFacts | None = None

    @cached_property
    def pieces(self) -> list[list[int]]:
        """The text as tokens."""
        text = self._given
        if text is None:
            self._notice("Asking the model for text to calibrate on")
            pieces = own_pieces(self._source, self._num_tokens)
            text = "\n".join(map(build_tokenizer(self._source).decode, pieces))
        else:
            pieces = text_pieces(self._source, text, self._num_tokens)
        self.facts = TextFacts.of(text, pieces)
        return pieces


def rounded_to(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    formats: Mapping[str, str],
    pieces: Sequence[Sequence[int]],
    release: Callable[[Iterable[QuantTensor]], None],
    notice: Notice,
) -> dict[str, QuantTensor]:
    """Return the matrices in `formats`, rounded, by name; `release` gets `tensors` after use."""
    matrices = round_products(
        program,
        tensors,
        formats,
        pieces,
        lambda name, weight, moments: round_matrix(weight, moments, formats[name]),
        release,
    )
    return dict(watched(matrices, len(formats), notice))


class Chooser:
    """Finds the formats that reach a goal, by what was measured of the model."""

    def __init__(
        self,
        source: LoadedModel,
        tensors: Mapping[str, QuantTensor],
        names: Sequence[str],
        calibration: Calibration,
        other_bytes: int,
        notice: Notice,
    ) -> None:
        """Measure nothing yet.

        `tensors` are the source's, but for those that have their format already; `names` are the
        matrices to choose for; `other_bytes` is what the file has besides them.
        """
        self._program = build_program(source.spec)
        self._source, self._tensors = source, tensors
        self._calibration, self._notice = calibration, notice
        self._menu = Menu.of({name: tensors[name] for name in names}, other_bytes)

    def file_bytes(self, goal: Goal) -> float:
        """Return the size of the file for a goal; for a KL, the least that it can have.

        Raises:
            UsageError: no mix is that small.
        """
        return self._menu.limit(goal) + self._menu.other_bytes

    def reach(self, goal: Goal) -> dict[str, QuantTensor]:
        """Return the rounded matrices.

        Raises:
            UsageError: no mix reaches the goal.
        """
        limit = self._menu.limit(goal)
        trials = Trials(self._program, self._source)
        if goal.kl is None:
            return self._rounded(within_size(self._measured(trials), self._menu, limit))
        return self._within(goal.kl, trials)

    def _within(self, limit: float, trials: Trials) -> dict[str, QuantTensor]:
        """Return the matrices of the smallest mix that is found with at most this KL."""
        fixed = trials.kl(self._tensors)  # of embeddings and logits
        budget = room = limit - fixed
        if room <= 0:
            message = f"is too low: embeddings and logits alone have a KL of {fixed:.3g}."
            raise UsageError(message, field="kl")
        sensitivity = self._measured(trials)
        known: dict[tuple[str, ...], float] = {}  # the KL of each mix that was tried
        best: tuple[float, dict[str, QuantTensor]] | None = None
        for _ in range(_NUM_ATTEMPTS):
            formats = within_kl(sensitivity, self._menu, budget)
            mix = tuple(formats.values())
            if mix not in known:
                found = self._rounded(formats)
                known[mix] = trials.kl({**self._tensors, **found})
                self._notice(f"KL on the choosing text: {known[mix]:.3g}, {limit:g} asked for")
                if known[mix] <= limit and (best is None or known[mix] > best[0]):
                    best = known[mix], found
            if _NEAR * limit <= known[mix] <= limit:
                break
            budget *= _AIM * room / max(known[mix] - fixed, room / 8)
        if best is None:
            least = min(known.values())
            raise TwostrokeError(f"The mixes that were tried have a KL of {least:.3g} at least.")
        return best[1]

    def _measured(self, trials: Trials) -> Measure:
        names, pieces = list(self._menu.sizes), self._calibration.pieces
        return sensitivity_of(self._program, self._source, names, pieces, trials, self._notice).kl

    def _rounded(self, formats: dict[str, str]) -> dict[str, QuantTensor]:
        pieces, release = self._calibration.pieces, self._source.release
        return rounded_to(self._program, self._tensors, formats, pieces, release, self._notice)
