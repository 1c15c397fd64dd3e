"""Models that fit a device: figures, limits, the frontier, and files of the hub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants
from msgspec.structs import replace

from support.hub import Repo, hub_at
from support.tiny import write_tiny_folder, write_tiny_gguf
from twostroke.core.errors import UsageError
from twostroke.lab.planner import Device, Question, load_planned_model
from twostroke.lab.planner.fit import FitQuestion, find_candidates, nearest_text
from twostroke.lab.planner.fit_models import FitFile, KlEstimate, fit_files
from twostroke.lab.planner.planner import Planner
from twostroke.model.hub import hub as hub_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.hub import Hub

DEVICE = Device("d", 100e9, 1000e9, {"bf16": 100e12}, usd_per_hour=2.0)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    """Llama 3 8B, described by its configuration."""
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return load_planned_model(str(path))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_module, "RETRY_PAUSES_S", (0.001,))
    with hub_at(tmp_path / "hf" / "hub", monkeypatch) as hub:
        yield hub


def files_of(llama, *mean_kls):
    """Return files of 16 and 4 bits; `mean_kls` are their divergences."""
    kls = mean_kls or (0.0, 0.1)
    return [
        FitFile("l16", "BF16", llama, KlEstimate(kls[0], "x")),
        FitFile("l4", "Q4_K_M", llama.with_weights("w4a16"), KlEstimate(kls[1], "x")),
    ]


def question_of(context=2048, max_kl=None, kv_formats=("f16",), **load):
    defaults = {"prompt": 512, "output": 128, "streams": 1}
    return FitQuestion(
        load=Question(**(defaults | load)), context=context, max_kl=max_kl, kv_formats=kv_formats
    )


def test_figures_are_those_of_a_plan(llama):
    question = question_of(streams=4)
    [candidate] = find_candidates(files_of(llama)[:1], DEVICE, question)
    row = Planner(llama, DEVICE, question.load).row(4)
    assert candidate.ttft_s == row.ttft_s
    assert candidate.tpot_s == pytest.approx(row.tpot_s)
    assert candidate.tokens_per_s == pytest.approx(row.tokens_per_s)
    assert candidate.usd_per_million == pytest.approx(row.usd_per_million)
    # 8.03 G weights of 16 bits, and 131,072 bytes for each of 4 x 2,048 tokens.
    assert candidate.memory_bytes == pytest.approx(16.06e9 + 4 * 2048 * 131072, rel=0.001)
    assert candidate.mean_kl == pytest.approx(2.1e-5)


def test_fewer_bits_are_faster_and_both_are_on_the_frontier(llama):
    candidates = find_candidates(files_of(llama), DEVICE, question_of())
    assert [candidate.name for candidate in candidates] == ["l16", "l4"]
    assert all(candidate.is_best for candidate in candidates)
    assert candidates[1].tpot_s < 0.5 * candidates[0].tpot_s


def test_a_candidate_that_is_worse_in_all_respects_is_beaten(llama):
    files = files_of(llama)
    worse = replace(files[1], name="worse", kl=KlEstimate(0.2, "x"))
    candidates = find_candidates([*files, worse], DEVICE, question_of())
    assert {candidate.name: candidate.is_best for candidate in candidates} == {
        "l16": True,
        "l4": True,
        "worse": False,
    }


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"max_kl": 0.05}, {"KL": "l4"}),
        ({"tpot_s": 0.01}, {"TPOT": "l16"}),
        ({"context": 9000}, {"context": "both"}),
        ({"ttft_s": 0.01}, {"TTFT": "both"}),
    ],
)
def test_limits_are_kept(llama, limits, names):
    candidates = find_candidates(files_of(llama), DEVICE, question_of(**limits))
    [(limit, name)] = names.items()
    for candidate in candidates:
        is_excluded = name in {candidate.name, "both"}
        assert [excess.limit for excess in candidate.excesses] == [limit] * is_excluded
        assert candidate.fits is not is_excluded
    assert candidates[0].fits is (name != "both")


def test_memory_counts_every_request_at_its_full_context(llama):
    small = replace(DEVICE, memory_bytes=20e9)
    for streams, fits in ((1, True), (16, False)):
        question = question_of(context=8192, streams=streams)
        [candidate] = find_candidates(files_of(llama)[:1], small, question)
        assert candidate.fits is fits
    assert nearest_text([candidate]).startswith(
        "the nearest is l16 (BF16, keys and values f16): it needs 33.2 GB, and 18.0 GB are there"
    )
    half = question_of(context=8192, streams=16, kv_formats=("int8",))
    [candidate] = find_candidates(files_of(llama)[:1], small, half)
    assert candidate.memory_bytes == pytest.approx(16.06e9 + 16 * 8192 * 66560, rel=0.001)


def test_the_nearest_candidate_misses_least(llama):
    candidates = find_candidates(files_of(llama), DEVICE, question_of(tpot_s=0.001))
    assert not candidates[0].fits
    assert "l4" in nearest_text(candidates)
    assert "times the objective" in nearest_text(candidates)


def test_an_unknown_divergence_keeps_to_no_budget(llama):
    unknown = FitFile("u", "Q9_X", llama, None)
    [candidate] = find_candidates([unknown], DEVICE, question_of(max_kl=1.0))
    assert [excess.text for excess in candidate.excesses] == ["the KL of Q9_X is not known"]
    [candidate] = find_candidates([unknown], DEVICE, question_of())
    assert candidate.fits


def test_a_draft_model_gains_time_and_takes_memory(llama):
    [file] = files_of(llama)[:1]
    draft_model = llama.with_weights("w4a16")
    with_draft = replace(file, draft="small", draft_model=draft_model)
    alone, drafted = sorted(
        find_candidates([with_draft], DEVICE, question_of()), key=lambda c: bool(c.draft)
    )
    assert drafted.draft == "small"
    assert drafted.memory_bytes > alone.memory_bytes + draft_model.all_bytes
    # 4 rows cost a memory-bound step as much as one; 3 drafts of 4 bits cost about 0.9 steps, and
    # a round has 2.53 tokens.
    assert drafted.tpot_s == pytest.approx(alone.tpot_s * 1.9 / 2.533, rel=0.1)
    assert drafted.ttft_s > alone.ttft_s


def test_a_context_below_the_requests_is_refused():
    with pytest.raises(UsageError, match="must be at least 640, the prompt and the output"):
        question_of(context=600)


def test_files_of_the_hub_are_read_from_one_header(hub, tmp_path):
    content = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    hub.repos["someone/tiny"] = Repo(
        {
            "tiny-Q4_K_M.gguf": content + bytes(len(content)),
            "tiny-Q8_0.gguf": content + bytes(3 * len(content)),
            "mmproj-tiny.gguf": content,
        }
    )
    files, unread = fit_files(["hf:someone/tiny", "hf:someone/nothing"])
    assert [file.label for file in files] == ["Q4_K_M", "Q8_0"]
    assert [file.name for file in files] == [
        "hf:someone/tiny:tiny-Q4_K_M.gguf",
        "hf:someone/tiny:tiny-Q8_0.gguf",
    ]
    assert files[1].model.all_bytes == pytest.approx(2 * files[0].model.all_bytes, rel=0.01)
    assert files[0].kl is not None
    assert [model.name for model in unread] == ["hf:someone/nothing"]
    assert {transfer.path for transfer in hub.transfers} == {hub.transfers[0].path}
    [file] = fit_files(["hf:someone/tiny:Q8_0"])[0]
    assert file.label == "Q8_0"


def test_a_folder_as_published_loses_nothing(hub, tmp_path):
    folder = write_tiny_folder(tmp_path / "folder")
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repos["someone/folder"] = Repo(content)
    [file] = fit_files(["hf:someone/folder"])[0]
    assert file.kl == KlEstimate(0.0, "weights as published")
    assert not file.is_here


def test_a_file_here_has_its_report(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny-Q4_0.gguf")
    [file] = fit_files([str(path)], read_kl=lambda _path: 0.25)[0]
    assert file.kl == KlEstimate(0.25, "the file's own report")
    assert file.is_here


def test_a_hub_that_is_away_is_asked_once(hub, monkeypatch, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    notices = []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    names = ["hf:a/b", "hf:c/d", str(path)]
    files, unread = fit_files(names, notice=notices.append)
    assert [model.name for model in unread] == ["hf:a/b", "hf:c/d"]
    assert len({model.reason for model in unread}) == 1
    assert notices == ["hf:a/b", str(path)]
    assert len(files) == 1
