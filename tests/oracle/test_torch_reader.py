"""The torch reader against the reference: logits, hidden states, steps over pages, gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from support.tiny import Tiny, tiny_of, write_tiny_gguf
from support.tiny_families import families_on
from twostroke.backends.reference import ReferenceBackend
from twostroke.backends.torch import TorchBackend, TorchModel, choose_device
from twostroke.core.errors import BackendError
from twostroke.core.options import BatchOptions, CacheOptions, ComputeOptions, EngineOptions
from twostroke.core.sampling import SamplingParams
from twostroke.engine.llm import LLM
from twostroke.lab.measure.divergence import compare
from twostroke.model.families import build_program
from twostroke.model.families.spec import ExpertSpec, WindowSpec
from twostroke.model.program import Activation
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.families import ModelSpec

torch.set_num_threads(1)  # the models are tiny

TOKENS = [(7 * i * i + 3) % 250 for i in range(90)]

# Whatever families ask of the operations, alone and together.
VARIANTS = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True},
    "window": {"window": WindowSpec(20, (True, False))},
    "soft caps": {"attention_soft_cap": 5.0, "logit_soft_cap": 3.0},
    "window and soft cap": {"window": WindowSpec(9, (True, True)), "attention_soft_cap": 5.0},
    "gelu": {"activation": Activation.GELU_TANH, "norm_offset": 1.0},
    "sinks": {"has_sinks": True, "window": WindowSpec(20, (True, False))},
    "sinks and soft cap": {"has_sinks": True, "attention_soft_cap": 5.0},
    "clamped activation": {"activation": Activation.SWIGLU_OAI},
    "experts with biases": {
        "experts": ExpertSpec(6, 2, 48, normalize=True, has_biases=True),
        "activation": Activation.SWIGLU_OAI,
    },
    "experts": {"experts": ExpertSpec(6, 2, 48, normalize=True)},
    "experts with shares as they are": {"experts": ExpertSpec(5, 3, 48, normalize=False)},
}


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return load_path(write_tiny_gguf(tmp_path / "tiny.gguf", Tiny())).spec


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_equals_the_reference(variant: str, spec: ModelSpec) -> None:
    program = build_program(replace(spec, **VARIANTS[variant]))
    tensors = random_tensors(program)
    right = ReferenceBackend(program, tensors, 1, 16)
    ours = TorchBackend(program, tensors, 1, 16)
    result = compare([(right.score(TOKENS), ours.score(TOKENS), TOKENS)])
    assert result.mean_kl < 1e-9
    assert result.top1_agreement == 1
    names = program.layer_outputs
    expected, traced = right.trace(TOKENS, names), ours.trace(TOKENS, names)
    for name in names:
        np.testing.assert_allclose(traced[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", families_on("torch"))
def test_torch_equals_the_reference_on_every_family(family: str, tmp_path: Path) -> None:
    loaded = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of(family)))
    program = build_program(loaded.spec)
    right = ReferenceBackend(program, loaded.tensors, 1, 16)
    ours = TorchBackend(program, loaded.tensors, 1, 16)
    result = compare([(right.score(TOKENS), ours.score(TOKENS), TOKENS)])
    assert result.mean_kl < 1e-9
    assert result.top1_agreement == 1


def test_gradients_are_those_of_finite_differences(spec: ModelSpec) -> None:
    program = build_program(
        replace(
            spec,
            experts=ExpertSpec(4, 2, 48, normalize=True),
            window=WindowSpec(7, (True, False)),
            attention_soft_cap=5.0,
        )
    )
    model = TorchModel(program, random_tensors(program))
    model.weights = {name: w.double().requires_grad_() for name, w in model.weights.items()}
    tokens = torch.tensor(TOKENS[:24])

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.values(tokens)["logits"][:-1], tokens[1:])

    loss().backward()
    unused = [name for name, weight in model.weights.items() if weight.grad is None]
    assert all(".ffn_" in name for name in unused)  # experts that no row chose
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.weights.items():
        if weight.grad is None or "ffn_gate_inp" in name:  # a router's choice is not continuous
            continue
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            weight.add_(direction, alpha=1e-6)
            above = loss()
            weight.sub_(direction, alpha=2e-6)
            below = loss()
            weight.add_(direction, alpha=1e-6)
        expected = float(above - below) / 2e-6
        derivative = float((weight.grad * direction).sum())
        assert derivative == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("token_budget", [7, 64])
def test_the_engine_writes_the_references_tokens(token_budget: int, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", Tiny(seed=3))
    prompts = ["hello world", "the world is the world", "a", "of the world to"]
    answers = []
    for backend in ("reference", "torch"):
        options = EngineOptions(
            ComputeOptions(backend),
            CacheOptions(context_length=64),
            BatchOptions(token_budget=token_budget),
        )
        with LLM(str(path), options=options) as llm:
            params = SamplingParams(max_tokens=20, temperature=0)
            answers.append([completion.text for (completion,) in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BackendError, match=r"no device 'cuda:9' here\. Devices: cpu"):
        choose_device("cuda:9")
    with pytest.raises(BackendError, match=r"Each rank has a GPU of its own"):
        choose_device("cuda:0", local_rank=1)


def random_tensors(program) -> dict[str, QuantTensor]:
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in program.weight_shapes.items():
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * rng.standard_normal(shape)
        tensors[name] = QuantTensor.from_floats(values.astype(np.float32), FORMATS["F32"])
    return tensors
