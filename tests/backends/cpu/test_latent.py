"""Latent attention: keys share a scale with latent vectors, and many heads share one key."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import LEVELS, cpu_backend, greedy_request, page_lists, run
from support.programs import SPEC, random_tensors
from support.ranks import ThreadRanks
from twostroke.backends.cpu.library import choose_level
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import RopeSpec
from twostroke.model.families.blocks import decoder, residual_layer
from twostroke.model.families.spec import LatentSpec
from twostroke.model.program.mesh import Mesh
from twostroke.model.quant import QuantTensor


def latent_model(num_heads=4, num_layers=2, **widths):
    latent = LatentSpec(**{"rank": 32, "rotated": 16, "key": 16, "value": 16, **widths})
    spec = replace(
        SPEC,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotated,
        rope=RopeSpec(10000.0, latent.rotated, interleaved=True),
        latent=latent,
    )
    program = decoder(spec, residual_layer)
    return program, random_tensors(program)


def tokens_of(seed, length):
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def with_larger_keys(model, factor, num_heads=4, key=16):
    """Multiply the rotated keys by a factor, and divide their queries by it."""
    program, tensors = model[0], dict(model[1])
    for name, tensor in model[1].items():
        values = tensor.dequantize().copy()
        if name.endswith("attn_k_pe.weight"):
            values *= factor
        elif name.endswith("attn_q.weight"):
            values.reshape(num_heads, -1, values.shape[1])[:, key:] /= factor
        else:
            continue
        tensors[name] = QuantTensor.from_floats(values, tensor.format)
    return program, tensors


@pytest.mark.parametrize("kv_format", ["int16", "int8"])
@pytest.mark.parametrize("level", LEVELS)
def test_rotated_keys_of_any_size_leave_latent_vectors_their_bits(level, kv_format):
    model, tokens = latent_model(), tokens_of(5, 120)
    for generated in (False, True):
        logits = []
        for factor in (1 / 16, 1, 16):
            changed = with_larger_keys(model, np.float32(factor))
            with cpu_backend(changed, level, 8, kv_format=kv_format) as backend:
                logits.append(backend.score(tokens, generated=generated))
        assert np.array_equal(logits[0], logits[1])
        assert np.array_equal(logits[2], logits[1])


def test_rows_of_many_heads_do_not_depend_on_how_attention_is_shared_out():
    """The partial results of all threads take more memory than a step may have."""
    model = latent_model(128, 1, rank=512, rotated=64)
    level, common = choose_level(None).level, tokens_of(6, 256)
    rows = []
    for threads, at_once in ((1, 1), (16, 60)):
        with cpu_backend(model, level, 80, threads=threads, kv_format="int16") as backend:
            requests = [greedy_request([*common, i]) for i in range(60)]
            for i, request in enumerate(requests):
                request.pages = page_lists(backend, [*range(16), 16 + i])
            run(backend, Slice(requests[0], 0, 256, samples=False))
            rows_by_threads = []
            for first in range(0, 60, at_once):
                slices = [Slice(r, 256, 1, samples=True) for r in requests[first : first + at_once]]
                rows_by_threads += backend.run(StepPlan(tuple(slices))).logprobs
            rows.append(rows_by_threads)
    assert rows[0] == rows[1]


@pytest.mark.parametrize("count", [3, 150])
def test_ranks_divide_the_heads_of_few_rows(count):
    model, tokens, level = latent_model(64, 1), tokens_of(7, count), choose_level(None).level
    with cpu_backend(model, level, 16) as whole_backend:
        expected = {
            generated: whole_backend.score(tokens, generated=generated) for generated in (0, 1)
        }
    for parts in ((1, 1), (1, 0, 2)):
        mesh = Mesh(column_parts=parts, kv_by_tokens=True)
        with ThreadRanks(model, mesh, level, 16, max_rows=150, threads=4) as ranks:
            for generated, logits in expected.items():
                assert np.array_equal(ranks.score(tokens, generated=generated), logits)
