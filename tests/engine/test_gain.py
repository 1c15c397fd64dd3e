"""What a split should gain: predicted steps of one process and of several ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.backends import RankFacts
from twostroke.core.hardware import Hardware
from twostroke.engine.gain import Divided, LinkSpeed, describe_gain, part_of_machine
from twostroke.engine.loading import load
from twostroke.models import build_program
from twostroke.program import BatchShape
from twostroke.program.cost import CostModel
from twostroke.program.mesh import Mesh
from twostroke.program.shard import shard

MACHINE = Hardware("a machine", 2, 0, 1e6, 1e9, "any", "made up")
AT_ONCE = LinkSpeed(0.0, 1e30)
DECODE = BatchShape.decode((64,) * 4)
PREFILL = BatchShape.prefill(128)


def divided(tmp_path, mesh, link=AT_ONCE, family="llama", num_layers=4) -> Divided:
    tiny = tiny_of(family, num_layers=num_layers)
    loaded = load(str(write_tiny_gguf(tmp_path / "tiny.gguf", tiny)))
    program = build_program(loaded.spec)
    sizes = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
    parts = shard(program, mesh)
    limits = (part_of_machine(MACHINE, len(parts)),) * len(parts)
    return Divided(CostModel(program, sizes), parts, limits, link)


def test_one_rank_takes_as_long_as_one_process(tmp_path):
    one = divided(tmp_path, Mesh())
    for batch in (DECODE, PREFILL):
        step = one.step(batch)
        assert step.step_s == pytest.approx(one.step_s_on_one(batch, MACHINE), rel=1e-6)
        assert step.bytes == (0,)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3"])
def test_ranks_share_a_step_and_wait_for_the_slowest(tmp_path, family):
    num_layers = 7 if family == "gemma3" else 4
    meshes = [
        Mesh(column_parts=(1, 1)), Mesh(column_parts=(3, 1)), Mesh(row_parts=2),
        Mesh(stages=(1, 1)), Mesh(stages=(1, 1), column_parts=(1, 1)),
    ]  # fmt: skip
    for mesh in meshes:
        ranks = divided(tmp_path, mesh, family=family, num_layers=num_layers)
        for batch in (DECODE, PREFILL):
            step = ranks.step(batch)
            ends = map(sum, zip(step.computing_s, step.waiting_s, step.moving_s, strict=True))
            assert max(ends) == pytest.approx(step.step_s)
            assert sum(step.bytes) > 0
            assert step.step_s >= ranks.step_s_on_one(batch, MACHINE) * 0.999
            assert step.each_s <= step.step_s


def test_collectives_take_their_number_times_the_latency(tmp_path):
    slow = divided(tmp_path, Mesh(column_parts=(1, 1)), LinkSpeed(1.0, 1e30))
    gathers = 4 * 4 + 2  # four a layer, the embedding's and the logits'
    step = slow.step(DECODE)
    assert step.moving_s == pytest.approx((gathers, gathers))
    fast = replace(slow, link=LinkSpeed(0.0, 1.0)).step(DECODE)
    assert fast.moving_s == pytest.approx(fast.bytes)


def test_two_machines_gain_over_one(tmp_path):
    two = divided(tmp_path, Mesh(column_parts=(1, 1)))
    two = replace(two, limits=(MACHINE, MACHINE))
    for batch in (DECODE, PREFILL):
        assert 1.5 < two.gain(batch, MACHINE) <= 2.0


def test_a_pipeline_gains_with_steps_in_flight_unless_weights_are_the_limit(tmp_path):
    stages = divided(tmp_path, Mesh(stages=(1, 1)))
    for bandwidth, low, high in ((1e12, 1.5, 2.0), (1.0, 0.9, 1.1)):
        machine = replace(MACHINE, bandwidth=bandwidth)
        two = replace(stages, limits=(machine, machine))
        assert two.gain(DECODE, machine) == pytest.approx(1.0)
        assert low <= two.gain(DECODE, machine, num_in_flight=2) <= high


def test_the_engine_says_what_to_expect(tmp_path):
    two = divided(tmp_path, Mesh(column_parts=(1, 1)))
    for hosts, link, where in (
        ("aa", "shared", "on this machine, connected by shared memory"),
        ("ab", "ucx", "on 2 machines, connected by UCX"),
    ):
        ranks = tuple(RankFacts(i, host, 1, 0, 0) for i, host in enumerate(hosts))
        engine = SimpleNamespace(
            card=SimpleNamespace(cost=two.cost),
            mesh=Mesh(column_parts=(1, 1)),
            limits=SimpleNamespace(hardware=lambda: MACHINE),
            facts=SimpleNamespace(ranks=ranks, link=link, steps_ahead=0),
        )
        said = describe_gain(engine)
        assert said.startswith(f"2 ranks {where}. Expected speed against one process here: ")
        assert said.endswith("x.")
