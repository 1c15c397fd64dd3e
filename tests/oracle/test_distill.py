"""Distillation on tiny models: short, and whole from prompts to a file that runs."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from support.tiny import tiny_of, write_tiny_gguf
from twostroke import LLM, SamplingParams
from twostroke.core.errors import QualityError, TwostrokeError, UsageError
from twostroke.core.files import exclusive_output
from twostroke.lab.train.options import DistillOptions, StudentShape
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.quant.floats import SCALE_OFFSETS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.oracle

SHORT = DistillOptions(num_tokens=6000, minutes=0.2, length=64, learning_rate=5e-4)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def teacher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    return write_tiny_gguf(folder / "teacher.gguf", tiny_of(request.param, num_layers=6))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock take a tenth of a second, on any machine."""
    ticks = count()
    ours = SimpleNamespace(monotonic=lambda: next(ticks) / 10)
    monkeypatch.setattr("twostroke.lab.train.descent.time", ours)


def loss_of(line: str) -> float:
    """Return the KL divergence of a line such as "before: held out: KL ... 1.234, ..."."""
    return float(line.split("teacher ")[1].split(",", maxsplit=1)[0])


def test_a_shorter_model_learns_from_the_whole(teacher: Path, tmp_path: Path) -> None:
    from twostroke.lab.compress.distill import distill

    lines: list[str] = []
    path = distill(str(teacher), StudentShape(4), tmp_path, SHORT, lines.append)
    (before,) = (line for line in lines if line.startswith("before: "))
    assert loss_of(lines[-1]) < 0.95 * loss_of(before)
    spec = load(str(path)).spec
    whole_spec = load(str(teacher)).spec
    assert spec.num_layers == 4
    assert replace(spec, name=whole_spec.name, num_layers=6, window=whole_spec.window) == whole_spec
    with LLM(str(path)) as llm:
        assert llm.generate("the world", SamplingParams(max_tokens=4, ignore_eos=True))


def test_layers_that_do_nothing_are_left_out(tmp_path: Path) -> None:
    from twostroke.lab.train.shorten import choose_layers, names_in_full_model, shortened

    path = write_tiny_gguf(tmp_path / "teacher.gguf", tiny_of("llama", num_layers=6, fmt="F32"))
    loaded = load(str(path))
    tensors = dict(loaded.tensors)
    for layer in (1, 4):  # they add nothing
        for name in ("attn_output", "ffn_down"):
            key = f"blk.{layer}.{name}.weight"
            zeros = np.zeros(tensors[key].shape, np.float32)
            tensors[key] = type(tensors[key]).from_floats(zeros, tensors[key].format)
    kept_layers = choose_layers(loaded.spec, tensors, [[5, 9, 3, 7] * 8], 4, lambda _: None)
    assert kept_layers == [0, 2, 3, 5]
    names = dict(
        names_in_full_model(
            list(build_program(shortened(loaded.spec, kept_layers)).weight_shapes), kept_layers
        )
    )
    assert names["blk.3.ffn_up.weight"] == "blk.5.ffn_up.weight"
    assert names["output_norm.weight"] == "output_norm.weight"


