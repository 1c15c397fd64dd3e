"""Measures how much errors of each matrix change a model's output, by a tree of trials.

All matrices are rounded to one format with few bits. A trial uses the rounded matrices in one part
of the model, and measures the divergence on the validation text. At first, each kind of matrix is a
part. Then the part with the largest divergence is halved by depth, several times. A part's
divergence is divided among its matrices in proportion to the errors of their products. These errors
are also estimated for every other format.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from twostroke.backends.activation_bits.choice import ExpectedLogits, choosing_text
from twostroke.core import env
from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.message_text import counted_noun
from twostroke.lab.compress.grids import GRIDS
from twostroke.lab.compress.mixes import format_for_width, layer_index
from twostroke.lab.compress.round import round_matrix
from twostroke.lab.compress.threads import own_threads
from twostroke.lab.compress.walk import CalibrationStream, round_products, with_progress
from twostroke.lab.measure.compare import pieces_of
from twostroke.model.program import ops
from twostroke.model.quant import FORMATS
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from twostroke.lab.compress.round import Moments
    from twostroke.model.program import Program
    from twostroke.model.quant import Floats, QuantTensor

    Notice = Callable[[str], None]

_METHOD_VERSION: Final = 3  # raised when text, constants or rounding change the results
_TRIAL_FORMAT: Final = "IQ4_NL"
_NUM_SPLITS: Final = 10
_MIN_SHARE: Final = 0.02  # of its parent's divergence that a part has at least
_NUM_SAMPLED_OUTPUTS: Final = 32  # of a matrix that are rounded to the other formats
_PIECE_TOKENS: Final = 128
_NUM_TOKENS: Final = 512  # of the validation text


class Sensitivity(Frozen):
    """How much errors of each matrix change a model's output, as measured and stored.

    Attributes:
        identity: identifies weights and calibration text.
        kl: by matrix and format, the KL divergence that this format of the matrix adds.
        trials: the measured divergence when a part of the model is rounded; its key has the part's
            first matrix and its number of matrices.
        method: version of the measuring method.
    """

    identity: str
    kl: dict[str, dict[str, float]]
    trials: dict[str, float]
    method: int = _METHOD_VERSION


def sensitivity_of(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    names: Sequence[str],
    pieces: Sequence[Sequence[int]],
    trials: DivergenceTrials,
    notice: Notice,
) -> Sensitivity:
    """Return how sensitive a model's output is to errors of the matrices `names`.

    `pieces` are the calibration text, as token sequences, and `trials` measures divergences. If the
    cache folder has a sensitivity for these weights and this calibration text, it is returned;
    otherwise it is measured. Trials of an interrupted command are not repeated.
    """
    text = hashlib.sha256(repr([list(piece) for piece in pieces]).encode()).hexdigest()
    identity = f"{weights_identity(tensors)[:24]}-{text[:8]}"
    path = env.cache_dir() / "sensitivity" / f"{identity}.json"
    saved = _read(path, identity)
    if saved is not None and saved.kl:
        notice("Using the model's sensitivity from an earlier measurement")
        return saved
    notice("Measuring errors of the matrices in each format")
    matrices: dict[str, QuantTensor] = {}
    losses: dict[str, dict[str, float]] = {}

    def round_weight(name: str, weight: Floats, moments: Moments) -> QuantTensor:
        matrices[name] = round_matrix(weight, moments, _TRIAL_FORMAT)
        losses[name] = _losses_by_format(weight, moments)
        return matrices[name]

    rounding = round_products(program, tensors, names, pieces, round_weight)
    for _ in with_progress(rounding, len(names), notice):
        pass
    num_kinds = len({name.split(".", 2)[2] for name in names})
    num_trials = min(num_kinds + _NUM_SPLITS, len(names))
    measured = dict(saved.trials) if saved is not None else {}

    def measure(part: Sequence[str]) -> float:
        key = f"{part[0]} {len(part)}"
        if key not in measured:
            measured[key] = trials.kl({name: matrices[name] for name in part})
            _write(path, Sensitivity(identity, {}, measured))
            notice(f"Measured {len(measured)} of {counted_noun(num_trials, 'part')} of the model")
        return measured[key]

    kl: dict[str, dict[str, float]] = {}
    for part, divergence in _divergence_by_part(names, measure):
        total_loss = sum(losses[name][_TRIAL_FORMAT] for name in part) or 1.0
        for name in part:
            kl[name] = {fmt: divergence * loss / total_loss for fmt, loss in losses[name].items()}
    sensitivity = Sensitivity(identity, kl, measured)
    _write(path, sensitivity)
    return sensitivity


class DivergenceTrials:
    """Measures how far a model's logits on a validation text diverge if weights are changed."""

    def __init__(self, program: Program, tensors: Mapping[str, QuantTensor], path: str) -> None:
        """Compute the logits of the unchanged model at `path`, with which trials are compared.

        `tensors` are the unchanged weights. The validation text is built in.
        """
        self._program, self._tensors = program, tensors
        self._pieces = pieces_of(choosing_text(), [path], _PIECE_TOKENS, _NUM_TOKENS)
        self._expected = ExpectedLogits(self._logits({}))

    def kl(self, changed: Mapping[str, QuantTensor]) -> float:
        """Return the mean KL divergence in nats of the model with its `changed` weights."""
        return self._expected.divergence(self._logits(changed))

    def _logits(self, changed: Mapping[str, QuantTensor]) -> Floats:
        tensors = {**self._tensors, **changed}
        with own_threads() as pool:
            streams = [CalibrationStream(self._program, [piece]) for piece in self._pieces]
            for op in self._program.ops:
                weights = {w.name: tensors[w.name].dequantize() for w in op.weights}
                list(pool.map(lambda s, op=op, w=weights: s.run(op, w), streams))
        last = self._program.ops[-1]
        assert isinstance(last, ops.Logits)
        return np.concatenate([stream.values[last.output] for stream in streams])


