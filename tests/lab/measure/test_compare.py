"""Comparing backends, formats and models on a text, by the functions that the command calls."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.lab.measure.compare import ComparedModel, compare_models, held_out_text, pieces_of
from twostroke.model.loader import build_tokenizer, load


@pytest.fixture(autouse=True)
def level_with_one_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a level other than AMX, which would have a second report for generated rows."""
    monkeypatch.setenv("TWOSTROKE_CPU_LEVEL", "portable")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(write_tiny_gguf(tmp_path / "tiny.gguf", Tiny()))


def subject(model: str, backend: str = "reference") -> ComparedModel:
    return ComparedModel(model, ComputeOptions(backend), CacheOptions())


def silent(name: str) -> None:
    del name


def test_the_text_is_cut_into_pieces_of_which_none_is_a_single_token(tiny: str) -> None:
    pieces = pieces_of(held_out_text(), [tiny], 100, 301)
    assert [len(piece) for piece in pieces] == [100, 100, 100]
    uncut = pieces_of(held_out_text(), [tiny], 10**6, None)
    assert len(uncut) == 1
    assert len(uncut[0]) > 2000
    assert uncut[0][:300] == [token for piece in pieces for token in piece]


def test_each_piece_begins_as_prompts_of_the_model_do(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_bos_token": True}
    model = str(write_tiny_gguf(tmp_path / "begins.gguf", metadata=extra))
    tokenizer = build_tokenizer(load(model))
    (begin,), text = tokenizer.prefix_ids, tokenizer.encode(held_out_text())
    pieces = pieces_of(held_out_text(), [model], 100, 298)
    assert pieces == [[begin, *text[start : start + 99]] for start in (0, 99, 198)]


def test_a_full_disk_is_said_with_what_is_needed(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> BinaryIO:
        return Path("/dev/full").open("w+b", 0)

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    pieces = pieces_of(held_out_text(), [tiny], 100, 100)
    with pytest.raises(TwostrokeError, match=r"need \d+ MB in .* Set TMPDIR"):
        list(compare_models(subject(tiny), [subject(tiny)], pieces, silent))


def test_logits_that_are_no_numbers_are_said_and_not_compared(tiny: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    content = Path(tiny).read_bytes()
    damaged.write_bytes(content[:-256] + np.full(64, np.inf, np.float32).tobytes())
    pieces = pieces_of(held_out_text(), [tiny], 20, 20)
    for right, other in ((str(damaged), tiny), (tiny, str(damaged))):
        with pytest.raises(TwostrokeError, match="not finite"):
            list(compare_models(subject(right), [subject(other)], pieces, silent))


def test_a_model_compared_with_itself_differs_in_nothing(tiny: str) -> None:
    pieces = pieces_of(held_out_text(), [tiny], 64, 150)
    (report,) = compare_models(subject(tiny), [subject(tiny)], pieces, silent)
    assert report.comparison.mean_kl == 0
    assert report.comparison.top1_agreement == 1
    assert report.comparison.num_rows == 150
    assert report.drift == (0, 0)
    assert report.is_within_limits


def test_another_format_of_the_same_weights_drifts_and_is_beyond_the_limits(
    tiny: str, tmp_path: Path
) -> None:
    coarse = str(write_tiny_gguf(tmp_path / "coarse.gguf", Tiny(fmt="Q4_0")))
    pieces = pieces_of(held_out_text(), [coarse, tiny], 64, 192)
    subjects = [subject(coarse), subject(coarse, "cpu")]
    reports = list(compare_models(subject(tiny), subjects, pieces, silent))
    for report in reports:
        assert report.comparison.mean_kl > 1e-3
        assert not report.is_within_limits
        assert len(report.drift) == 2
        assert all(0.001 < drift < 1 for drift in report.drift)
    exact, cpu = reports
    assert cpu.comparison.mean_kl == pytest.approx(exact.comparison.mean_kl, rel=0.1)


def test_layers_that_are_not_alike_have_no_drift(tiny: str, tmp_path: Path) -> None:
    deeper = str(write_tiny_gguf(tmp_path / "deeper.gguf", Tiny(num_layers=3)))
    pieces = pieces_of(held_out_text(), [deeper, tiny], 64, 64)
    (report,) = compare_models(subject(tiny), [subject(deeper)], pieces, silent)
    assert report.drift == ()


def test_a_text_of_one_token_is_refused(tiny: str) -> None:
    with pytest.raises(UsageError, match="The text has 1 token, and at least 2"):
        pieces_of("x", [tiny], 64, None)


def test_pieces_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    short = str(write_tiny_gguf(tmp_path / "short.gguf", Tiny(context_length=32)))
    pieces = pieces_of(held_out_text(), [short], 64, 64)
    with pytest.raises(UsageError, match=r"Pieces of 64 tokens .* of 32: lower --length"):
        list(compare_models(subject(short), [subject(short)], pieces, silent))


@pytest.mark.usefixtures("patient_ranks")
def test_several_ranks_differ_from_the_reference_as_one_process_does(tiny: str) -> None:
    pieces = pieces_of(held_out_text(), [tiny], 40, 80)
    compute = ComputeOptions("cpu", num_threads=2)
    meshes = [ParallelOptions(), ParallelOptions(tensor=2), ParallelOptions(pipeline=2, context=2)]
    subjects = [ComparedModel(tiny, compute, CacheOptions(), mesh) for mesh in meshes]
    alone, *divided = compare_models(subject(tiny), subjects, pieces, silent)
    assert "4 ranks" in divided[1].name
    for report in divided:
        assert report.comparison == alone.comparison
        assert report.drift == alone.drift
