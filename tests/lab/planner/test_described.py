"""Plans of models that the engine cannot run, compared with published figures."""

from __future__ import annotations

import json

import pytest

from support.configs import UNKNOWN_HERE as CONFIGS
from twostroke.core.errors import ModelFormatError
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.roofline import Roofline, kv_bytes
from twostroke.model.program.batch import BatchShape, DecodeRun


@pytest.fixture
def model(tmp_path):
    def make(name, **changes):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name] | changes))
        return load_planned_model(str(path))

    return make


@pytest.mark.parametrize(
    ("name", "weights", "used", "source"),
    [
        ("DeepSeek-V3", 671e9, 37e9, "arXiv:2412.19437, abstract"),
        ("DeepSeek-V2", 236e9, 21e9, "arXiv:2405.04434, abstract"),
        ("DeepSeek-V2-Lite", 15.7e9, 2.4e9, "arXiv:2405.04434, appendix B"),
        ("GLM-4.5", 355e9, 32e9, "arXiv:2508.06471, table 1"),
        ("Qwen1.5-MoE-A2.7B", 14.3e9, 2.7e9, "https://qwenlm.github.io/blog/qwen-moe/"),
        ("Hunyuan-Large", 389e9, 52e9, "arXiv:2411.02265, abstract"),
        ("gpt-oss-120b", 116.83e9, 5.13e9, "arXiv:2508.10925, table 1"),
        ("gpt-oss-20b", 20.91e9, 3.61e9, "arXiv:2508.10925, table 1"),
    ],
)
def test_weights_are_those_that_makers_publish(model, name, weights, used, source):
    planned = model(name)
    assert planned.num_weights == pytest.approx(weights, rel=0.007), source
    step = Roofline(planned, find_device("H200"), Question()).min_step(BatchShape.decode((0,)))
    # Some count the row of the embedding, or all of it, as used.
    embedding = CONFIGS[name]["vocab_size"] * CONFIGS[name]["hidden_size"]
    assert step.flops / 2 < used * 1.03
    assert step.flops / 2 + embedding > used * 0.97


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DeepSeek-V3", 70_272),  # 61 x (512 + 64) x 2: arXiv:2505.09343, table 1, "70.272 KB"
        ("DeepSeek-V2", 69_120),
        ("GLM-4.5", 92 * 2 * 8 * 128 * 2),
        ("Hunyuan-Large", 32 * 2 * 8 * 80 * 2),  # every other layer; 5% of 80 heads everywhere
        ("Gemma-3n-E4B", 20 * 2 * 2 * 256 * 2),  # 15 of 35 layers have none
        ("gpt-oss-20b", 24 * 2 * 8 * 64 * 2),
    ],
)
def test_bytes_of_a_token(model, name, expected):
    assert kv_bytes(model(name), Question(), 1) == expected


def test_windows_bound_some_layers(model):
    assert kv_bytes(model("gpt-oss-20b"), Question(), 10_000) == 12 * 2048 * (10_000 + 128)
    # Of the 20 layers with keys and values, four see everything (layer_types: every fifth).
    num_bytes = kv_bytes(model("Gemma-3n-E4B"), Question(), 10_000)
    assert num_bytes == 2048 * (4 * 10_000 + 16 * 512)


def test_operations_of_latent_attention_are_those_of_the_paper(model):
    """Training at 4,096 tokens, three times the forward pass: arXiv:2505.09343, table 2."""
    for name, expected in (("DeepSeek-V3", 250e9), ("DeepSeek-V2", 155e9)):
        roofline = Roofline(model(name), find_device("H200"), Question())
        step = roofline.min_step(BatchShape((0,), (4096,), 4096))
        assert 3 * step.flops / 4096 == pytest.approx(expected, rel=0.005)