def _losses_by_format(weight: Floats, moments: Moments) -> dict[str, float]:
    """Estimate the squared error of a matrix product's outputs in each possible format.

    The error is computed for some of the matrix's rows.
    """
    count = min(_NUM_SAMPLED_OUTPUTS, len(weight))
    rows = np.linspace(0, len(weight) - 1, count).astype(np.int64)
    sample = weight[rows]

    def loss(name: str) -> float:
        error = round_matrix(sample, moments, name, 1).dequantize() - sample
        squared_error = np.einsum("oi,oi->", error @ moments.damped, error)
        return float(squared_error) * len(weight) / len(rows)

    names = formats_for(weight.shape[1])
    with own_threads() as pool:
        return dict(zip(names, pool.map(loss, names), strict=True))


def formats_for(width: int) -> list[str]:
    """Return the formats that a matrix with rows of `width` values can have."""
    return [
        name
        for name in GRIDS
        if format_for_width(name, width) == name and width % FORMATS[name].block_size == 0
    ]


def _divergence_by_part(
    names: Collection[str], measure: Callable[[Sequence[str]], float]
) -> list[tuple[list[str], float]]:
    """Divide a model's matrices into parts; return each part's matrices and its divergence.

    Each step divides the part with the largest divergence. `measure` returns the divergence of the
    model when all matrices of a part are rounded.
    """
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=layer_index):
        kinds.setdefault(name.split(".", 2)[2], []).append(name)
    parts = [(members, measure(members)) for members in kinds.values()]
    for _ in range(_NUM_SPLITS):
        divisible = [part for part in parts if len(part[0]) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda part: part[1])
        members, total = largest
        first, second = members[: len(members) // 2], members[len(members) // 2 :]
        min_divergence = _MIN_SHARE * total
        divergence = min(max(measure(first), min_divergence), total - min_divergence)
        index = parts.index(largest)
        parts[index : index + 1] = [(first, divergence), (second, total - divergence)]
    return parts


def _read(path: Path, identity: str) -> Sensitivity | None:
    try:
        sensitivity = msgspec.convert(read_checked_json(path), Sensitivity)
    except (TwostrokeError, msgspec.MsgspecError):
        return None
    is_current = (sensitivity.identity, sensitivity.method) == (identity, _METHOD_VERSION)
    return sensitivity if is_current else None


def _write(path: Path, sensitivity: Sensitivity) -> None:
    with suppress(OSError):  # a full disk: the next command measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(path, msgspec.to_builtins(sensitivity))
