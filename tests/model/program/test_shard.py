"""Ranks together compute the values of one rank, for every division of a Program."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.schedules import Setting, fresh, random_requests, run_schedule
from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import FAMILIES
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.frozen import Frozen
from twostroke.model.families import build_program
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS
from twostroke.model.program.mesh import Mesh, stage_ends
from twostroke.model.program.ops import AllGather, Receive, Send
from twostroke.model.program.shard import shard
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor

NUM_PAGES, CONTEXT = 256, 120

# Ranks sum in another order than one process. The largest difference seen is 5.4e-5 of 1 plus the
# value (qwen3.5-moe, in float32 on Zen 5); a wrong division differs by about 1.
TOLERANCE = 5e-4


class Model(Frozen):
    """A tiny model, with the random choices of its tests."""

    program: Program
    tensors: Mapping[str, QuantTensor]
    seed: str

    def meshes(self, count: int) -> list[Mesh]:
        """Return random meshes of up to 18 ranks, with equal and unequal shares."""
        rng, ends = random.Random(self.seed), stage_ends(self.program, self.program.ops)

        def shares(max_share: int) -> tuple[int, ...]:
            return tuple(rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(1, max_share)))

        return [
            Mesh(shares(min(3, len(ends))), rng.randint(1, 2), shares(3), bool(number % 2))
            for number in range(count)
        ]


def page_size(mesh: Mesh) -> int:
    return KV_SPLIT_TOKENS * mesh.num_kv_ranks if mesh.num_kv_ranks > 1 else 16


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family = request.param
    sizes = {"num_layers": 3, "num_heads": 6, "num_kv_heads": 3} | FAMILIES[family].sizes
    path = write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "a.gguf", tiny_of(family, **sizes))
    loaded = load_path(path)
    return Model(build_program(loaded.spec), loaded.tensors, family)


def test_every_value_is_that_of_one_rank(model: Model) -> None:
    program, rng = model.program, random.Random(model.seed)
    names = list(program.value_widths)
    tokens = [rng.randrange(program.vocab_size) for _ in range(90)]
    expected = ReferenceBackend(program, model.tensors, 1, 16).trace(tokens, names)
    meshes = [Mesh(column_parts=(1,) * degree) for degree in (2, 3, 7)]
    meshes += [Mesh(column_parts=(1,) * 7, kv_by_tokens=True), Mesh(row_parts=3, kv_by_tokens=True)]
    meshes.append(Mesh(column_parts=(0, 1), attention_parts=(1, 0)))
    for mesh in meshes + model.meshes(4):
        ranks = ReferenceBackend(program, model.tensors, 1, page_size(mesh), mesh=mesh)
        for name, value in ranks.trace(tokens, names).items():
            np.testing.assert_allclose(
                value, expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{name} {mesh}"
            )


@pytest.mark.parametrize("model", ["mistral", "mixtral", "gemma3", "olmo2"], indirect=True)
def test_tokens_are_those_of_one_rank(model: Model) -> None:
    """Any schedule gives the same tokens: chunked prefill, prefix hits, drafts, preemption."""
    program, rng = model.program, random.Random(model.seed)
    plain = ReferenceBackend(program, model.tensors, NUM_PAGES, 16)
    fewest = -(-CONTEXT // 16) * len(plain.facts.windows)
    requests = random_requests(rng, 4, program.vocab_size, 60, 6)
    setting = Setting.chosen_by(rng, fewest, 3 * fewest)
    expected, _ = run_schedule(plain, setting, [fresh(r) for r in requests], CONTEXT)
    mesh = model.meshes(2)[1]
    ranks = ReferenceBackend(program, model.tensors, NUM_PAGES, page_size(mesh), mesh=mesh)
    outputs, _ = run_schedule(ranks, setting, [fresh(r) for r in requests], CONTEXT, expected)
    assert {name: tokens for name, (tokens, _) in outputs.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }, mesh


def test_ranks_have_their_share_of_weights_and_pages(model: Model) -> None:
    program = model.program
    for mesh in model.meshes(5):
        ranks = shard(program, mesh)
        assert len(ranks) == mesh.num_ranks
        for name, (rows, *_rest) in program.weight_shapes.items():
            row_ranges = [rank.weight_rows[name] for rank in ranks if name in rank.weight_rows]
            covered = {row for first, end in row_ranges for row in range(first, end)}
            assert covered == set(range(rows)), "rows that no rank has"
        for rank in ranks:
            shapes = rank.program.weight_shapes
            assert {n: shape[0] for n, shape in shapes.items()} == {
                n: end - first for n, (first, end) in rank.weight_rows.items()
            }
            groups = rank.program.cache_groups
            assert [g.window for g in groups] == [g.window for g in program.cache_groups]
            layers = [layer for group in groups for layer in group.layers]
            assert sorted(layers) == list(range(len(rank.program.cache_layers)))
        if mesh.kv_by_tokens and len(mesh.stages) == 1:
            size = page_size(mesh)
            stored = [rank.program.page_bytes(size) for rank in ranks]
            assert stored == [program.page_bytes(size) // mesh.num_ranks] * mesh.num_ranks


def test_teams_agree_on_what_they_exchange(model: Model) -> None:
    (mesh,) = model.meshes(1)
    ranks = shard(model.program, mesh)
    gathers = [[op for op in rank.program.ops if isinstance(op, AllGather)] for rank in ranks]
    for number, rank_gathers in enumerate(gathers):
        for op in rank_gathers:
            assert op.team[op.team_index] == number
            for member in op.team:
                (theirs,) = [g for g in gathers[member] if g.output == op.output]
                assert (theirs.parts, theirs.team, theirs.root) == (op.parts, op.team, op.root)
    sent = [
        (number, op.to, op.width)
        for number, rank in enumerate(ranks)
        for op in rank.program.ops
        if isinstance(op, Send)
    ]
    received = [
        (op.sender, number, op.width)
        for number, rank in enumerate(ranks)
        for op in rank.program.ops
        if isinstance(op, Receive)
    ]
    assert sorted(sent) == sorted(received)


def test_one_rank_has_the_program_unchanged(model: Model) -> None:
    (rank,) = shard(model.program, Mesh())
    assert rank.program.ops == model.program.ops