def test_latent_attention_takes_the_cheaper_way(model):
    planned = model("DeepSeek-V2-Lite")
    roofline = Roofline(planned, find_device("H200"), Question())

    def flops(start, count):
        return roofline.min_step(BatchShape((start,), (count,), 1)).ops["attention"].flops

    layers, heads = 27, 16
    assert flops(999, 1) == 1000 * (2 * 512 + 64) * heads * layers * 2  # as stored
    pairs = 1000 * 1001 // 2
    assert flops(0, 1000) == pairs * (128 + 64 + 128) * heads * layers * 2  # expanded
    later_pairs = 1000 * 5000 + pairs
    expanded = later_pairs * (128 + 64 + 128) + 5000 * 512 * (128 + 128)
    assert flops(5000, 1000) == expanded * heads * layers * 2
    run = DecodeRun.of_steps((10, 500), 6)
    steps = [roofline.totals(run.shape_at(step))[:3] for step in range(6)]
    assert [*zip(*roofline.totals(run)[:3], strict=True)] == steps


def test_each_device_reads_latent_vectors_of_all_heads(model):
    planned = model("DeepSeek-V2-Lite")
    single, four = (Roofline(planned, find_device("H200"), Question(count=n)) for n in (1, 4))
    batch = BatchShape.decode((4000,) * 8)
    times = [roofline.min_step(batch).ops["attention"] for roofline in (single, four)]
    assert times[1].bytes == 4 * times[0].bytes
    for name in ("seconds", "bytes"):
        quick, detailed = getattr(four.totals(batch), name), getattr(four.min_step(batch), name)
        assert quick == pytest.approx(detailed)


def test_files_say_how_they_store_weights(model):
    """gpt-oss: 60.8 and 12.8 GiB (arXiv:2508.10925, table 1)."""
    for name, size in (("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)):
        assert model(name).all_bytes / 2**30 == pytest.approx(size, rel=0.005)
    large = model("DeepSeek-V3")
    assert large.stored == "fp8"
    assert large.all_bytes == pytest.approx(671e9, rel=0.01)
    assert large.with_weights("bf16").all_bytes == pytest.approx(2 * 671e9, rel=0.01)
    for method, bits, stored in (
        ("awq", 4, "w4a16"),
        ("gptq", 8, "int8"),
        ("gptq", 3, "bf16 in place of gptq"),
        ("compressed-tensors", 4, "bf16 in place of compressed-tensors"),
    ):
        other = {"quant_method": method, "bits": bits}
        assert model("Hunyuan-Large", quantization_config=other).stored == stored


def test_shared_layers_read_and_do_not_write(model):
    planned = model("Gemma-3n-E4B")
    step = Planner(planned, find_device("L4"), Question()).roofline.min_step(
        BatchShape.decode((999,))
    )
    read = 7 * 1000 * 2048  # of 35 layers, seven see everything
    assert step.ops["attention"].bytes == read + 4 * 2048  # four of them write a token
    assert step.ops["attention(512)"].bytes == 28 * 512 * 2048 + 16 * 2048


def test_whole_plans_are_made(model):
    for name in ("DeepSeek-V2-Lite", "Gemma-3n-E4B", "gpt-oss-20b"):
        plan = make_plan(model(name), find_device("B200"), Question(count=2))
        assert plan.chosen_row is not None
        assert plan.ttft_s > plan.rows[0].step_s


def test_lists_that_are_not_of_layers_are_left_alone(model):
    several = model("Hunyuan-Large", eos_token_id=[127960, 127967], moe_topk=[1] * 64)
    assert several.num_weights == model("Hunyuan-Large").num_weights


def test_what_plans_do_not_know_is_refused_in_a_sentence(model, tmp_path):
    for changes, words in (
        ({"model_type": "phi4flash"}, "keep states of a fixed size"),
        ({"model_type": "alien"}, "not supported yet; supported: deepseek_v2, "),
        ({"kv_lora_rank": -1}, "kv_lora_rank = -1, not a whole number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2, which is not supported yet"),
    ):
        with pytest.raises(ModelFormatError, match=words):
            model("DeepSeek-V3", **changes)
    with pytest.raises(ModelFormatError, match="num_experts"):
        model("Hunyuan-Large", num_experts=None)
    with pytest.raises(ModelFormatError, match="differs between layers"):
        model("Hunyuan-Large", moe_topk=[1, 2])
