"""Training of heads, on a tiny model: short, and whole from prompts to guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.native import native_dir
from support.tiny import Tiny, write_tiny_gguf
from twostroke import LLM, SamplingParams
from twostroke.core.errors import UsageError
from twostroke.core.options import EngineOptions, SpeculationOptions
from twostroke.lab.train import TrainOptions
from twostroke.model.weights import load_heads, load_path

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.oracle

SHORT = TrainOptions(
    num_tokens=600,
    minutes=0.03,
    vocab_size=200,
    depth=3,
    window=32,
    ffn_size=64,
    learning_rate=3e-3,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_dir()
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_trained_heads_guess_and_change_nothing(model: Path, tmp_path: Path, kind: str) -> None:
    from twostroke.lab.train.run import train_heads

    lines: list[str] = []
    train_heads(str(model), tmp_path, replace(SHORT, kind=kind), lines.append)
    assert any(line.startswith("answers: ") for line in lines)
    assert lines[-1].startswith("held out: ")
    facts = load_heads(tmp_path).facts
    assert f"held out: {facts.accepted[0]:.0%}, " in lines[-1]
    assert facts.spec.kind == kind
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(str(model), EngineOptions(speculation=SpeculationOptions("off"))) as llm:
        plain = llm.generate("the world is", params)[0][0].token_ids
    guessing = SpeculationOptions(kind, heads=str(tmp_path), count=3)
    with LLM(str(model), EngineOptions(speculation=guessing)) as llm:
        [[answer]] = llm.generate("the world is", params)
        assert answer.token_ids == plain
        assert answer.usage.accepted_tokens > 0


def test_training_goes_on_where_it_was_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.lab.train import learn, run

    steps: list[int] = []
    step = learn.HeadTrainer._step

    def stop_soon(learner: learn.HeadTrainer, rows: object) -> None:
        step(learner, rows)  # type: ignore[arg-type]
        steps.append(learner.descent.num_steps)
        if len(steps) in {5, 10}:
            raise KeyboardInterrupt

    monkeypatch.setattr(learn.HeadTrainer, "_step", stop_soon)
    options = replace(SHORT, minutes=10.0)
    message = r"heads so far are in .* Run the same command to continue"
    with pytest.raises(KeyboardInterrupt, match=message):
        run.train_heads(str(model), tmp_path, options, lambda _: None)
    first = load_heads(tmp_path)
    file_times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "answers").iterdir()}
    with pytest.raises(KeyboardInterrupt, match=message):
        run.train_heads(str(model), tmp_path, options, lambda _: None)
    assert steps == list(range(1, 11))
    assert load_heads(tmp_path).facts.token_ids == first.facts.token_ids
    later_times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "answers").iterdir()}
    assert later_times == file_times
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_a_folder_of_other_heads_is_refused(model: Path, tmp_path: Path) -> None:
    from twostroke.lab.train.run import train_heads

    options = replace(SHORT, minutes=0.001)
    train_heads(str(model), tmp_path / "heads", options, lambda _: None)
    with pytest.raises(UsageError, match=r"another model or with other options"):
        train_heads(str(model), tmp_path / "heads", replace(options, depth=2), lambda _: None)
    other = write_tiny_gguf(tmp_path / "other.gguf", Tiny(seed=5))
    with pytest.raises(UsageError, match=r"another model or with other options"):
        train_heads(str(other), tmp_path / "heads", options, lambda _: None)
    (tmp_path / "heads" / "checkpoint.json").write_text("{")
    with pytest.raises(UsageError, match=r"Delete it to start again"):
        train_heads(str(model), tmp_path / "heads", options, lambda _: None)


def test_prompts_come_from_a_file(model: Path, tmp_path: Path) -> None:
    from twostroke.lab.train.run import train_heads

    file = tmp_path / "prompts.txt"
    options = replace(SHORT, minutes=0.001, data=str(file))
    with pytest.raises(UsageError, match=r"prompts.txt cannot be read: No such file"):
        train_heads(str(model), tmp_path / "heads", options, lambda _: None)
    file.write_text('What is the world?\n\n{"prompt": "the world is"}\n')
    with pytest.raises(UsageError, match=r"too few prompts for 600 tokens of answers"):
        train_heads(str(model), tmp_path / "heads", options, lambda _: None)
    file.write_text('{"text": "the world is"}\n')
    with pytest.raises(UsageError, match=r'line 1 is not an object with a "prompt"'):
        train_heads(str(model), tmp_path / "others", options, lambda _: None)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_unrolled_heads_are_what_the_engine_runs(model: Path, kind: str) -> None:
    """What is learned at each depth is what the reference backend computes when it guesses."""
    import torch

    from twostroke.backends.reference import ReferenceBackend
    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan
    from twostroke.lab.train.unroll import TrainingBatch, unroll
    from twostroke.model.families.heads import NUMBERS, TABLE, build_heads, heads_for, last_hidden
    from twostroke.model.quant import FORMATS, QuantTensor
    from twostroke.model.weights.heads import numbers_table

    loaded, length, depth = load_path(model), 7, 3
    spec = heads_for(loaded.spec, kind, num_tokens=50, depth=depth, ffn_size=64, window=32)
    program = build_heads(spec)
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in program.weight_shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) / 4
        tensors[name] = QuantTensor.from_floats(values, FORMATS["F32"])
    tensors[TABLE] = loaded.tensors[TABLE]
    tensors[NUMBERS] = numbers_table(depth)
    weights = {n: torch.from_numpy(tensors[n].dequantize()) for n in program.weight_shapes}
    tokens = rng.integers(0, 200, length)
    hidden = rng.standard_normal((length, loaded.spec.hidden_size)).astype(np.float32)
    batch = TrainingBatch(
        torch.from_numpy(tokens)[None], torch.from_numpy(hidden)[None], torch.ones(1, length) > 0
    )
    unrolled = [logits for logits, _ in unroll(spec, program, weights, batch)]
    backend = ReferenceBackend(program, tensors, 4, 16, tapped_value=last_hidden(program))
    for start in range(length - depth + 1):  # the newest token's place
        params = SamplingParams(temperature=0, logprobs=0)
        request = Request("r", [int(t) for t in tokens[: start + 1]], 0, params, 0, pages=[[0, 1]])
        if kind == "medusa":
            request.tokens = [0]
            piece = Slice(request, 0, 1, samples=True, drafts=tuple(range(1, depth)))
            external_rows = np.repeat(hidden[start : start + 1], depth, axis=0)
            drawn_tokens = backend.run(StepPlan((piece,), external=external_rows)).tokens
        else:
            drawn_tokens, external_rows = [], hidden[: start + 1]
            for at in range(depth):
                first = start + at if at else 0
                piece = Slice(request, first, start + 1 + at - first, samples=True)
                result = backend.run(StepPlan((piece,), external=external_rows))
                drawn_tokens += result.tokens
                external_rows = result.hidden
                if at + 1 < depth:
                    request.tokens.append(int(tokens[start + 1 + at]))
        # Rows of depth d begin at row d.
        expected = [int(unrolled[at][start].argmax()) for at in range(depth)]
        assert drawn_tokens == expected