def test_layers_without_rope_at_fixed_places_cannot_be_removed(tmp_path: Path) -> None:
    from twostroke.lab.compress.distill import distill

    teacher = write_tiny_gguf(tmp_path / "teacher.gguf", tiny_of("smollm3"))
    with pytest.raises(UsageError, match="have layers without RoPE at fixed places"):
        distill(str(teacher), StudentShape(3), tmp_path / "out", SHORT, print)


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
def test_what_stands_before_a_layer_need_not_be_computed_again(tmp_path: Path, family: str) -> None:
    from twostroke.backends.torch import TorchModel
    from twostroke.lab.train.shorten import _ShortenedModel

    loaded = load(str(write_tiny_gguf(tmp_path / "whole.gguf", tiny_of(family, num_layers=4))))
    model = TorchModel(build_program(loaded.spec), loaded.tensors)
    texts = [[5, 9, 3, 7] * 4, [8, 2, 6]]
    states = _ShortenedModel(model, loaded.spec, texts, [0, 1, 3]).states()
    for at, rest in enumerate(([1, 3], [0, 3], [0, 1])):
        cut = _ShortenedModel(model, loaded.spec, texts, rest)
        all_logprobs, later = cut.log_probabilities(), cut.log_probabilities(at, states[at])
        assert np.allclose(all_logprobs.numpy(), later.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_what_adds_nothing_is_cut_and_nothing_changes(tmp_path: Path, family: str) -> None:
    from twostroke.backends.torch import TorchModel
    from twostroke.lab.train.narrow import choose_widths

    tiny = tiny_of(family, num_heads=6, num_kv_heads=3, ffn_size=96, fmt="F32")
    loaded = load(str(write_tiny_gguf(tmp_path / "whole.gguf", tiny)))
    spec, tensors, rng = loaded.spec, dict(loaded.tensors), np.random.default_rng(1)
    left, idle = {}, {}
    for layer in range(spec.num_layers):
        left[layer] = int(rng.integers(3))
        idle[layer] = set(rng.choice(96, 64, replace=False).tolist())
        for name, columns in (
            (
                "attn_output",
                range(left[layer] * 2 * spec.head_dim, (left[layer] + 1) * 2 * spec.head_dim),
            ),
            ("ffn_down", idle[layer]),
        ):
            key = f"blk.{layer}.{name}.weight"
            values = tensors[key].dequantize()
            values[:, list(columns)] = 0
            tensors[key] = QuantTensor.from_floats(values, FORMATS["F32"])
    widths = choose_widths(spec, tensors, [[5, 9, 3, 7] * 4, [8, 2, 6]], 2, 32)
    for layer in range(spec.num_layers):
        assert left[layer] not in widths.groups[layer]
        assert not idle[layer].intersection(widths.channels[layer])
    tokens = torch.tensor([7, 3, 11, 2, 9])
    whole_model = TorchModel(build_program(spec), tensors)
    narrow = TorchModel(build_program(widths.narrowed(spec)), widths.cut(spec, tensors))
    assert narrow.weights["blk.1.attn_q.weight"].shape == (4 * spec.head_dim, spec.hidden_size)
    right, narrow_logits = (model.values(tokens)["logits"] for model in (whole_model, narrow))
    assert np.allclose(right.detach().numpy(), narrow_logits.detach().numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2"])
def test_a_narrower_model_learns_from_the_whole(tmp_path: Path, family: str) -> None:
    from twostroke.lab.compress.distill import distill

    tiny = tiny_of(family, num_layers=4, num_heads=4, num_kv_heads=2)
    teacher = write_tiny_gguf(tmp_path / "teacher.gguf", tiny)
    (tmp_path / "shape.yaml").write_text("layers: 3\nkv_heads: 1\nfeed_forward: 64\n")
    shape = StudentShape.read(tmp_path / "shape.yaml")
    lines: list[str] = []
    path = distill(str(teacher), shape, tmp_path / "out", SHORT, lines.append)
    (before,) = (line for line in lines if line.startswith("before: "))
    assert loss_of(lines[-1]) < 0.95 * loss_of(before)
    spec = load(str(path)).spec
    sizes = (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.ffn_size, spec.head_dim)
    assert sizes == (3, 2, 1, 64, tiny.head_dim)
    with LLM(str(path)) as llm:
        assert llm.generate("the world", SamplingParams(max_tokens=4, ignore_eos=True))
    lines.clear()
    distill(str(teacher), shape, tmp_path / "out", SHORT, lines.append)
    assert not any("remain" in line for line in lines)  # chosen once
    with pytest.raises(UsageError, match="another model or with other options"):
        distill(str(teacher), StudentShape(3, 1), tmp_path / "out", SHORT, lines.append)


def test_a_student_with_other_tokens_learns_the_text(tmp_path: Path) -> None:
    from twostroke.lab.compress.distill import distill

    teacher = write_tiny_gguf(tmp_path / "teacher.gguf", tiny_of("llama", num_layers=6))
    student = write_tiny_gguf(tmp_path / "own.gguf", tiny_of("qwen2", num_layers=2))
    lines: list[str] = []
    path = distill(str(teacher), str(student), tmp_path / "out", SHORT, lines.append)
    assert load(str(path)).spec.num_layers == 2
    assert "held out: " in lines[-1]


def stopping_after(*counts: int, steps: list[int] | None = None) -> Callable[..., None]:
    """Return a step of training that is interrupted after each of so many calls."""
    from twostroke.lab.train import imitate

    steps_done = [] if steps is None else steps
    step = imitate.StudentTrainer._step

    def stop_soon(imitator: imitate.StudentTrainer, batch: object) -> None:
        step(imitator, batch)  # type: ignore[arg-type]
        steps_done.append(imitator.descent.num_steps)
        if len(steps_done) in counts:
            raise KeyboardInterrupt

    return stop_soon


def test_it_goes_on_where_it_was_stopped(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.lab.compress.distill import distill
    from twostroke.lab.train import imitate

    steps: list[int] = []
    monkeypatch.setattr(imitate.StudentTrainer, "_step", stopping_after(3, 6, steps=steps))
    lines: list[str] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match=r"student so far is in .*student\.gguf"):
            distill(
                str(teacher), StudentShape(3), tmp_path, replace(SHORT, minutes=9.0), lines.append
            )
    assert steps == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / ".student.part.gguf").exists()
    assert sum("remain" in line for line in lines) <= 4  # chosen once
    with pytest.raises(UsageError, match="another model or with other options"):
        distill(str(teacher), StudentShape(2), tmp_path, SHORT, lines.append)


def test_a_student_is_not_named_while_it_writes_garbage(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.engine.canary import FirstLoadCheck
    from twostroke.lab.compress.distill import distill
    from twostroke.lab.train import imitate

    def ask() -> Path:
        return distill(str(teacher), StudentShape(3), tmp_path, replace(SHORT, minutes=9.0), print)

    monkeypatch.setattr(imitate.StudentTrainer, "_step", stopping_after(3))
    with monkeypatch.context() as patch:
        fault = lambda first, _: None if first.name == "teacher" else "it stammers"  # noqa: E731
        patch.setattr(FirstLoadCheck, "fault", fault)
        with pytest.raises(KeyboardInterrupt, match=r"kept .*no student yet: .* it stammers"):
            ask()
        monkeypatch.setattr("twostroke.lab.compress.distill.train", lambda *_: None)
        with pytest.raises(QualityError, match="it stammers"):
            ask()
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".gguf"]
    assert ask() == tmp_path / "student.gguf", "a sound one, from the same training"


def test_a_folder_is_for_what_was_made_in_it(teacher: Path, tmp_path: Path) -> None:
    from twostroke.lab.compress.distill import distill

    folder = tmp_path / "student"
    lock = folder / ".lock"
    lock.mkdir(parents=True)
    with pytest.raises(TwostrokeError, match="cannot be written: Is a directory"):
        distill(str(teacher), StudentShape(3), folder, SHORT, print)
    lock.rmdir()
    with exclusive_output(lock, folder), pytest.raises(UsageError, match="Another command writes"):
        distill(str(teacher), StudentShape(3), folder, SHORT, print)
    assert list(folder.iterdir()) == []
    mistyped = replace(SHORT, data=str(tmp_path / "nowhere.txt"))
    with pytest.raises(UsageError, match="cannot be read"):
        distill(str(teacher), StudentShape(3), folder, mistyped, print)
    lock.touch()  # as a command that was killed leaves it
    assert distill(str(teacher), StudentShape(3), folder, SHORT, print).is_file()
    assert not lock.exists()


def test_impossible_students_are_refused(teacher: Path, tmp_path: Path) -> None:
    from twostroke.lab.compress.distill import distill

    for shape, message in {
        StudentShape(7): "layers must be from 1 to 6, as many as",
        StudentShape(6): "as large as",
        StudentShape(kv_heads=0): "kv_heads must be from 1 to",
        StudentShape(feed_forward=48): "feed_forward must be a multiple of 32",
        StudentShape(4, feed_forward=1 << 20): "feed_forward must be from 1 to",
    }.items():
        with pytest.raises(UsageError, match=message):
            distill(str(teacher), shape, tmp_path, SHORT, print)
    with pytest.raises(UsageError, match="must have fewer"):
        distill(str(teacher), str(teacher), tmp_path, SHORT, print)
    with pytest.raises(TwostrokeError, match="nowhere"):
        distill(str(teacher), str(tmp_path / "nowhere.gguf"), tmp_path, SHORT, print)
    assert list(tmp_path.iterdir()) == []


def test_too_few_answers_are_refused(teacher: Path, tmp_path: Path) -> None:
    from twostroke.lab.compress.distill import distill

    (data := tmp_path / "one.txt").write_text("the world\n")
    short_plan = replace(SHORT, data=str(data), num_tokens=3)
    with pytest.raises(UsageError, match="too few answers"):
        distill(str(teacher), StudentShape(3), tmp_path / "student", short_plan, print)


@pytest.mark.parametrize("name", ["Q4_1", "IQ4_NL"])
def test_tuning_brings_a_rounded_model_nearer(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.lab.train import imitate
    from twostroke.lab.train.answers import collect
    from twostroke.lab.train.checkpoint import load_checkpoint
    from twostroke.lab.train.tune import tune

    path = write_tiny_gguf(tmp_path / "whole.gguf", tiny_of("llama", fmt="F32"))
    source = load(str(path))
    answers = collect(str(path), source.spec, tmp_path / "answers", SHORT, lambda _: None)
    rounded = {
        key: QuantTensor.from_floats(tensor.dequantize(), FORMATS[name])
        if len(tensor.shape) == 2 and key.startswith("blk.")
        else tensor
        for key, tensor in source.tensors.items()
    }
    lines: list[str] = []
    (stopped := tmp_path / "stopped").mkdir()
    with monkeypatch.context() as patch:  # once, after some steps
        patch.setattr(imitate.StudentTrainer, "_step", stopping_after(4))
        with pytest.raises(KeyboardInterrupt, match="the tuning so far was kept"):
            tune(source, rounded, answers, 0.3, stopped, lines.append)
    assert load_checkpoint(stopped, {"kind": "tuning"}).num_steps == 4  # type: ignore[union-attr]
    lines.clear()
    tuned = tune(source, rounded, answers, 0.3, stopped, lines.append)
    before, after = (float(line.split("KL ")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert after < before
    assert "output_norm.weight" in tuned
    key = "blk.0.ffn_up.weight"
    assert tuned[key].format.name == name
    heads = 2 * len(SCALE_OFFSETS[name])
    old, new = (
        tensors[key].data.reshape(-1, FORMATS[name].block_bytes) for tensors in (rounded, tuned)
    )
    assert np.array_equal(old[:, heads:], new[:, heads:])  # the codes
    assert not np.array_equal(old[:, :heads], new[:, :heads])
