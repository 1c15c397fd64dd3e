"""The properties of operations, compared with the results of the reference backend."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from support.operations import NUM_IDS, OPS, input_width
from twostroke.backends.reference.operations import PagedCache, ReferenceStepState, apply
from twostroke.backends.reference.recurrent import StateMemory
from twostroke.backends.spans import RowSpan
from twostroke.model.program import Program
from twostroke.model.program.ops import ExternalInput, SharedKvAttention, TakeColumns
from twostroke.model.program.sharding import ColumnParts, Sharding

if TYPE_CHECKING:
    from twostroke.model.program.ops import LocalOp

    Values = dict[str, np.ndarray]

NUM_ROWS = 7


def run(op: LocalOp, inputs: Values, weights: Values, tokens: np.ndarray) -> np.ndarray:
    """Return the output of one operation for one sequence from its beginning."""
    program = Program(
        "one", (*(ExternalInput(name, 1) for name in dict.fromkeys(op.inputs)), op), NUM_IDS, 64
    )
    rows = np.arange(len(tokens))
    span = RowSpan(slice(0, len(tokens)), 0, np.zeros((1, 1), np.int64), write_states=(0,))
    cache = PagedCache(program, 1, NUM_ROWS)
    states = StateMemory(program, 1)
    state = ReferenceStepState(tokens, rows, (span,), rows, weights, cache, states)
    return apply(op, inputs, state)


def random_floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def parts_of(op: LocalOp, inputs: Values, weights: Values, tokens: np.ndarray) -> list[np.ndarray]:
    """Return the outputs of parts that together are the whole operation."""
    rng = np.random.default_rng(1)
    grain = min(op.grain, op.length) if op.length % op.grain == 0 else 1  # tables here are small
    cut_offsets = grain * np.sort(rng.integers(0, op.length // grain + 1, 3))
    outputs = []
    for first, end in pairwise([0, *cut_offsets.tolist(), op.length]):
        if first == end:
            continue
        part, read = op.part(first, end), {}
        for field in op.reads:
            name, columns = getattr(op, field), op.part_reads(field, first, end)
            read[name] = inputs[name] if columns is None else inputs[name][:, slice(*columns)]
        rows = {weight.name: slice(*weight.rows((first, end))) for weight in op.weights}
        own_weights = {name: values[rows[name]] for name, values in weights.items()}
        assert all(own_weights[weight.name].shape == weight.shape for weight in part.weights)
        outputs.append(run(part, read, own_weights, tokens))
    return outputs


def test_parts_together_compute_what_the_whole_does() -> None:
    rng = np.random.default_rng(0)
    for op in OPS:
        # What a layer stores and others read: see the tests of whole Programs.
        if isinstance(op, ExternalInput | TakeColumns | SharedKvAttention):
            continue
        inputs = {name: random_floats(rng, NUM_ROWS, input_width(op, name)) for name in op.inputs}
        weights = {weight.name: random_floats(rng, *weight.shape) for weight in op.weights}
        tokens = rng.integers(0, NUM_IDS, NUM_ROWS)
        expected = run(op, inputs, weights, tokens)
        assert expected.shape == (NUM_ROWS, op.width)
        if op.sharding is Sharding.REPLICATED:
            continue
        outputs = parts_of(op, inputs, weights, tokens)
        if isinstance(op.parts_by((0, op.length)), ColumnParts):
            together = np.concatenate(outputs, axis=1)
        else:
            stacked = np.stack(outputs)
            assert (np.isfinite(stacked).sum(axis=0) == 1).all(), "each value is in one part"
            together = np.nansum(stacked, axis=0)
        np.testing.assert_allclose(together, expected, rtol=2e-5, atol=2e-5, err_msg=str(op))
