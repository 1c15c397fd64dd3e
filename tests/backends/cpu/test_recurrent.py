"""Recurrent layers on the cpu backend: close to the reference, the same tokens on any schedule."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from support.closeness import divergence
from support.cpu import LEVELS, cpu_backend, greedy_request, page_lists, run
from support.native import IS_ARM, VECTOR_LEVELS, load_level
from support.programs import MIXERS, VOCAB_SIZE, hybrid_program, random_tensors
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.create import check_backend
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import BackendError
from twostroke.core.options import ComputeOptions, EngineOptions
from twostroke.core.request import NO_STATE
from twostroke.core.step import Slice
from twostroke.engine.scheduler import Continuous

NUM_PAGES, NUM_STATES, CONTEXT = 300, 80, 500
SHAPES = {
    "grouped": {},
    "tiled": {"is_tiled": True},
    "large": {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 128, "value_dim": 128},
    "middle": {"num_value_heads": 4, "key_dim": 64, "value_dim": 64, "kernel": 2},
    "odd": {"num_value_heads": 2, "key_dim": 10, "value_dim": 23, "kernel": 3},
    "convolution": {"mixer": "convolution"},
    "biased convolution": {"mixer": "convolution", "kernel": 4, "has_bias": True},
    "mamba": {"mixer": "mamba"},
    "large mamba": {"mixer": "mamba", "num_heads": 4, "state_size": 128, "head_dim": 64},
    "odd mamba": {"mixer": "mamba", "num_groups": 3, "state_size": 10, "head_dim": 23}
    | {"has_bias": True, "has_convolution_bias": False, "min_step": 0.3, "max_step": 0.9},
}


@cache
def expected_of(shape):
    """Return a model with recurrent layers, a sequence, and its logits by the reference backend."""
    program = hybrid_program(**SHAPES[shape])
    tensors = random_tensors(program, "Q8_0", "Q8_0")
    tokens = np.random.default_rng(5).integers(0, VOCAB_SIZE, 700).tolist()
    backend = ReferenceBackend(program, tensors, 50, 16, num_states=2)
    return (program, tensors), tokens, backend.score(tokens)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", LEVELS)
def test_hybrid_models_agree_with_the_reference(level, shape):
    load_level(level)
    model, tokens, expected = expected_of(shape)
    with cpu_backend(model, level, 50) as backend:
        for generated in (False, True):
            actual = backend.score(tokens, generated=generated)
            tiles = level.startswith("amx") and not generated
            mean_kl, same = divergence(expected, actual)
            assert mean_kl < (5e-3 if tiles else 5e-6)
            assert same > (0.9 if tiles else 0.98)


@pytest.mark.parametrize(
    ("attends", "mixer"),
    [((False, False), "delta"), *(((False, False, True, False), mixer) for mixer in MIXERS)],
)
@pytest.mark.parametrize("level", LEVELS)
def test_tokens_do_not_depend_on_the_schedule(level, attends, mixer):
    load_level(level)
    program = hybrid_program(attends, mixer)
    model = program, random_tensors(program, "Q8_0", "Q8_0")
    chance = random.Random(7)
    requests = random_requests(chance, 8, VOCAB_SIZE, longest=50, most_output=20)
    settings = [Setting.chosen_by(chance, 5, 10) for _ in range(3)]
    settings.append(Setting(5, 64, 32, prefix_cache=True, policy=Continuous()))
    settings += [replace(settings[-1], draft_seed=seed, num_pages=50) for seed in range(2)]
    with cpu_backend(model, level, NUM_PAGES, threads=1, num_states=NUM_STATES) as backend:
        alone = settings[0].alone(NUM_PAGES)
        expected, _ = run_schedule(backend, alone, [fresh(r) for r in requests], CONTEXT)
    num_preemptions = num_drafted = num_accepted = 0
    with cpu_backend(model, level, NUM_PAGES, threads=3, num_states=NUM_STATES) as backend:
        for setting in settings:
            copies = [fresh(request) for request in chance.sample(requests, len(requests))]
            answers, count = run_schedule(backend, setting, copies, CONTEXT, expected)
            assert answers == expected, setting
            num_preemptions += count
            num_drafted += sum(request.num_drafted for request in copies)
            num_accepted += sum(request.num_accepted for request in copies)
    assert num_preemptions > 0
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("shape", ["large", "odd", "convolution", "large mamba", "odd mamba"])
@pytest.mark.parametrize("level", VECTOR_LEVELS)
def test_levels_and_threads_agree_bit_for_bit(level, shape):
    best = VECTOR_LEVELS[-1]
    if level == "portable" and not IS_ARM:
        pytest.skip("portable x86 rounds twice where the others fuse")
    model, tokens, _ = expected_of(shape)
    with (
        cpu_backend(model, level, 50, threads=3) as backend,
        cpu_backend(model, best, 50, threads=1) as other,
    ):
        actual = backend.score(tokens, generated=True)
        assert np.array_equal(actual, other.score(tokens, generated=True))


def test_slots_that_do_not_exist_are_refused():
    model, tokens, _ = expected_of("grouped")
    with cpu_backend(model, LEVELS[0], 50, num_states=3) as backend:
        assert backend.facts.num_states == 3
        request = greedy_request(tokens[:10])
        request.pages = page_lists(backend, [0])
        for read, write in [(NO_STATE, 3), (3, 0), (-2, 0), (0, NO_STATE)]:
            part = Slice(request, 0, 10, samples=True, read_state=read, write_state=write)
            with pytest.raises(BackendError, match="recurrent state"):
                run(backend, part)
        for slots in [(1, 3), (1, -2), (1, NO_STATE)]:
            part = Slice(request, 0, 10, True, drafts=(1, 2), write_state=0, draft_states=slots)
            with pytest.raises(BackendError, match="recurrent state"):
                run(backend, part)
        run(backend, Slice(request, 0, 10, samples=True, write_state=2))


@pytest.mark.parametrize("level", LEVELS)
def test_prompt_and_generated_rows_of_a_request_in_one_step(level):
    """After a preemption, a slice has rows of both kinds, which the AMX level computes apart."""
    model, tokens, _ = expected_of("grouped")
    with cpu_backend(model, level, 50, num_states=6) as backend:
        request = greedy_request(tokens[:40])
        request.num_prompt = 30
        request.pages = page_lists(backend, [0, 1, 2])
        other = greedy_request(tokens[100:120])
        other.pages = page_lists(backend, [3, 4])
        run(backend, Slice(request, 0, 30, samples=False, write_state=0))
        separate_tokens = run(
            backend, Slice(request, 30, 10, samples=True, read_state=0, write_state=1)
        )
        whole_prompt = Slice(request, 0, 40, samples=True, write_state=2)
        alone = run(backend, whole_prompt)
        together = run(backend, Slice(other, 0, 20, samples=True, write_state=3), whole_prompt)
        assert separate_tokens == alone == together[1:]


@pytest.mark.parametrize(
    "shape", ["grouped", "large", "odd", "biased convolution", "large mamba", "odd mamba"]
)
@pytest.mark.parametrize("level", LEVELS)
def test_states_after_drafts_are_those_of_drawn_tokens(level, shape):
    """The state after each draft is, bit for bit, that of a step which ends there."""
    model, tokens, _ = expected_of(shape)
    num_drafts = 11  # more rows than a kernel computes together
    with cpu_backend(model, level, 50, num_states=NUM_STATES) as backend:
        request = greedy_request(tokens[:20])
        request.num_prompt = 17
        request.pages = page_lists(backend, [0, 1, 2])
        drafts = tuple(tokens[20 : 20 + num_drafts])
        slots = tuple(range(1, 1 + num_drafts))
        with_drafts = Slice(
            request, 0, 20, samples=True, drafts=drafts, write_state=0, draft_states=slots
        )
        drawn_tokens = run(backend, with_drafts)
        for number in range(num_drafts):
            request.tokens.append(drafts[number])
            write_state = 30 + number
            read_state = write_state - 1 if number else 0
            end = len(request.tokens) - 1
            alone = run(
                backend,
                Slice(request, end, 1, True, read_state=read_state, write_state=write_state),
            )
            assert alone == [drawn_tokens[1 + number]]
            request.tokens.append(7)
            after_draft, after_token = (
                run(backend, Slice(request, end + 1, 1, True, read_state=slot, write_state=60))
                for slot in (slots[number], write_state)
            )
            assert after_draft == after_token
            del request.tokens[-1]


def test_backends_without_recurrent_layers_are_named():
    program = hybrid_program()
    with pytest.raises(BackendError, match="the backend gpu cannot compute yet"):
        check_backend(EngineOptions(ComputeOptions("gpu")), program, print)
    for name in ("auto", "cpu", "reference", "torch"):
        check_backend(EngineOptions(ComputeOptions(name)), program, print)
