"""GGUF files in codebook and ternary formats are loaded, run on every level, and planned for."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import LEVELS, cpu_backend
from support.native import load_level
from support.random_blocks import CODED, random_blocks
from support.tiny import Tiny, write_tiny_gguf
from twostroke.backends.cpu.weights import kernel_rows
from twostroke.backends.create import cost_model, weight_bytes
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.options import ComputeOptions
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

TINY = Tiny(hidden_size=256, ffn_size=512, num_heads=4, num_kv_heads=4, head_dim=64)
TOKENS = list(range(3, 103))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model of each format, read from its file, and its values by the reference backend."""
    folder = tmp_path_factory.mktemp("coded")

    @cache
    def model(name):
        loaded = load_path(write_tiny_gguf(folder / f"{name}.gguf", replace(TINY, fmt=name)))
        program = build_program(loaded.spec)
        return program, loaded, ReferenceBackend(program, loaded.tensors, 1, 16).score(TOKENS)

    return model


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("level", LEVELS)
def test_files_of_every_format_agree_with_the_reference(level, name, models):
    load_level(level)
    program, loaded, expected = models(name)
    with cpu_backend((program, loaded.tensors), level, 8) as backend:
        for generated in (False, True):
            tiles = level.startswith("amx") and not generated
            actual = backend.score(TOKENS, generated=generated)
            difference = abs(actual - expected).max() / abs(expected).max()
            assert difference < (6e-2 if tiles else 5e-3)


def test_rows_that_are_converted_in_parts_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    for name in CODED:
        tensor = random_blocks(name, (1100, 256), rng)  # more values than are converted together
        to_kernel = tensor.format.to_kernel
        whole_rows = tensor.data if to_kernel is None else to_kernel(tensor.data)
        assert np.array_equal(kernel_rows(tensor), whole_rows)


@pytest.mark.parametrize("name", CODED)
def test_memory_is_what_the_kernels_take(name, models):
    program, loaded, _ = models(name)
    with cpu_backend((program, loaded.tensors), LEVELS[0], 8) as backend:
        packed = backend.facts.weight_bytes
    table = loaded.tensors["token_embd.weight"]
    matrices = [t for t in loaded.tensors.values() if len(t.shape) == 2 and t is not table]
    planned = sum(tensor.packed_bytes for tensor in matrices)
    others = sum(t.num_bytes for t in loaded.tensors.values() if t not in matrices)
    assert abs(packed - planned - others) < 0.01 * packed
    assert planned == sum(t.num_values for t in matrices) * matrices[0].format.packed_bits / 8
    assert weight_bytes(loaded, ComputeOptions()) > planned + others
    assert cost_model(program, loaded.tensors).weight_bytes["blk.0.ffn_up.weight"] == int(
        512 * 256 * matrices[0].format.packed_bits / 8
    )
