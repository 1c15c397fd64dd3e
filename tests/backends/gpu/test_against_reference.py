"""The whole gpu backend, with interpreted kernels, agrees with the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.programs import PROGRAMS, SPEC, VOCAB_SIZE, random_tensors  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.backends.gpu.kernels import products_tiles  # noqa: E402
from twostroke.backends.reference import ReferenceBackend  # noqa: E402
from twostroke.lab.measure.divergence import compare  # noqa: E402
from twostroke.model.families import build_program  # noqa: E402
from twostroke.model.families.spec import ExpertSpec, WindowSpec  # noqa: E402
from twostroke.model.program import Activation  # noqa: E402

if TYPE_CHECKING:
    from twostroke.model.program import Program

TOKENS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(75)]

TEMPERATURE = replace(SPEC.rope, temperature_scale=0.5, temperature_length=20)
VARIANTS: dict[str, Program] = {
    **PROGRAMS,
    "window": build_program(replace(SPEC, window=WindowSpec(20, (True, False)))),
    "soft caps": build_program(replace(SPEC, attention_soft_cap=5.0, logit_soft_cap=3.0)),
    "attention temperature": build_program(replace(SPEC, rope=TEMPERATURE)),
    "gelu": build_program(replace(SPEC, activation=Activation.GELU_TANH)),
}


def gpu_backend(program: Program, tensors: Any, num_pages: int = 2, **options: Any) -> GpuBackend:
    kwargs = {"element": torch.float32, "kv_format": "f32", "max_rows": 64, "piece": 32}
    return GpuBackend(program, tensors, num_pages, 16, find_device(), **{**kwargs, **options})


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_states_are_the_references(variant: str) -> None:
    program = VARIANTS[variant]
    tensors = random_tensors(program)
    right, ours = ReferenceBackend(program, tensors, 1, 16), gpu_backend(program, tensors)
    names = (*program.layer_outputs, program.ops[-1].output)
    expected, traced = right.trace(TOKENS, names), ours.trace(TOKENS, names)
    for name in names:
        np.testing.assert_allclose(traced[name], expected[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("fmt", "experts"),
    [("F16", 0), ("BF16", 0), ("Q4_K", 0), ("Q4_K and Q6_K", 0), ("BF16", 4), ("Q4_K and Q6_K", 4)],
)
def test_half_precision_is_close(fmt: str, experts: int) -> None:
    mixture = ExpertSpec(experts, 2, 256, normalize=True) if experts else None
    sizes = {"hidden_size": 256, "ffn_size": 256, "head_dim": 64, "experts": mixture}
    program = build_program(replace(SPEC, **sizes))
    first, _, second = fmt.partition(" and ")
    tensors = random_tensors(program, first, first)
    if second:  # as Q4_K_M has it
        other = random_tensors(program, second, second)
        tensors |= {name: other[name] for name in other if "attn_v" in name or "down" in name}
    right = ReferenceBackend(program, tensors, 1, 16)
    ours = gpu_backend(program, tensors, element=torch.float16, kv_format="f16")
    result = compare([(right.score(TOKENS), ours.score(TOKENS), TOKENS)])
    assert result.mean_kl < 1e-4
    assert result.top1_agreement > 0.98
    assert (f"{first} as f16" in ours.facts.detail) == (fmt == "BF16")


@pytest.mark.parametrize("parts", [1, 2])
def test_many_rows_of_packed_weights_are_close(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_tiles, "num_parts", lambda *_: parts)
    program = build_program(replace(SPEC, hidden_size=512, ffn_size=512, head_dim=64))
    tensors = random_tensors(program, "Q4_K", "Q4_K")
    right = ReferenceBackend(program, tensors, 1, 16)
    kwargs = {"element": torch.float16, "kv_format": "f16", "max_rows": 128}
    ours = gpu_backend(program, tensors, num_pages=8, **kwargs)
    tokens = (2 * TOKENS)[:120]
    result = compare([(right.score(tokens), ours.score(tokens), tokens)])
    assert result.mean_kl < 1e-4
    assert result.top1_agreement > 0.98
