"""What operations say about themselves, compared with what the reference computes."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from support.operations import NUM_IDS, OPS, input_width
from twostroke.backends.reference.operations import PagedCache, StepState, apply
from twostroke.backends.spans import Span
from twostroke.program import Op, Program
from twostroke.program.ops import Embed, ExternalInput, MixtureOfExperts, RMSNorm
from twostroke.program.sharding import Layout, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    Values = dict[str, np.ndarray]

NUM_ROWS = 7


def run(op: Op, inputs: Values, weights: Values, tokens: np.ndarray) -> np.ndarray:
    """Return the output of one operation for one sequence from its beginning."""
    program = Program("one", (*(ExternalInput(name, 1) for name in op.inputs), op), NUM_IDS, 64)
    rows = np.arange(len(tokens))
    span = Span(slice(0, len(tokens)), 0, np.zeros((1, 1), np.int64))
    cache = PagedCache(program, 1, NUM_ROWS)
    state = StepState(tokens, rows, (span,), rows, weights, cache)
    return apply(op, inputs, state)


def random_floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def part_of(op: Op, rank: int, num_ranks: int) -> Op:
    """Return a rank's share: the same operation with its divided fields as small."""
    changes: dict[str, Any] = {}
    for field in op.sharding.divided:
        whole = getattr(op, field)
        size = (len(whole) if isinstance(whole, tuple) else whole) // num_ranks
        is_tuple = isinstance(whole, tuple)
        changes[field] = whole[rank * size : (rank + 1) * size] if is_tuple else size
    return replace(op, **changes)


def num_parts(op: Op) -> int:
    """Return into how many equal parts an operation can be divided."""
    wholes = [getattr(op, field) for field in op.sharding.divided]
    return gcd(*(len(whole) if isinstance(whole, tuple) else whole for whole in wholes)) or 1


def cut(array: np.ndarray, axis: int | None, rank: int, num_ranks: int) -> np.ndarray:
    return array if axis is None else np.split(array, num_ranks, axis)[rank]


def sharded(
    op: Op, inputs: Values, weights: Values, tokens: np.ndarray, num_ranks: int
) -> np.ndarray:
    """Return the output, computed by ranks as the operation's sharding rule says."""
    rule = op.sharding
    axes = {weight.name: weight.axis for weight in op.weights}
    if isinstance(op, MixtureOfExperts):  # every rank routes, and computes its experts' terms
        assert rule.unit is Unit.EXPERT
        total = np.zeros((len(tokens), op.width), np.float32)
        for rank in range(num_ranks):
            owned = {weight.name for weight in part_of(op, rank, num_ranks).weights}
            own = {name: w if name in owned else 0 * w for name, w in weights.items()}
            total += run(op, inputs, own, tokens)
        return total
    outputs = []
    for rank in range(num_ranks):
        own = {name: cut(w, axes[name], rank, num_ranks) for name, w in weights.items()}
        axis = None if rule.gathers else 1
        seen = {name: cut(value, axis, rank, num_ranks) for name, value in inputs.items()}
        part = part_of(op, rank, num_ranks)
        if rule.output is not Layout.ROWS:
            outputs.append(run(part, seen, own, tokens))
            continue
        assert isinstance(part, Embed)  # a rank has the rows of the tokens that it knows
        local = tokens - rank * part.num_ids
        is_known = (local >= 0) & (local < part.num_ids)
        rows = np.zeros((len(tokens), part.width), np.float32)
        rows[is_known] = run(part, {}, own, local[is_known])
        outputs.append(rows)
    if rule.output is Layout.ROWS:
        return np.asarray(sum(outputs))
    return np.concatenate(outputs, axis=1)


def test_ranks_together_compute_what_one_rank_does() -> None:
    rng = np.random.default_rng(0)
    for op in OPS:
        inputs = {name: random_floats(rng, NUM_ROWS, input_width(op, name)) for name in op.inputs}
        weights = {weight.name: random_floats(rng, *weight.shape) for weight in op.weights}
        tokens = rng.integers(0, NUM_IDS, NUM_ROWS)
        if isinstance(op, ExternalInput):
            assert op.sharding.unit is Unit.OPERATION
            continue
        whole = run(op, inputs, weights, tokens)
        assert whole.shape == (NUM_ROWS, op.width)
        most = num_parts(op)
        assert most > 1 or isinstance(op, RMSNorm), op
        for num_ranks in {2, most} if most > 1 else {1}:
            parts = sharded(op, inputs, weights, tokens, num_ranks)
            np.testing.assert_allclose(parts, whole, rtol=2e-5, atol=2e-5, err_msg=str(op))


def test_rules_name_fields_and_axes_that_exist() -> None:
    for op in OPS:
        names = set(op.__struct_fields__)
        assert set(op.sharding.divided) <= names
        assert op.sharding.divided or op.sharding.unit is Unit.OPERATION
        for weight in op.weights:
            assert weight.axis is None or weight.axis < len(weight.shape)
        part = part_of(op, 0, num_parts(op))
        sizes: Mapping[str, tuple[int, ...]] = {w.name: w.shape for w in part.weights}
        for weight in op.weights:
            if weight.axis is not None:
                assert sizes[weight.name][weight.axis] * num_parts(op) == weight.shape[weight.axis]
