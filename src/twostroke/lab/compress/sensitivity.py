"""Measures how much each matrix of a model may err: a tree of trials on the choosing text.

All matrices are rounded to one format of few bits. A trial uses these for one part of the model and
measures the divergence: first for each kind of matrix, then for halves of the depth of the part
that diverges most, again and again. Within a part divergence is shared by the errors of products,
which are also sampled in every other format.
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
from twostroke.lab.compress.grids import GRIDS
from twostroke.lab.compress.mixes import fitting, layer_of
from twostroke.lab.compress.round import round_matrix
from twostroke.lab.compress.threads import own_threads
from twostroke.lab.compress.walk import Stream, round_products, watched
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

_METHOD: Final = 3  # raised when text, constants or rounding change what is measured
_BASE: Final = "IQ4_NL"  # of the trials
_NUM_SPLITS: Final = 10
_LEAST_SHARE: Final = 0.02  # of its parent's divergence that a part has at least
_SAMPLED: Final = 32  # outputs of a matrix that are rounded to the other formats
_PIECE: Final = 128
_NUM_TOKENS: Final = 512  # of the choosing text


class Sensitivity(Frozen):
    """What was measured: `kl[name][format]` is what a matrix in this format adds to the KL.

    `trials` are the divergences of the parts, by the first matrix and the number of matrices.
    """

    identity: str
    kl: dict[str, dict[str, float]]
    trials: dict[str, float]
    method: int = _METHOD


def sensitivity_of(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    names: Sequence[str],
    pieces: Sequence[Sequence[int]],
    trials: Trials,
    notice: Notice,
) -> Sensitivity:
    """Return the sensitivity to the matrices `names`, measured now or before.

    It is kept in the cache folder by the identity of the weights and the calibration text; trials
    that were measured before the command was stopped are not measured again.
    """
    text = hashlib.sha256(repr([list(piece) for piece in pieces]).encode()).hexdigest()
    identity = f"{weights_identity(tensors)[:24]}-{text[:8]}"
    path = env.cache_dir() / "sensitivity" / f"{identity}.json"
    known = _read(path, identity)
    if known is not None and known.kl:
        notice("The model's sensitivity is known from before")
        return known
    notice("Measuring errors of the matrices in each format")
    coded: dict[str, QuantTensor] = {}
    losses: dict[str, dict[str, float]] = {}

    def rounded(name: str, weight: Floats, moments: Moments) -> QuantTensor:
        coded[name] = round_matrix(weight, moments, _BASE)
        losses[name] = _losses(weight, moments)
        return coded[name]

    for _ in watched(round_products(program, tensors, names, pieces, rounded), len(names), notice):
        pass
    num_kinds = len({name.split(".", 2)[2] for name in names})
    num_trials = min(num_kinds + _NUM_SPLITS, len(names))
    measured = dict(known.trials) if known is not None else {}

    def measure(part: Sequence[str]) -> float:
        key = f"{part[0]} {len(part)}"
        if key not in measured:
            measured[key] = trials.kl({name: coded[name] for name in part})
            _keep(path, Sensitivity(identity, {}, measured))
            notice(f"Measured {len(measured)} of {num_trials} parts of the model")
        return measured[key]

    kl: dict[str, dict[str, float]] = {}
    for part, divergence in _tree(names, measure):
        whole = sum(losses[name][_BASE] for name in part) or 1.0
        for name in part:
            kl[name] = {fmt: divergence * loss / whole for fmt, loss in losses[name].items()}
    found = Sensitivity(identity, kl, measured)
    _keep(path, found)
    return found


class Trials:
    """The right answers to the choosing text, and how far other weights are from them."""

    def __init__(self, program: Program, tensors: Mapping[str, QuantTensor], path: str) -> None:
        """Compute the right answers of the model at `path`."""
        self._program, self._tensors = program, tensors
        self._pieces = pieces_of(choosing_text(), [path], _PIECE, _NUM_TOKENS)
        self._right = ExpectedLogits(self._logits({}))

    def kl(self, changed: Mapping[str, QuantTensor]) -> float:
        """Return the mean divergence, in nats, with some weights changed."""
        return self._right.divergence(self._logits(changed))

    def _logits(self, changed: Mapping[str, QuantTensor]) -> Floats:
        tensors = {**self._tensors, **changed}
        with own_threads() as pool:
            streams = [Stream(self._program, [piece]) for piece in self._pieces]
            for op in self._program.ops:
                weights = {w.name: tensors[w.name].dequantize() for w in op.weights}
                list(pool.map(lambda s, op=op, w=weights: s.run(op, w), streams))
        last = self._program.ops[-1]
        assert isinstance(last, ops.Logits)
        return np.concatenate([stream.values[last.output] for stream in streams])


def _losses(weight: Floats, moments: Moments) -> dict[str, float]:
    """Return the error of a matrix's outputs in each format that fits, from some outputs."""
    rows = np.linspace(0, len(weight) - 1, min(_SAMPLED, len(weight))).astype(np.int64)
    sample = weight[rows]

    def loss(name: str) -> float:
        off = round_matrix(sample, moments, name, 1).dequantize() - sample
        error = np.einsum("oi,oi->", off @ moments.damped, off)
        return float(error) * len(weight) / len(rows)

    names = formats_for(weight.shape[1])
    with own_threads() as pool:
        return dict(zip(names, pool.map(loss, names), strict=True))


def formats_for(width: int) -> list[str]:
    """Return the formats from which one is chosen for a matrix with rows of `width` values."""
    return [
        name
        for name in GRIDS
        if fitting(name, width) == name and width % FORMATS[name].block_size == 0
    ]


def _tree(
    names: Collection[str], measure: Callable[[Sequence[str]], float]
) -> list[tuple[list[str], float]]:
    """Return the parts of a model with their divergences."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=layer_of):
        kinds.setdefault(name.split(".", 2)[2], []).append(name)
    parts = [(members, measure(members)) for members in kinds.values()]
    for _ in range(_NUM_SPLITS):
        divisible = [part for part in parts if len(part[0]) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda part: part[1])
        members, whole = largest
        first, second = members[: len(members) // 2], members[len(members) // 2 :]
        least = _LEAST_SHARE * whole
        divergence = min(max(measure(first), least), whole - least)
        place = parts.index(largest)
        parts[place : place + 1] = [(first, divergence), (second, whole - divergence)]
    return parts


def _read(path: Path, identity: str) -> Sensitivity | None:
    try:
        sensitivity = msgspec.convert(read_checked_json(path), Sensitivity)
    except (TwostrokeError, msgspec.MsgspecError):
        return None
    is_right = (sensitivity.identity, sensitivity.method) == (identity, _METHOD)
    return sensitivity if is_right else None


def _keep(path: Path, found: Sensitivity) -> None:
    with suppress(OSError):  # it is then measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(path, msgspec.to_builtins(found))
