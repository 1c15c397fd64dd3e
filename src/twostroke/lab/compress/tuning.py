"""Tunes a rounded model on answers that its source gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.lab.train.answers import collect
from twostroke.lab.train.options import LearnOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

_TOKENS: Final = 20_000  # of answers


def tuned(
    source: LoadedModel,
    tensors: Mapping[str, QuantTensor],
    minutes: float,
    folder: Path,
    notice: Callable[[str], None],
) -> dict[str, QuantTensor]:
    """Return the tensors that `minutes` of training change; needs PyTorch, raises as `tune`.

    What was done before an interruption is in `folder`.
    """
    from twostroke.lab.train.tune import tune

    options = LearnOptions(num_tokens=_TOKENS)
    answers = collect(str(source.path), source.spec, folder / "answers", options, notice)
    return tune(source, tensors, answers, minutes, folder, notice)
