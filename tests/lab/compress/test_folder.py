"""compressed-tensors folders (w4a16, w8a16): read back, they have the same tokens and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.tiny import tiny_of, write_tiny_folder, write_tiny_gguf
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.json_io import read_json
from twostroke.lab.compress.quantize import quantize
from twostroke.lab.compress.report import load_report
from twostroke.lab.measure.compare import held_out_text
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.lab.compress.report import FileReport

TEXT = "Water runs down hills, and stones stay. " * 200

pytestmark = pytest.mark.usefixtures("few_questions")


def folder_of(source: Path, target: str, out: Path) -> FileReport:
    return quantize(str(source), target, out, text=TEXT, num_tokens=1024, notice=lambda _: None)


def test_folders_answer_as_their_sources_do(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3", "ernie4.5"):
        tiny = tiny_of(family)
        folder = write_tiny_folder(tmp_path / family, tiny)
        file = write_tiny_gguf(tmp_path / f"{family}.gguf", tiny)
        for source in (folder,) if family == "ernie4.5" else (folder, file):
            out = tmp_path / f"{source.name} w8a16"
            report = folder_of(source, "w8a16", out)
            assert report.comparison.mean_kl < 2e-3  # rows of queries and keys have their order
            assert 8 < report.bits <= 8.5
            assert load_report(str(out)) == report
            first, second = (build_tokenizer(load(str(each))) for each in (source, out))
            assert first.encode(held_out_text()) == second.encode(held_out_text())
            config = read_json(out / "config.json")
            assert config["quantization_config"]["quant_method"] == "compressed-tensors"
            names = {path.name for path in out.iterdir()}
            assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names


def test_four_bits_are_a_group_each(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "tiny")
    report = folder_of(source, "w4a16", tmp_path / "out")
    formats = {kind.formats for kind in report.kinds}
    (group,) = {f"INT4_G{size}_BF16_Z" for size in (128, 64, 32)} & formats
    groups = read_json(tmp_path / "out" / "config.json")["quantization_config"]["config_groups"]
    assert f"_G{groups['group_0']['weights']['group_size']}_" in group


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("gemma3"))
    with pytest.raises(TwostrokeError, match="only plain models of llama, qwen2, qwen3"):
        folder_of(file, "w4a16", tmp_path / "out")
    (tmp_path / "full").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        folder_of(file, "w4a16", tmp_path / "full")
    with pytest.raises(UsageError, match="tuning_minutes is for GGUF files"):
        quantize(
            str(file),
            "w4a16",
            tmp_path / "out",
            text=TEXT,
            num_tokens=1024,
            notice=print,
            tuning_minutes=1,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "tiny.gguf"]
