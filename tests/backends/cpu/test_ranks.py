"""Ranks compute the same logits as one process, bit for bit, however a Program is divided."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import cpu_backend, greedy_request, page_lists, run, tiny_model
from support.mixed_bits import mixed_bits
from support.programs import PROGRAMS, SPEC, VOCAB_SIZE, hybrid_program, random_tensors
from support.ranks import Post, ThreadRanks
from support.schedules import Setting, fresh, random_requests, run_schedule
from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import FAMILIES, families_on
from twostroke.backends.cpu import layout
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.interface import WeightShard
from twostroke.core.errors import RanksLostError
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import build_program
from twostroke.model.families.blocks import decoder, residual_layer
from twostroke.model.program.mesh import Mesh, stage_ends
from twostroke.model.program.ops import Logits, RMSNorm
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

LEVEL = choose_level(None).level
MESHES = [
    Mesh(column_parts=(1, 1)),
    Mesh(column_parts=(3, 1)),
    Mesh(column_parts=(1,) * 7),
    Mesh(column_parts=(0, 1), attention_parts=(1, 0)),
    Mesh(row_parts=3),
    Mesh(stages=(1, 1)),
    Mesh((1, 1), 2, (1, 2)),
]
KV_MESHES = [
    Mesh(column_parts=(1, 1), kv_by_tokens=True),
    Mesh(column_parts=(1, 5, 1), kv_by_tokens=True),
    Mesh(column_parts=(1,) * 7, kv_by_tokens=True),
    Mesh(row_parts=2, kv_by_tokens=True),
    Mesh(row_parts=2, column_parts=(1, 2), kv_by_tokens=True),
]
HYBRIDS = {
    "grouped": hybrid_program(),
    "tiled": hybrid_program((False, True), is_tiled=True, key_dim=32, value_dim=64),
    "one value head": hybrid_program((False, False), num_key_heads=1, num_value_heads=1),
    "channels": hybrid_program(mixer="channels"),
    "convolution": hybrid_program(mixer="convolution"),
    "mamba": hybrid_program(mixer="mamba"),
    "mamba, one group": hybrid_program(mixer="mamba", num_groups=1, state_size=32, head_dim=64),
}
NUM_STATES = 150  # for models with recurrent layers
MODELS = {
    "llama": lambda: tiny_model(fmt="Q4_1", embedding_fmt="Q8_0", num_heads=6, num_kv_heads=3),
    "windows": lambda: tiny_model(fmt="Q8_0", num_layers=3, windows=(37, None, 100), soft_cap=4.0),
    **{
        name: lambda name=name: (PROGRAMS[name], random_tensors(PROGRAMS[name], "Q4_0", "Q8_0"))
        for name in PROGRAMS
    },
    **{
        name: lambda name=name: (HYBRIDS[name], random_tensors(HYBRIDS[name], "Q4_0", "Q8_0"))
        for name in HYBRIDS
    },
}


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


@pytest.mark.rounds
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_one_process(kind, rounds):
    """In a short run, each model tries every fifth mesh, from another one on."""
    model, tokens = MODELS[kind](), tokens_of(1, 130)
    meshes = list(enumerate([*MESHES, *KV_MESHES[1:4]]))
    if rounds == 1:
        meshes = meshes[list(MODELS).index(kind) % 5 :: 5]
    with cpu_backend(model, LEVEL, 16) as whole_backend:
        expected = {
            generated: whole_backend.score(tokens, generated=generated) for generated in (0, 1)
        }
    for number, mesh in meshes:
        if len(mesh.stages) > len(stage_ends(model[0], model[0].ops)):
            continue
        options = {"threads": 1 + number % 2, "post": Post() if number % 3 == 0 else None}
        with ThreadRanks(model, mesh, LEVEL, 16, max_rows=100, **options) as ranks:
            for generated, logits in expected.items():
                actual = ranks.score(tokens, generated=generated)
                assert np.array_equal(actual, logits), (mesh, generated)


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_products_with_different_bits_give_the_logits_of_one_process(kind):
    model, tokens = MODELS[kind](), tokens_of(2, 90)
    bits = mixed_bits(*model)
    assert bits.bits
    with cpu_backend(model, LEVEL, 16) as whole_backend:
        expected = whole_backend.score_with(bits.bits, tokens)
    for mesh in MESHES:
        with ThreadRanks(model, mesh, LEVEL, 16, activation_bits=bits.bits) as ranks:
            assert np.array_equal(ranks.score(tokens, generated=True), expected), mesh


@pytest.mark.parametrize("kv_format", ["int8", "int16"])
def test_keys_of_ranks_lose_the_bias_of_their_own_heads_and_are_made_even(kv_format):
    model, tokens = MODELS["biases"](), tokens_of(4, 150)
    name = "blk.1.attn_k.weight"
    weight = model[1][name].dequantize()
    weight[::5] *= 64
    model[1][name] = QuantTensor.from_floats(weight, FORMATS["F32"])
    with cpu_backend(model, LEVEL, 16, kv_format=kv_format) as whole_backend:
        expected = whole_backend.score(tokens)
    for mesh in (*MESHES[:4], MESHES[-1], *KV_MESHES):
        with ThreadRanks(model, mesh, LEVEL, 16, kv_format=kv_format) as ranks:
            assert np.array_equal(ranks.score(tokens), expected), mesh


def test_traced_values_are_those_of_one_process():
    """A tap on rank 0 changes neither the layout of shared memory nor the order of barriers."""
    model, tokens = MODELS["experts"](), tokens_of(5, 60)
    normed = [op.output for op in model[0].ops if isinstance(op, RMSNorm)]
    names = [*model[0].layer_outputs, *normed, model[0].ops[-1].output]
    with cpu_backend(model, LEVEL, 16) as whole_backend:
        expected = whole_backend.trace(tokens, names)
    for mesh in MESHES:
        with ThreadRanks(model, mesh, LEVEL, 16, kept_values=names[:-1]) as ranks:
            for name, values in ranks.trace(tokens, names).items():
                assert np.array_equal(values, expected[name]), (name, mesh)


def test_rows_of_a_table_that_is_too_small_to_be_divided_are_gathered():
    program = decoder(replace(SPEC, vocab_size=30), residual_layer)
    model = (program, random_tensors(program))
    tokens, name = [token % 30 for token in tokens_of(3, 40)], program.ops[0].output
    with cpu_backend(model, LEVEL, 16) as whole_backend:
        expected = whole_backend.trace(tokens, [name])[name]
    with ThreadRanks(model, Mesh(row_parts=3), LEVEL, 16, kept_values=[name]) as ranks:
        assert np.array_equal(ranks.trace(tokens, [name])[name], expected)


def test_ranks_of_a_mixture_have_room_for_their_rows_and_experts():
    """One mesh divides few rows, which a rank prepares alone; the other divides many columns."""
    script = """
