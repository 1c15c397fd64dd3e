"""Mixes have the formats that other programs give the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.tiny import write_tiny_gguf
from twostroke.compress.grids import GRIDS
from twostroke.compress.mixes import MIXES, fitting, formats_of
from twostroke.engine.loading import load
from twostroke.models import build_program
from twostroke.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.quant import QuantTensor


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
        found = FORMATS[fitting(name, 32)]
        assert found.block_size <= 32
        assert found.bits_per_value >= FORMATS[name].bits_per_value
    found = formats(tiny, "q4_k_m")
    assert found["token_embd.weight"] == "Q8_0"
    assert found["blk.0.attn_q.weight"] == "Q5_0"


def test_each_matrix_has_a_format_that_holds_it(tiny: str) -> None:
    tensors: Mapping[str, QuantTensor] = load(tiny).tensors
    for target in MIXES:
        for key, name in formats(tiny, target).items():
            assert tensors[key].shape[-1] % FORMATS[name].block_size == 0
