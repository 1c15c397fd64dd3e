"""Figures of papers and handbooks, computed again by the planner."""

from __future__ import annotations

import pytest

from support.configs import write_config
from twostroke.core.errors import UsageError
from twostroke.core.hardware import Hardware
from twostroke.engine.counters import PhaseTotals
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.roofline import kv_bytes
from twostroke.model.program.batch import BatchShape


@pytest.fixture
def model(tmp_path):
    """Return a function that makes a model with these sizes for plans."""

    def make(*sizes, **changes):
        return load_planned_model(write_config(tmp_path / "config.json", sizes, **changes))

    return make


def test_keys_and_values_of_models_in_papers(model):
    cases = (
        # PagedAttention (arXiv:2309.06180): OPT-13B, 800 KB a token, 1.6 GB a request.
        ((5120, 40, 40, 40, 20480, 50272), 1, 1, 800 * 1024, 1e-9),
        ((5120, 40, 40, 40, 20480, 50272), 1, 2048, 1.6 * 2**30, 0.03),
        # DistServe (arXiv:2401.09670): OPT-66B, 512 tokens, 1.13 GB.
        ((9216, 72, 72, 64, 36864, 50272), 1, 512, 1.13 * 2**30, 0.005),
        # GPTQ (arXiv:2210.17323): OPT-175B, 2,048 tokens, some 9 GB.
        ((12288, 96, 96, 96, 49152, 50272), 1, 2048, 9 * 2**30, 0.001),
        # H2O (arXiv:2306.14048): 30B, batch 128, 1,024 tokens, 180 GB.
        ((7168, 56, 56, 48, 28672, 50272), 128, 1024, 180e9, 0.003),
        # Pope et al. (arXiv:2211.05102): more than 500B, batch 512, 2,048 tokens, 3 TB.
        ((6144, 48, 48, 118, 24576, 32000), 512, 2048, 3.04e12, 0.001),
    )
    for sizes, batch, num_tokens, expected, tolerance in cases:
        num_bytes = batch * kv_bytes(model(*sizes), Question(), num_tokens)
        assert num_bytes == pytest.approx(expected, rel=tolerance)


def test_a_window_saves_what_the_paper_says(model):
    """Mistral 7B (arXiv:2310.06825): at 32k tokens the cache is 8 times smaller."""
    sizes = (4096, 32, 8, 32, 14336, 32000)
    full_bytes = kv_bytes(model(*sizes), Question(), 32768)
    windowed = model(*sizes, model_type="mistral", sliding_window=4096)
    assert full_bytes / kv_bytes(windowed, Question(), 32768) == 8


def test_a_token_uses_the_experts_that_the_paper_says(model):
    """Mixtral (arXiv:2401.04088): 47B weights, 13B for each token."""
    mixture = model(
        4096, 32, 8, 32, 14336, 32000,
        model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    )  # fmt: skip
    assert mixture.num_weights == pytest.approx(47e9, rel=0.01)
    planner = Planner(mixture, find_device("H100-SXM"), Question(count=2))
    step = planner.roofline.step(BatchShape.decode((0,)))
    assert step.flops / 2 == pytest.approx(13e9, rel=0.02)
    # Many tokens touch all experts (MEASURE: E (1 - (1 - k/E)^B)).
    read = planner.roofline.step(BatchShape.decode((0,) * 64)).bytes
    assert read == pytest.approx(mixture.all_bytes, rel=0.01)
    # All are read and two are used, so it takes more streams to be bound by arithmetic.
    assert planner.knee == pytest.approx(295.2 * read / step.bytes, rel=0.01)
    decode = BatchShape.decode
    for streams, bound in ((600, "memory"), (1200, "arithmetic")):
        assert planner.roofline.step(decode((0,) * streams)).ops["experts"].bound == bound