from msgspec.structs import replace
from support.cpu import greedy_request, run
from support.mixed_bits import mixed_bits
from support.programs import SPEC, random_tensors
from support.ranks import ThreadRanks
from twostroke.backends.cpu.library import choose_level
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import ExpertSpec
from twostroke.model.families.blocks import decoder, residual_layer
from twostroke.model.program.mesh import Mesh
for mesh, count, width, experts in (
    (Mesh(row_parts=7), 105, 64, ExpertSpec(40, 5, 32, normalize=False)),
    (Mesh(column_parts=(1, 1)), 4200, 256, ExpertSpec(16, 8, 32, normalize=False)),
):
    spec = replace(SPEC, num_layers=1, hidden_size=width, context_length=8192, experts=experts)
    program = decoder(spec, residual_layer)
    model, level = (program, random_tensors(program)), choose_level(None).level
    request = greedy_request([i * i % 250 for i in range(count)])
    request.pages = [list(range(270))]
    with ThreadRanks(model, mesh, level, 300, max_rows=count) as ranks:
        run(ranks, Slice(request, 0, count, samples=True))
print("whole")
"""
    checker = "libc_malloc_debug.so.0"  # of glibc: notices what was written after a block
    checks = {"LD_PRELOAD": checker, "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    environment = {**os.environ, **checks, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert done.stdout == b"whole\n", done.stderr


@pytest.mark.seeds(2)
def test_answers_are_those_of_one_process_in_any_schedule(seed, tmp_path):
    """Requests have chunks, prefix hits, preemptions and drafts, and many rows draw tokens.

    More rows draw than logits are held at once.
    """
    chance = random.Random(seed)
    family = chance.choice(families_on("cpu"))
    layers = {} if FAMILIES[family].wide else {"num_layers": 3}
    tiny = tiny_of(family, **layers, fmt=chance.choice(["Q4_1", "Q8_0", "F16"]))
    loaded = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    program = build_program(loaded.spec)
    model, kv_format = (program, loaded.tensors), chance.choice(["f16", "int8", "int16"])
    fewest = 8 * len(program.cache_groups)
    setting = replace(Setting.chosen_by(chance, fewest, 4 * fewest), max_running=50)
    setting = replace(setting, token_budget=max(setting.token_budget, 50))
    requests = random_requests(chance, 25, program.vocab_size, 90, 9)
    options = {"kv_format": kv_format, "num_states": NUM_STATES}
    with cpu_backend(model, LEVEL, 64, **options) as whole_backend:
        expected_answers, _ = run_schedule(
            whole_backend, setting, [fresh(r) for r in requests], 120
        )
    for mesh, post in ((chance.choice(MESHES), Post()), (random_mesh(chance), None)):
        with ThreadRanks(model, mesh, LEVEL, 64, post=post, **options) as ranks:
            answers, _ = run_schedule(
                ranks, setting, [fresh(r) for r in requests], 120, expected_answers
            )
            assert answers == expected_answers, (mesh, family)


@pytest.mark.seeds(2)
def test_pieces_on_several_ranks_give_the_answers_of_one_process(seed, monkeypatch):
    """Ranks exchange partial attention or keys and values, in one tile or in many."""
    chance = random.Random(seed)
    sizes = chance.choice([{"num_heads": 6, "num_kv_heads": 3}, {"head_dim": 48}])
    if chance.random() < 0.5:
        sizes |= {"num_layers": 3, "windows": (37, None, 100), "soft_cap": 4.0}
    model, kv_format = (
        tiny_model(fmt="Q8_0", **sizes),
        chance.choice(["f16", "bf16", "int8", "int16"]),
    )
    requests = random_requests(chance, 8, model[0].vocab_size, 440, 20)
    num_groups = len(model[0].cache_groups)
    setting = Setting.chosen_by(chance, 8 * num_groups, 12 * num_groups)
    setting = replace(setting, token_budget=max(setting.token_budget, 20))
    with cpu_backend(model, LEVEL, 64, kv_format=kv_format) as whole_backend:
        expected_answers, _ = run_schedule(
            whole_backend, setting.alone(64), [fresh(r) for r in requests], 500
        )
    for mesh in chance.sample(KV_MESHES, 2):
        # Small tiles cut the pieces of a row in many blocks.
        monkeypatch.setattr(layout, "_TILE_BYTES", chance.choice([0, 1 << 15, 4 << 20]))
        options = {"threads": chance.choice([1, 3]), "post": chance.choice([None, Post()])}
        with ThreadRanks(model, mesh, LEVEL, 12, kv_format=kv_format, **options) as ranks:
            answers, _ = run_schedule(
                ranks, setting, [fresh(r) for r in requests], 500, expected_answers
            )
        assert answers == expected_answers, mesh


def test_rows_that_see_nothing_of_a_later_tile_stay_as_they_are(monkeypatch):
    """Of two rows only the second sees the last KV split, which has a separate tile."""
    monkeypatch.setattr(layout, "_TILE_BYTES", 0)
    model, results = tiny_model(fmt="Q8_0", num_heads=8, num_kv_heads=1), []
    with (
        cpu_backend(model, LEVEL, 32) as whole_backend,
        ThreadRanks(model, Mesh(row_parts=2, kv_by_tokens=True), LEVEL, 4) as ranks,
    ):
        for backend, num_pages in ((whole_backend, 32), (ranks, 4)):
            request = greedy_request(tokens_of(6, 385), prompt_logprobs=3)
            request.pages = page_lists(backend, list(range(num_pages)))
            run(backend, Slice(request, 0, 383, samples=False))
            result = backend.run(StepPlan((Slice(request, 383, 2, samples=True, num_scored=1),)))
            results.append((result.tokens, result.logprobs, result.scores))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_states_of_ranks_follow_requests_on_any_schedule(kind):
    """Each rank keeps the states of its heads, and of the layers of its stage."""
    model, chance = MODELS[kind](), random.Random(kind)
    requests = random_requests(chance, 12, VOCAB_SIZE, 60, 12)
    setting = replace(Setting.chosen_by(chance, 8, 12), token_budget=32, max_running=16)
    with cpu_backend(model, LEVEL, 64, num_states=NUM_STATES) as whole_backend:
        expected_answers, _ = run_schedule(
            whole_backend, setting.alone(64), [fresh(r) for r in requests], 120
        )
    meshes = [Mesh(column_parts=(1, 1)), Mesh((1, 1)), chance.choice([*MESHES, *KV_MESHES])]
    for number, mesh in enumerate(meshes):
        options = {"num_states": NUM_STATES, "post": Post() if number % 2 else None}
        with ThreadRanks(model, mesh, LEVEL, 16, **options) as ranks:
            answers, _ = run_schedule(ranks, setting, [fresh(r) for r in requests], 120)
        assert answers == expected_answers, mesh


def test_ranks_have_their_share_of_recurrent_states():
    for program in (HYBRIDS["grouped"], HYBRIDS["tiled"]):
        whole_bytes = program.state_bytes
        for mesh in (Mesh(column_parts=(1, 1, 1)), Mesh((1, 1), 1, (2, 1))):
            parts = WeightShard(0, mesh, 16, None).parts(program)
            assert sum(part.program.state_bytes for part in parts) == whole_bytes, mesh
        twice = WeightShard(0, Mesh(row_parts=2), 16, None).parts(program)
        assert [part.program.state_bytes for part in twice] == [whole_bytes, whole_bytes]


def random_mesh(chance: random.Random) -> Mesh:
    """Return a random mesh of at most six ranks; some ranks may have nothing to compute."""
    stages, columns = chance.choice([((1,), (1, 5, 1)), ((2, 1), (1, 1)), ((1, 1, 1), (1, 2))])
    return Mesh(stages, 2 if len(stages) == 1 else 1, columns)


def test_a_link_without_shared_memory_moves_the_same_values():
    model, tokens = MODELS["experts"](), tokens_of(2, 40)
    with cpu_backend(model, LEVEL, 16) as whole_backend:
        expected = whole_backend.score(tokens)
    for mesh in MESHES[:4]:
        with ThreadRanks(model, mesh, LEVEL, 16, post=Post()) as ranks:
            assert np.array_equal(ranks.score(tokens), expected), mesh


def test_over_a_link_only_the_best_logit_of_a_greedy_row_goes_to_rank_0():
    model, tokens, post = tiny_model(), tokens_of(4, 20), Post()
    changes = [{}, {"logprobs": 0}, {"temperature": 1.0}, {"presence_penalty": 0.5}]
    results = []
    with (
        cpu_backend(model, LEVEL, 16) as whole_backend,
        ThreadRanks(model, Mesh(column_parts=(1, 1)), LEVEL, 16, post=post) as ranks,
    ):
        for backend in (whole_backend, ranks):
            requests = [greedy_request(tokens, **{"logprobs": None, **c}) for c in changes]
            for number, request in enumerate(requests):
                request.pages = page_lists(backend, [2 * number, 2 * number + 1])
            results.append(run(backend, *(Slice(r, 0, 20, samples=True) for r in requests)))
    assert results[0] == results[1]
    (part,) = [op.width for op in ranks.parts[1].program.ops if isinstance(op, Logits)]
    assert post.sent == [8 + 3 * 4 * part]


@pytest.mark.parametrize("mesh", [Mesh(column_parts=(1, 1)), Mesh(stages=(1, 1))])
def test_an_abort_ends_the_wait_for_a_rank_that_stalls(mesh):
    model, tokens = MODELS["llama"](), tokens_of(3, 20)
    chance = random.Random(4)
    with ThreadRanks(model, mesh, LEVEL, 16) as ranks:
        expected = ranks.score(tokens)
        for _ in range(10):
            stalled, go = chance.randrange(2), threading.Event()
            errors = []

            def step(rank, stalled=stalled, go=go, errors=errors):
                if rank == stalled:
                    go.wait()
                    return
                try:
                    ranks.plans[rank].evaluate(
                        ranks.lowered[rank], tokens, None, [], generated=False, has_logits=True
                    )
                except RanksLostError:
                    errors.append(rank)
                finally:
                    go.set()

            waiting = threading.Thread(target=ranks.together, args=[step])
            waiting.start()
            time.sleep(chance.choice([0, 0.02]))
            ranks.abort()
            waiting.join(5)
            assert not waiting.is_alive()
            # The first stage waits for nobody.
            assert errors or (len(mesh.stages) > 1 and stalled == 0)
            ranks.reset()
            assert np.array_equal(ranks.score(tokens), expected)
