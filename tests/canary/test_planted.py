"""The canary refuses models with planted faults, and accepts working files of 3 to 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from canary.planted import GARBAGE, WORSE
from twostroke.backends.create import auto_kv_format, create_backend
from twostroke.backends.kv_size import size_kv_cache
from twostroke.core.hardware import memory_available
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.engine.canary import MAX_DRIFT_NATS, CanaryScores, measure_canary
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.model.weights import LoadedModel

# Those that the ordinary run plants; `make long SUITE=mutants` plants all.
OFTEN = ("nibbles swapped", "zero point one too high", "one norm missing", "rope base a tenth")

pytestmark = pytest.mark.model


def measured(loaded: LoadedModel, bits: int = 15) -> CanaryScores:
    program, compute = build_program(loaded.spec), ComputeOptions(activation_bits=bits)
    size = size_kv_cache(
        program,
        CacheOptions(context_length=64),
        64,
        loaded.file_bytes,
        memory_available(),
        auto_format=auto_kv_format(compute),
    )
    backend = create_backend(loaded.tensors, program, compute, size)
    try:
        return measure_canary(backend, build_tokenizer(loaded), program.context_length)
    finally:
        backend.close()


def assert_refused(loaded: LoadedModel, good: CanaryScores, title: str) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        canary = measured({**GARBAGE, **WORSE}[title](loaded))
    if title in GARBAGE:
        assert canary.fault(), f"{title}: {canary.easy_nats}"
    else:
        assert canary.drift(good) > MAX_DRIFT_NATS, f"{title}: {canary.drift(good)}"


def test_common_faults_are_refused(smollm2_path: Path) -> None:
    loaded = load_path(smollm2_path)
    good = measured(loaded)
    assert good.fault() is None
    assert measured(loaded, bits=8).drift(good) < MAX_DRIFT_NATS
    for title in OFTEN:
        assert_refused(loaded, good, title)


@pytest.mark.mutants
def test_every_planted_fault_is_refused(smollm2_path: Path) -> None:
    loaded = load_path(smollm2_path)
    good = measured(loaded)
    for title in {**GARBAGE, **WORSE}:
        assert_refused(loaded, good, title)


@pytest.mark.models
@pytest.mark.mutants
@pytest.mark.parametrize(
    "name", ["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
)
def test_no_file_of_three_to_sixteen_bits_is_refused(
    name: str, real_model: Callable[[str], Path]
) -> None:
    loaded = load_path(real_model(name))
    for bits in (15, 9, 8):
        assert measured(loaded, bits).fault() is None
    for fmt in (f for f in FORMATS.values() if f.bits_per_value > 3 and f.encode is not None):
        canary = measured(requantized(loaded, fmt.name))
        assert canary.fault() is None, f"{name} as {fmt.name}: {canary.easy_nats}"


def requantized(loaded: LoadedModel, name: str) -> LoadedModel:
    """Round the matrices of layers to nearest in another format, if its blocks fit."""
    fmt, small = FORMATS[name], FORMATS["Q5_0"]

    def change(key: str, tensor: QuantTensor) -> QuantTensor:
        if not key.startswith("blk.") or len(tensor.shape) < 2:
            return tensor
        fits = tensor.shape[-1] % fmt.block_size == 0
        return QuantTensor.from_floats(tensor.dequantize(), fmt if fits else small)

    return replace(loaded, tensors={key: change(key, t) for key, t in loaded.tensors.items()})