def test_generations_of_devices_differ_as_in_the_paper():
    """Splitwise (arXiv:2311.18677, table 1): 1.64 times the bandwidth, equal memory."""
    new, old = find_device("H100-SXM"), find_device("A100-80GB")
    assert new.bandwidth / old.bandwidth == pytest.approx(1.64, abs=0.01)
    assert new.memory_bytes == old.memory_bytes


def test_a_70b_model_cannot_write_faster_than_it_is_read(model):
    large = model(8192, 64, 8, 80, 28672, 128256)
    planner = Planner(large, find_device("H100-SXM"), Question(prompt=1, output=1))
    assert 1 / planner.decode(1).seconds == pytest.approx(23.9, rel=0.01)
    # Its keys and values of 8,192 tokens over a link of 50 GB/s.
    assert kv_bytes(large, Question(), 8192) / 50e9 == pytest.approx(0.0537, abs=5e-5)


def test_bits_of_weights_decide_their_bytes(model):
    seven = model(4096, 32, 32, 32, 11008, 32000)
    with pytest.raises(UsageError, match="Did you mean 'int8'"):
        seven.with_weights("int9")
    quarter = seven.with_weights("w4a16").all_bytes / seven.all_bytes
    assert seven.all_bytes == pytest.approx(2 * 6.74e9, rel=0.01)
    assert 0.25 < quarter < 0.30  # scales, and 16 bits for embeddings and logits


def test_published_speeds_of_a_7b_model_stay_below_their_limits(model):
    """gpt-fast on an A100 (PyTorch's blog, 2023-11-30): tokens/s of one stream."""
    seven, device = model(4096, 32, 32, 32, 11008, 32000), find_device("A100-80GB")
    shares = []
    for weights, measured in (("bf16", 107.0), ("int8", 157.4), ("w4a16", 202.1)):
        plan = make_plan(seven.with_weights(weights), device, Question(prompt=5, output=200))
        shares.append(measured * plan.rows[0].tpot_s)
    assert all(share < 1 for share in shares)
    assert shares == sorted(shares, reverse=True)  # fewer bytes, less of the limit
    assert shares[0] == pytest.approx(0.7, abs=0.03)


def test_bytes_of_a_token_are_those_that_gpt_fast_counts(model):
    """Its README (pytorch-labs/gpt-fast at 0f925b5): tokens/s, and GB/s that they take."""
    seven = model(4096, 32, 32, 32, 11008, 32000)
    for weights, per_s, gb_s in (("bf16", 104.9, 1397.31), ("int8", 155.58, 1069.20)):
        planner = Planner(seven.with_weights(weights), find_device("A100-80GB"), Question(output=1))
        read = planner.roofline.step(BatchShape.decode((0,))).bytes
        assert read == pytest.approx(gb_s / per_s * 1e9, rel=0.03)


def test_utilization_is_a_share_of_the_peak():
    """7B in fp16 at 100 tokens/s reads 1,400 GB/s; a chip that could do 100 does 20."""
    second = PhaseTotals(steps=100, rows=100, flops=20, bytes=int(100 * 14e9), time_s=1.0)
    for bandwidth, expected in ((2000e9, 0.70), (2039e9, 0.687)):
        hardware = Hardware(
            "one", 1, 1, bandwidth=bandwidth, peak=100.0, peak_kind="any", source="a handbook"
        )
        assert second.mbu(hardware) == pytest.approx(expected, abs=5e-4)
    assert second.mfu(hardware) == pytest.approx(0.2)


def test_cached_prompts_need_no_computing():
    question = Question(prompt=1100, cached=1000 / 1100)
    assert question.num_cached * 1_000_000 == pytest.approx(1e9, rel=0.001)


def test_a_long_answer_takes_its_tokens_times_their_time(model):
    small = Planner(model(4096, 32, 8, 32, 14336, 128256), find_device("L4"), Question(output=1000))
    row = small.row(1)
    whole_s = 1 / row.requests_per_s
    assert whole_s == pytest.approx(small.prefill().seconds + 1000 * row.tpot_s)
