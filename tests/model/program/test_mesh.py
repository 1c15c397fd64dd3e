"""The arrangement of ranks, and the divisions that are possible."""

from __future__ import annotations

import pytest

from support.cpu import tiny_model
from support.programs import PROGRAMS
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import UsageError
from twostroke.model.program.mesh import Mesh, mesh_of, stores_twice
from twostroke.model.program.sharding import cuts


def test_cuts_are_near_the_shares() -> None:
    assert cuts(9, (1, 1)) == (0, 4, 9)
    assert cuts(576, (3, 1), 32) == (0, 416, 576)
    assert cuts(100, (1, 1), 32) == (0, 64, 100)
    assert cuts(2, (1, 1, 1)) == (0, 0, 1, 2)


def test_each_rank_has_one_coordinate_and_rank_0_is_in_the_last_stage() -> None:
    mesh = Mesh((1, 2), 3, (1, 1, 2))
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.num_ranks)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(18))
    assert len(set(coordinates)) == 18
    assert coordinates[0].stage == 1


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("biases", {"pipeline": 3}, "pipeline must be at most 2, the model's layers, got 3."),
        ("biases", {"tensor": 5}, "tensor must be at most 4 for this model, got 5."),
        ("biases", {"expert": 2}, "expert needs a model with experts, which this is not."),
        ("experts", {"expert": 9}, "expert must be at most 8, the model's experts, got 9."),
        ("experts", {"expert": 4, "tensor": 3}, "tensor must be at most 2 for this model, got 3."),
    ],
)
def test_an_impossible_degree_says_what_is_possible(
    name: str, options: dict[str, int], reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        mesh_of(ParallelOptions(**options), PROGRAMS[name])
    assert str(caught.value) == reason


def test_heads_are_stored_twice_where_they_do_not_divide_evenly() -> None:
    program = tiny_model(num_heads=6, num_kv_heads=3)[0]
    even, uneven = Mesh(column_parts=(1,) * 3), Mesh(column_parts=(1, 1))
    assert [stores_twice(mesh, program) for mesh in (Mesh((1, 1)), even)] == [False, False]
    assert [stores_twice(mesh, program) for mesh in (uneven, Mesh(row_parts=2))] == [True, True]


def test_shares_are_those_of_columns_or_else_of_stages() -> None:
    program = PROGRAMS["experts"]
    both = ParallelOptions(tensor=2, pipeline=2, context=2, shares=(3, 1))
    assert mesh_of(both, program) == Mesh((1, 1), 2, (3, 1))
    assert mesh_of(ParallelOptions(pipeline=2, shares=(3, 1)), program) == Mesh((3, 1))
