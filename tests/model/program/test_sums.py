"""Ranks that split sums exchange less, and compute nearly the same values."""

from __future__ import annotations

import numpy as np
import pytest

from support.programs import PROGRAMS, hybrid_program, random_tensors
from twostroke.backends.reference import ReferenceBackend
from twostroke.model.program.mesh import Mesh
from twostroke.model.program.ops import AllGather, AllReduce
from twostroke.model.program.shard import shard

MESHES = [
    Mesh(column_parts=(1, 1)),
    Mesh(column_parts=(3, 1)),
    Mesh(column_parts=(1,) * 5),  # more than there are heads
    Mesh((1, 1), 2, (1, 2)),
]
ALL_PROGRAMS = PROGRAMS | {
    "hybrid": hybrid_program(value_dim=32),
    "convolution": hybrid_program(mixer="convolution"),
    "mamba": hybrid_program(mixer="mamba", head_dim=32),
    "mamba, one group": hybrid_program(mixer="mamba", num_groups=1),
}
TOKENS = [(7 * i * i + 3) % 250 for i in range(37)]


@pytest.mark.parametrize("name", ALL_PROGRAMS)
def test_values_are_near_those_of_one_rank(name: str) -> None:
    program = ALL_PROGRAMS[name]
    tensors = random_tensors(program, "Q8_0")
    values = list(program.value_widths)
    expected = ReferenceBackend(program, tensors, 1, 16).trace(TOKENS, values)
    for mesh in MESHES:
        ranks = ReferenceBackend(program, tensors, 1, 16, mesh=mesh, splits_sums=True)
        for value, rank_values in ranks.trace(TOKENS, values).items():
            error = np.abs(rank_values - expected[value]).max() / np.abs(expected[value]).max()
            assert error < 1e-5, f"{value} {mesh}"


def test_a_layer_needs_two_sums_and_no_gather() -> None:
    program = PROGRAMS["biases"]
    blocks = dict.fromkeys(program.weight_shapes, 32)
    for rank in shard(program, Mesh(column_parts=(1, 1)), block_sizes=blocks):
        kinds = [type(op) for op in rank.program.ops if isinstance(op, AllGather | AllReduce)]
        assert kinds == [AllGather, *[AllReduce] * 4, AllGather], "of two layers"


def test_a_recurrent_layer_needs_two_sums_and_one_gather() -> None:
    program = hybrid_program((False, False), num_value_heads=4, value_dim=32)
    blocks = dict.fromkeys(program.weight_shapes, 16)
    for rank in shard(program, Mesh(column_parts=(1, 1)), block_sizes=blocks):
        kinds = [type(op) for op in rank.program.ops if isinstance(op, AllGather | AllReduce)]
        assert kinds == [AllGather, *[AllGather, AllReduce, AllReduce] * 2, AllGather]


@pytest.mark.parametrize("block_size", [1, 32, 64])
def test_weights_are_cut_between_blocks(block_size: int) -> None:
    program = PROGRAMS["biases"]
    blocks = dict.fromkeys(program.weight_shapes, block_size)
    for mesh in MESHES:
        ranks = shard(program, mesh, block_sizes=blocks)
        for name, (height, *rest) in program.weight_shapes.items():
            num_holders = np.zeros((height, *rest), int)
            for rank in ranks:
                if name in rank.weight_rows:
                    columns = rank.weight_columns.get(name, (0, rest[0] if rest else 0))
                    assert all(end % block_size == 0 or end == rest[0] for end in columns)
                    num_holders[
                        (slice(*rank.weight_rows[name]), *[slice(*columns)][: len(rest)])
                    ] += 1
            assert num_holders.min() > 0, f"parts of {name} that no rank has"
