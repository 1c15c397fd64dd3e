"""Mixes such as Q4_K_M have the formats that other programs expect under these names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.errors import TwostrokeError
from twostroke.core.json_io import read_json
from twostroke.lab.compress.allocate import QuantizationGoal
from twostroke.lab.compress.grids import GRIDS
from twostroke.lab.compress.mixes import FLOATS, MIXES, float_format, format_for_width, formats_of
from twostroke.lab.compress.quantize import quantize
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The path of a tiny model."""
    return str(write_tiny_gguf(tmp_path / "tiny.gguf"))


def formats(model: str, target: str) -> Mapping[str, str]:
    source = load(model)
    return formats_of(build_program(source.spec), source.tensors, MIXES[target])


def test_medium_mixes_are_finer_at_both_ends_and_in_each_third_layer() -> None:
    mix = MIXES["q4_k_m"]
    assert [i for i in range(30) if mix.is_finer(i, 30)] == [
        *(0, 1, 2),
        *(5, 8, 11, 14, 17, 20, 23),
        *(26, 27, 28, 29),
    ]
    assert [i for i in range(30) if MIXES["q4_k_s"].is_finer(i, 30)] == [0, 1, 2]
    assert not any(MIXES["q5_k_s"].is_finer(i, 30) for i in range(30))


def test_rows_that_fill_no_super_block_have_the_next_larger_format(tiny: str) -> None:
    for name in GRIDS:
        chosen_formats = FORMATS[format_for_width(name, 32)]
        assert chosen_formats.block_size <= 32
        assert chosen_formats.bits_per_value >= FORMATS[name].bits_per_value
    chosen_formats = formats(tiny, "q4_k_m")
    assert chosen_formats["token_embd.weight"] == "Q8_0"
    assert chosen_formats["blk.0.attn_q.weight"] == "Q5_0"


def test_each_matrix_has_a_format_that_holds_it(tiny: str) -> None:
    tensors: Mapping[str, QuantTensor] = load(tiny).tensors
    for target in MIXES:
        for key, name in formats(tiny, target).items():
            assert tensors[key].shape[-1] % FORMATS[name].block_size == 0


TEXT = "Water runs down hills, and stones stay. " * 200

pytestmark = pytest.mark.usefixtures("few_questions")
ODD = {"ffn_size": 172}  # rows that fill no blocks of 32


def odd_model(path: Path, fmt: str = "F32") -> Path:
    return write_tiny_gguf(path, replace(Tiny(), fmt=fmt, **ODD))


@pytest.mark.parametrize("target", [name for name in MIXES if MIXES[name].layers in GRIDS])
@pytest.mark.parametrize(("source", "expected"), [("F32", "F16"), ("F16", "F16"), ("BF16", "BF16")])
def test_rows_that_fill_no_block_stay_floats(
    target: str, source: str, expected: str, tmp_path: Path
) -> None:
    chosen_formats = formats(str(odd_model(tmp_path / "odd.gguf", source)), target)
    assert {chosen_formats[f"blk.{layer}.ffn_down.weight"] for layer in range(2)} == {expected}
    assert {name for name in chosen_formats.values() if name in FLOATS} == {expected}
    assert sum(name in FLOATS for name in chosen_formats.values()) == 2


def test_values_beyond_float16_stay_as_they_are() -> None:
    large = np.full((2, 4), 1e5, np.float32)
    assert float_format(QuantTensor.from_floats(large, FORMATS["F32"])) == "F32"
    assert float_format(QuantTensor.from_floats(large / 2, FORMATS["F32"])) == "F16"


@pytest.mark.parametrize("target", ["q4_k_m", QuantizationGoal(bits=5.0)])
def test_a_file_with_an_odd_matrix_is_written_and_names_it(
    target: str | QuantizationGoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    notices: list[str] = []
    out = tmp_path / "small.gguf"
    quantize(
        str(odd_model(tmp_path / "odd.gguf")),
        target,
        out,
        text=TEXT,
        num_tokens=1024,
        notice=notices.append,
    )
    assert any("blk.0.ffn_down.weight and 1 more have rows" in line for line in notices)
    tensors = load(str(out)).tensors
    assert tensors["blk.1.ffn_down.weight"].format.name == "F16"
    assert tensors["blk.1.ffn_up.weight"].format.name not in FLOATS


def test_a_folder_with_an_odd_matrix_is_written_and_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    notices: list[str] = []
    source, out = odd_model(tmp_path / "odd.gguf"), tmp_path / "out"
    report = quantize(str(source), "w4a16", out, text=TEXT, num_tokens=1024, notice=notices.append)
    assert report.comparison.mean_kl < 0.3  # of random weights
    config = read_json(out / "config.json")["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))]
    assert load(str(out)).tensors["blk.0.ffn_down.weight"].format.name == "BF16"
    assert any("blk.0.ffn_down.weight and 1 more have rows" in line for line in notices)


def test_a_model_without_any_fitting_matrix_is_refused(tmp_path: Path) -> None:
    tiny = replace(Tiny(), hidden_size=48, ffn_size=172, num_heads=3, num_kv_heads=3, head_dim=16)
    source = write_tiny_gguf(tmp_path / "odd.gguf", tiny)
    with pytest.raises(TwostrokeError, match="no matrix could get smaller"):
        quantize(
            str(source),
            "q4_0",
            tmp_path / "out.gguf",
            text=TEXT,
            num_tokens=1024,
            notice=lambda _: None,
        )
