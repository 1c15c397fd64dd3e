"""What a split should gain: predicted steps of one process and of several ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.backends.interface import RankFacts
from twostroke.backends.parallel.backend import ParallelBackend
from twostroke.backends.parallel.predicted_speed import (
    Divided,
    LinkSpeed,
    describe_gain,
    measure_link,
    part_of_machine,
    rates_of,
)
from twostroke.core.hardware import Hardware
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program import BatchShape
from twostroke.model.program.cost import CostModel
from twostroke.model.program.mesh import Mesh
from twostroke.model.program.shard import shard

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
    one_rank = divided(tmp_path, Mesh())
    for batch in (DECODE, PREFILL):
        step = one_rank.step(batch)
        assert step.step_s == pytest.approx(one_rank.step_s_on_one(batch, MACHINE), rel=1e-6)
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
    # Uneven stages: rank 0 also plans and draws, which counts much in a tiny model.
    for bandwidth, low, high in ((1e12, 1.3, 2.0), (1.0, 0.7, 1.1)):
        machine = replace(MACHINE, bandwidth=bandwidth)
        two = replace(stages, limits=(machine, machine))
        assert two.gain(DECODE, machine) == pytest.approx(1.0)
        assert low <= two.gain(DECODE, machine, num_in_flight=2) <= high


def test_waiting_is_told_from_moving(tmp_path):
    two = divided(tmp_path, Mesh(column_parts=(1, 3)))
    shares = two.collective_shares(DECODE)
    assert shares.waiting > 0.4  # rank 0 has a quarter
    assert shares.moving < 1e-6
    moving = replace(two, link=LinkSpeed(1.0, 1e30)).collective_shares(DECODE)
    assert moving.moving > moving.waiting


def test_ranks_wait_for_noise_late_starts_and_uneven_experts(tmp_path):
    two = divided(tmp_path, Mesh(column_parts=(1, 1)))
    even_step = two.step(DECODE)
    noisy = replace(two, link=replace(AT_ONCE, noise=0.1)).step(DECODE)
    added_s = noisy.waiting_s[0] - even_step.waiting_s[0]
    assert added_s == pytest.approx(0.1 * max(even_step.computing_s), rel=0.1)
    late_step = replace(two, link=replace(AT_ONCE, start_s=1.0)).step(DECODE)
    assert late_step.waiting_s[0] - even_step.waiting_s[0] == pytest.approx(1.0)
    mixture = divided(tmp_path, Mesh(column_parts=(1, 1)), family="mixtral")
    few, many = (mixture.collective_shares(BatchShape.decode((8,) * n)) for n in (2, 64))
    assert few.waiting > 2 * many.waiting > 0


def test_rates_are_those_of_a_rank(tmp_path):
    """Twice as slow attention is waited for twice as long, and nothing else changes."""
    two = divided(tmp_path, Mesh(column_parts=(1, 1)))
    part_cost, limits = two.cost.part(two.parts[0]), two.limits[0]
    timed = []
    for op in two.parts[0].program.ops:
        cost = part_cost.operation(op, PREFILL)
        seconds = cost.bytes / limits.bandwidth + cost.flops / limits.peak
        timed.append(((op,), seconds * (2 if op.label == "attention" else 1)))
    rated = replace(two, rates=rates_of(timed, part_cost, limits, PREFILL))
    attention_s = sum(s / 2 for (op,), s in timed if op.label == "attention")
    before, after = two.step(PREFILL).computing_s[0], rated.step(PREFILL).computing_s[0]
    assert after - before == pytest.approx(attention_s)


class MeetingRanks(ParallelBackend):
    """Three ranks that take 2 µs to meet, 1 ms for a MB, and lose a tenth of their time."""

    def __init__(self, link):
        ranks = [RankFacts(rank, "here", 1, 0, 0) for rank in range(3)]
        self.facts = SimpleNamespace(ranks=ranks, link=link)

    def measure_collectives(self, test):
        computing_s = test.work * 1e-9
        meeting_s = 2e-6 + 0.1 * computing_s + (test.num_bytes > 1000) * 1e-3
        return [computing_s] * test.count, [
            meeting_s + 5e-6,
            *[meeting_s] * (test.count - 1),
        ]


def test_the_link_is_measured():
    result = measure_link(MeetingRanks("ucx"))
    assert result.latency_s == pytest.approx(2e-6)
    assert result.bandwidth == pytest.approx(2 * 2**20 / 1e-3)
    assert result.start_s == pytest.approx(5e-6)
    assert result.noise == pytest.approx(0.1, rel=0.01)
    assert measure_link(MeetingRanks("shared")).seconds(10**9) == pytest.approx(2e-6)


def test_the_engine_says_what_to_expect(tmp_path):
    two = divided(tmp_path, Mesh(column_parts=(1, 1)))
    for hosts, link, where in (
        ("aa", "shared", "on this machine, connected by shared memory"),
        ("ab", "ucx", "on 2 machines, connected by UCX"),
    ):
        ranks = tuple(RankFacts(i, host, 1, 0, 0) for i, host in enumerate(hosts))
        output = describe_gain(
            facts=SimpleNamespace(ranks=ranks, link=link, steps_ahead=0),
            cost=two.cost,
            mesh=Mesh(column_parts=(1, 1)),
            limits=MACHINE,
            backend=MeetingRanks(link),
        )
        assert output.startswith(f"2 ranks {where}. A collective takes 2.0 µs")
        assert "Expected speed against one process here: " in output
        assert output.endswith("x.")
