"""Profiles: each step has the requested shape, and its operations add up to the step's cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.native import native_dir
from support.tiny import tiny_of, write_tiny_gguf
from twostroke.backends.cpu import CpuBackend
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.hardware import Hardware
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.core.request import NO_PAGE
from twostroke.lab.measure import profile as module
from twostroke.lab.measure import single_step
from twostroke.lab.measure.profile import ProfileOptions, StepProfile, profile
from twostroke.lab.measure.report_text import operation_labels
from twostroke.lab.measure.single_step import SingleStep, StepShape
from twostroke.model.families import build_program
from twostroke.model.program import BatchShape
from twostroke.model.program.cost import Cost, CostModel
from twostroke.model.program.kv_layout import FORMATS
from twostroke.model.program.ops import Activation, GatedActivation
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("llama", "gemma3", "qwen3-moe")
SHAPES = (StepShape.decode(1, 20), StepShape.decode(5, 40), StepShape.prefill(70))
LIMITS = Hardware("test", 2, 10**9, bandwidth=1e9, peak=2e9, peak_kind="x", source="measured")


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this tree's native libraries, and fixed limits of the machine."""
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))
    monkeypatch.setattr(module, "machine", lambda *arguments, remeasure: LIMITS)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_gguf(folder / "tiny.gguf", tiny_of(request.param))


def profiles_of(path: Path, options: ProfileOptions) -> list[StepProfile]:
    return list(profile(str(path), options, lambda text: None))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_step_samples_the_tokens_that_its_requests_sample_alone(
    path: Path, shape: StepShape
) -> None:
    """Although KV pages are copied, the step is a real decode step."""
    loaded = load_path(path)
    program = build_program(loaded.spec)
    backend = CpuBackend(program, loaded.tensors, 200, 16, 2, level="portable")
    try:
        step = SingleStep(backend, program, shape)
        tokens = step.run().tokens
        assert step.run().tokens == tokens
        for part, token in zip(step.plan.slices, tokens, strict=True):
            assert backend.score(part.request.tokens)[-1].argmax() == token
        assert len({tuple(part.request.tokens) for part in step.plan.slices}) == len(tokens)
        assert all(time_s > 0 for time_s in step.scheduler_times())
        step.close()
    finally:
        backend.close()


def test_a_product_without_an_activation_function_is_named_multiply() -> None:
    product = GatedActivation("product", "gate", "up", 8, Activation.IDENTITY)
    assert product.label == "multiply"


def test_steps_of_models_with_recurrent_layers_are_timed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "hybrid.gguf", tiny_of("qwen3.5"))
    profiles = profiles_of(path, ProfileOptions(SHAPES, num_steps=2))
    assert [step_profile.shape for step_profile in profiles] == list(SHAPES)
    for step_profile in profiles:
        labels = {operation.label.name for operation in step_profile.operations}
        assert {"convolution", "delta rule"} <= labels


def test_the_beginning_of_a_long_context_stands_for_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_step, "_MAX_COMPUTED_CONTEXT", 32)
    loaded = load_path(path)
    program = build_program(loaded.spec)
    backend = CpuBackend(program, loaded.tensors, 200, 16, 2, level="portable")
    computed, copied = list[int](), set[int]()
    run, copy = backend.run, backend.copy_page
    monkeypatch.setattr(backend, "run", lambda plan: (computed.append(plan.num_rows), run(plan))[1])
    monkeypatch.setattr(
        backend, "copy_page", lambda source, target: (copied.add(target), copy(source, target))
    )
    try:
        step = SingleStep(backend, program, StepShape.decode(2, 90))
        assert computed == [32]
        for number, part in enumerate(step.plan.slices):
            for pages in part.request.pages:
                computed_pages = set(pages) - copied - {NO_PAGE}  # a window's page may be gone
                assert computed_pages <= (set() if number else set(pages[:2])), (
                    "computed, not copied"
                )
        assert len(step.run().tokens) == 2
        step.close()
    finally:
        backend.close()


