"""Training data of draft heads: prompts, and recorded answers with hidden states in a folder."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.native import native_dir
from support.tiny import write_tiny_gguf
from twostroke import SamplingParams
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.options import ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.engine.engine import build
from twostroke.lab.train import TrainOptions
from twostroke.lab.train.answers import collect
from twostroke.lab.train.prompts import prompts
from twostroke.lab.train.record import AnswerStore, RecordedAnswer, Recorder, load_answers
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_prompts_are_many_and_the_same_each_time() -> None:
    some = list(islice(prompts(1, chat=True), 2000))
    assert some == list(islice(prompts(1, chat=True), 2000))
    assert some != list(islice(prompts(2, chat=True), 2000))
    assert len({prompt.text for prompt in some}) > 1500
    assert all(prompt.text.strip() and "{" + "}" not in prompt.text[:3] for prompt in some)
    assert 0.6 < sum(prompt.is_chat for prompt in some) / len(some) < 0.8


def test_models_that_cannot_chat_get_texts_to_go_on_with() -> None:
    assert not any(prompt.is_chat for prompt in islice(prompts(1, chat=False), 200))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("method", ["off", "ngram"])
def test_recorded_states_are_those_that_sampled_the_tokens(
    model: Path, backend: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "cpu":
        native_dir()
        monkeypatch.setenv("TWOSTROKE_CPU_LEVEL", "portable")  # the prompt is traced as generated
    answers: list[RecordedAnswer] = []
    options = EngineOptions(
        ComputeOptions(backend, num_threads=1),
        speculation=SpeculationOptions(method, count=3 if method == "ngram" else None),
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = list(range(30, 50))
    with build(str(model), options, watcher=Recorder(answers.append)) as engine:
        [generation] = engine.client.generate(prompt, params).wait()
        assert (generation.usage.accepted_tokens > 0) == (method == "ngram")
    with build(str(model), options) as engine:
        backend_of = engine.client.loop._backend
        program = engine.card.cost.program
        name = program.layer_outputs[-1]
        traced = backend_of.trace([*prompt, *generation.token_ids], [name], generated=True)[name]
    [answer] = answers
    assert answer.tokens.tolist() == [prompt[-1], *generation.token_ids]
    expected = traced[len(prompt) - 1 : -1]
    expected = expected / np.sqrt(np.mean(expected**2, axis=1, keepdims=True))
    np.testing.assert_allclose(answer.hidden, expected, atol=2e-3)


def test_answers_are_kept_and_added_to(model: Path, tmp_path: Path) -> None:
    native_dir()
    spec, options = load_path(model).spec, TrainOptions(num_tokens=500)
    lines: list[str] = []
    first = collect(str(model), spec, tmp_path, options, lines.append)
    assert sum(map(len, first)) >= 500
    assert lines
    second = collect(str(model), spec, tmp_path, options, lambda _: pytest.fail("nothing is new"))
    assert [a.tokens.tolist() for a in second] == [a.tokens.tolist() for a in first]
    third = collect(str(model), spec, tmp_path, replace(options, num_tokens=1500), lines.append)
    assert [a.tokens.tolist() for a in third[: len(first)]] == [a.tokens.tolist() for a in first]
    assert sum(map(len, third)) >= 1500


def test_damaged_answers_are_refused(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, 0)
    store.add(RecordedAnswer(np.arange(4, dtype=np.int32), np.ones((3, 8), np.float16)))
    store.flush()
    [answer] = load_answers(tmp_path, 8)
    assert answer.tokens.tolist() == [0, 1, 2, 3]
    assert answer.hidden.shape == (3, 8)
    with pytest.raises(UsageError, match=r"is damaged, or of another model: delete"):
        load_answers(tmp_path, 16)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = AnswerStore(tmp_path / "file", 0)
    store.add(RecordedAnswer(np.arange(4, dtype=np.int32), np.ones((3, 8), np.float16)))
    with pytest.raises(TwostrokeError, match=r"Answers cannot be written to"):
        store.flush()


def test_a_disk_that_is_full_ends_the_collecting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_dir()
    monkeypatch.setitem(AnswerStore.add.__globals__, "_PART_ROWS", 100)  # which `collect` uses
    (tmp_path / "file").write_text("")
    spec, lines = load_path(model).spec, list[str]()

    def report(line: str) -> None:
        lines.append(line)
        assert len(lines) < 10, "it answers on and on, and keeps nothing"

    with pytest.raises(TwostrokeError, match=r"Answers cannot be written to"):
        collect(str(model), spec, tmp_path / "file", TrainOptions(num_tokens=5000), report)


def test_it_says_how_far_it_is_some_fifty_times(model: Path, tmp_path: Path) -> None:
    native_dir()
    spec, lines = load_path(model).spec, list[str]()
    collect(str(model), spec, tmp_path, TrainOptions(num_tokens=2000), lines.append)
    counts = [int(line.split()[1].replace(",", "")) for line in lines]
    assert 0 < len(counts) <= 50
    assert counts[-1] >= 2000
    steps = [later - sooner for sooner, later in zip([0, *counts[:-2]], counts[:-1], strict=True)]
    assert min(steps) >= 40


def test_options_out_of_range_are_refused() -> None:
    for name, wrong, message in (
        ("kind", "hydra", "kind must be one of eagle, medusa"),
        ("depth", 17, "depth must be from 1 to 16, got 17"),
        ("num_tokens", 0, "num_tokens must be at least 1, got 0"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("minutes", 0, "minutes must be a finite number above 0, got 0"),
        ("learning_rate", float("inf"), "learning_rate must be a finite number above 0, got inf"),
    ):
        with pytest.raises(UsageError, match=message):
            TrainOptions(**{name: wrong})  # type: ignore[arg-type]
