"""Published quantized folders on the native kernels agree with the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.cpu import LEVELS, cpu_backend
from support.native import load_level
from support.published import compressed_config, compressed_ints, fp4, fp8, gptq, write_published
from twostroke.backends.reference import ReferenceBackend
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from support.published import MakeModule

TOKENS = np.random.default_rng(0).integers(3, 250, 60).tolist()

# Zero points, groups that no kernel has, scales of whole rows, E2M1 with either scale, floats.
FOLDERS: list[tuple[MakeModule, dict[str, Any]]] = [
    (gptq(4, 64), {"quant_method": "gptq", "bits": 4, "group_size": 64}),
    (gptq(3, 1 << 20), {"quant_method": "gptq", "bits": 3, "group_size": -1}),
    (gptq(4, 32, act_order=True), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    (
        compressed_ints(8, None, symmetric=True, packed=False),
        compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    (
        fp4("nvfp4"),
        compressed_config(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
    ),
    (
        fp4("mxfp4"),
        compressed_config(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
    ),
    (
        fp8(128, 128, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
]


@pytest.mark.parametrize("level", LEVELS)
def test_folders_agree_with_the_reference(tmp_path: Path, level: str) -> None:
    load_level(level)
    for make, config in FOLDERS:
        write_published(tmp_path, make, config)
        loaded = load_path(tmp_path)
        program = build_program(loaded.spec)
        expected = ReferenceBackend(program, loaded.tensors, 1, 64).score(TOKENS)
        with cpu_backend((program, dict(loaded.tensors)), level, 4) as backend:
            for generated in (False, True):
                actual = backend.score(TOKENS, generated=generated)
                difference = np.abs(actual - expected).max() / np.abs(expected).max()
                tiles = level.startswith("amx") and not generated
                assert difference < (6e-2 if tiles else 5e-3), config
