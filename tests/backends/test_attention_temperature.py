"""Queries with an attention temperature: all backends agree."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.closeness import divergence
from support.cpu import LEVELS, cpu_backend
from support.gguf_writer import write_gguf
from support.programs import SPEC, VOCAB_SIZE, random_tensors
from support.tiny import (
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    write_tiny_folder,
    write_tiny_gguf,
)
from twostroke import LLM
from twostroke.backends.reference import ReferenceBackend
from twostroke.backends.reference.operations import rotate
from twostroke.model.families import RopeSpec, build_program
from twostroke.model.program.ops import QueryRope, Rope
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

ROPE = RopeSpec(10000.0, 32, interleaved=False, temperature_scale=0.5, temperature_length=20)
PROGRAM = build_program(replace(SPEC, rope=ROPE))
TOKENS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(75)]


def test_the_factor_is_1_for_the_first_positions_and_grows_after_them() -> None:
    sizes: dict[str, Any] = {"num_heads": 1, "head_dim": 4, "inverse_frequencies": (1.0, 0.1)}
    plain = Rope("y", "x", **sizes, interleaved=False)
    query = QueryRope(
        "y", "x", **sizes, interleaved=False, temperature_scale=0.5, temperature_length=20
    )
    positions = np.array([0, 19, 20, 39, 40, 199])
    x = np.random.default_rng(3).standard_normal((6, 4)).astype(np.float32)
    factors = rotate(query, x, positions) / rotate(plain, x, positions)
    expected = [1, 1, *(1 + 0.5 * log(n) for n in (2, 2, 3, 10))]
    np.testing.assert_allclose(factors, np.repeat(np.array(expected)[:, None], 4, 1), rtol=1e-5)
    with_offset = replace(query, temperature_offset=1)
    earlier = rotate(with_offset, x, positions - 1) / rotate(plain, x, positions - 1)
    np.testing.assert_allclose(earlier, factors, rtol=1e-5)


def test_only_queries_have_a_temperature() -> None:
    rotations = [op for op in PROGRAM.ops if isinstance(op, Rope)]
    assert len(rotations) == 2 * SPEC.num_layers
    assert {op.x[-1] for op in rotations if isinstance(op, QueryRope)} == {"q"}
    assert sum(isinstance(op, QueryRope) for op in rotations) == SPEC.num_layers
    assert not any(isinstance(op, QueryRope) for op in build_program(SPEC).ops)


def test_torch_agrees_with_the_reference() -> None:
    pytest.importorskip("torch", reason="no PyTorch here")
    from twostroke.backends.torch import TorchBackend

    tensors = random_tensors(PROGRAM)
    expected = ReferenceBackend(PROGRAM, tensors, 1, 16).score(TOKENS)
    plain = ReferenceBackend(build_program(SPEC), tensors, 1, 16).score(TOKENS)
    assert np.array_equal(expected[:20], plain[:20])
    assert np.abs(expected[20:] - plain[20:]).max() > 1e-3
    ours = TorchBackend(PROGRAM, tensors, 1, 16, device="cpu").score(TOKENS)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_cpu_backend_agrees_with_the_reference(level: str) -> None:
    tensors = random_tensors(PROGRAM)
    expected = ReferenceBackend(PROGRAM, tensors, 1, 16).score(TOKENS)
    with cpu_backend((PROGRAM, tensors), level, 8) as backend:
        for generated in (False, True):
            mean_kl, _ = divergence(expected, backend.score(TOKENS, generated=generated))
            assert mean_kl < (1e-3 if level.startswith("amx") else 1e-5)


def test_an_engine_on_the_cpu_has_the_whole_context(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("ministral3"))
    with LLM(path) as llm:
        assert llm.engine.context_length == 8192


def test_both_files_of_a_ministral_have_the_same_rope(tmp_path: Path) -> None:
    tiny = tiny_of("ministral3")
    folder = load_path(write_tiny_folder(tmp_path / "folder", tiny)).spec.rope
    file = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny)).spec.rope
    assert (file.magnitude, file.temperature_scale, file.temperature_length) == (1.0, 0.5, 2048)
    assert replace(file, interleaved=False) == folder
    # A file of Mistral Small 3 has neither, and a Mistral of YaRN alone has the usual magnitude.
    metadata = tiny_metadata(tiny)
    for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"):
        del metadata[f"mistral3.{key}"]
    plain = load_path(write_gguf(tmp_path / "b.gguf", metadata, tiny_tensors(tiny))).spec.rope
    assert plain.temperature_scale == 0
    assert plain.magnitude == pytest.approx(1 + 0.1 * log(4))