@pytest.mark.parametrize("kv_format", ["f16", "int16", "int8"])
def test_rows_add_up_to_the_cost_of_the_step(path: Path, kv_format: str) -> None:
    loaded = load_path(path)
    program = build_program(loaded.spec)
    sizes = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
    model = CostModel(program, sizes, FORMATS[kv_format], stops_rows=True)
    options = ProfileOptions(SHAPES, num_steps=2, cache=CacheOptions(kv_format=kv_format))
    profiles = profiles_of(path, options)
    assert [step_profile.shape for step_profile in profiles] == list(SHAPES)
    for step_profile in profiles:
        assert step_profile.cost == model.per_step().of(step_profile.shape.batch)
        assert step_profile.num_steps == 2
        for row in step_profile.operations:
            assert row.time_s.low <= row.time_s.median <= row.time_s.high
            assert row.floor_s >= max(row.cost.bytes / 1e9, row.cost.flops / 2e9) * (1 - 1e-9)


def test_rows_of_layers_are_the_rows_of_all_taken_apart(path: Path) -> None:
    shapes = SHAPES[1:2]
    [grouped] = profiles_of(path, ProfileOptions(shapes, num_steps=1))
    [by_layer] = profiles_of(path, ProfileOptions(shapes, num_steps=1, by_layer=True))
    assert {row.label.layer for row in grouped.operations} == {None}
    layers = build_program(load_path(path).spec).cache_layers
    assert {row.label.layer for row in by_layer.operations} == {None, *range(len(layers))}
    for row in grouped.operations:
        parts = [part for part in by_layer.operations if part.label.name == row.label.name]
        assert sum(part.calls for part in parts) == row.calls
        assert sum((part.cost for part in parts), Cost(0, 0, 0)) == row.cost


def test_rounds_go_through_all_shapes_and_share_the_steps(path: Path) -> None:
    profiles = profiles_of(path, ProfileOptions(SHAPES[:2], num_steps=5, rounds=3))
    assert [step_profile.shape for step_profile in profiles] == [*SHAPES[:2]] * 3
    assert {step_profile.num_steps for step_profile in profiles} == {2}


def test_the_worst_operation_is_farthest_above_its_floor(path: Path) -> None:
    for step_profile in profiles_of(path, ProfileOptions(SHAPES[:1], num_steps=1)):
        assert step_profile.worst.above_s == max(row.above_s for row in step_profile.operations)
        assert step_profile.step_s == step_profile.run_s.median + step_profile.scheduler_s


def test_shapes_are_the_batches_that_cost_is_counted_from() -> None:
    assert StepShape.decode(3, 7).batch == BatchShape.decode((7, 7, 7))
    assert StepShape.prefill(9).batch == BatchShape.prefill(9)
    assert StepShape.decode(1, 2000).name == "decode, 1 stream after 2,000 tokens"
    assert StepShape.decode(2, 8).name == "decode, 2 streams after 8 tokens"


def test_fused_operations_are_called_by_what_they_do(tmp_path: Path) -> None:
    names = {}
    for family in FAMILIES:
        path = write_tiny_gguf(tmp_path / f"{family}.gguf", tiny_of(family))
        loaded = load_path(path)
        program = build_program(loaded.spec)
        backend = CpuBackend(program, loaded.tensors, 20, 16, 1, level="portable")
        names[family] = list(
            dict.fromkeys(label.name for label in operation_labels(program, backend.fused))
        )
        backend.close()
    assert names["llama"] == [
        "embed",
        "norm attn_q,k,v rope",
        "attention",
        "attn_output add",
        "norm ffn_gate,up silu",
        "ffn_down add",
        "norm logits",
    ]
    assert names["gemma3"] == [
        "embed scale",
        "norm attn_q,k,v norm rope",
        "attention(27)",
        "attn_output",
        "norm add",
        "norm ffn_gate,up gelu_tanh",
        "ffn_down",
        "attention",
        "norm logits",
    ]
    assert names["qwen3-moe"][4:] == ["norm", "ffn_gate_inp", "experts add", "norm logits"]


def test_a_context_beyond_the_model_s_is_refused(path: Path) -> None:
    length = load_path(path).spec.context_length
    for shape, knob in (
        (StepShape.decode(1, length), "--context"),
        (StepShape.prefill(length), "--prefill"),
    ):
        with pytest.raises(UsageError, match=f"{knob} may be up to {length - shape.num_written}"):
            profiles_of(path, ProfileOptions((shape,)))


def test_streams_that_do_not_fit_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.backends.recipe.memory_free", lambda *arguments: 10**9)
    with pytest.raises(MemoryLimitError, match="lower --streams or --context"):
        profiles_of(path, ProfileOptions((StepShape.decode(1 << 20, 400), StepShape.prefill(8))))


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(UsageError, match="no instruction-set level 'avx9'"):
        next(profile("x", ProfileOptions(SHAPES, compute=ComputeOptions(level="avx9")), print))
