"""The cpu backend agrees with the reference, on tiny random models and on a real model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from support.closeness import divergence
from support.cpu import LEVELS, cpu_backend, tiny_model
from support.heldout import heldout_pieces
from support.native import load_level
from support.operations import NUM_IDS, OPS, input_width
from support.programs import PROGRAMS, random_tensors
from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import families_on
from twostroke.backends.reference import ReferenceBackend
from twostroke.model.families import build_program
from twostroke.model.program import Activation, Program
from twostroke.model.program.ops import (
    Add,
    Attention,
    Embed,
    ExpertTerms,
    ExternalInput,
    GatedActivation,
    Linear,
    Logits,
    RMSNorm,
    Rope,
    Scale,
    SharedKvAttention,
    SumTerms,
    TakeColumns,
)
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

SIZES = [
    {"fmt": "Q4_1", "embedding_fmt": "Q8_0"},
    {"fmt": "Q4_0", "embedding_fmt": "F16", "tied": False},
    {"fmt": "F32"},
    {"fmt": "BF16", "num_heads": 3, "num_kv_heads": 3, "head_dim": 48, "hidden_size": 80},
    {"fmt": "Q8_0", "num_heads": 8, "num_kv_heads": 1, "ffn_size": 96},
    {"fmt": "F16", "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "windows": (70, None)},
    {"fmt": "F32", "head_dim": 96, "soft_cap": 2.0, "num_layers": 3, "windows": (1, 33, 64)},
    {"fmt": "F32", "num_heads": 32, "num_kv_heads": 1, "head_dim": 80, "soft_cap": 50.0},
]


def tokens_of(seed, length, end=250):
    return np.random.default_rng(seed).integers(0, end, length).tolist()


@cache  # the reference is slow, and the same for every level
def expected_logits(index):
    """Return the model of SIZES[place], and its logits by the reference backend."""
    program, tensors = tiny_model(**SIZES[index])
    return (program, tensors), ReferenceBackend(program, tensors, 1, 16).score(tokens_of(0, 200))


@pytest.mark.parametrize("index", range(len(SIZES)), ids=map(str, SIZES))
@pytest.mark.parametrize("level", LEVELS)
def test_tiny_models_agree_with_the_reference(level, index):
    load_level(level)
    model, expected = expected_logits(index)
    with cpu_backend(model, level, 4) as backend:
        actual = backend.score(tokens_of(0, 200))
    mean_kl, same = divergence(expected, actual)
    # Random logits are close to each other: bfloat16 swaps some that lead by a hair.
    assert mean_kl < (1e-3 if level.startswith("amx") else 1e-5)
    assert same > (0.9 if level.startswith("amx") else 0.97)


@cache
def expected_layers(kind, fmt):
    """Return a model of PROGRAMS, and its layers' values and logits by the reference backend."""
    program = PROGRAMS[kind]
    tensors = random_tensors(program, fmt, fmt)
    values = [name for name in program.value_widths if name[0] in "hxl"]
    expected = ReferenceBackend(program, tensors, 1, 16).trace(tokens_of(2, 150), values)
    return (program, tensors), expected


@pytest.mark.parametrize("fmt", ["F32", "Q8_0"])
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("level", LEVELS)
def test_layers_of_every_kind_agree_with_the_reference(level, kind, fmt):
    load_level(level)
    model, expected = expected_layers(kind, fmt)
    with cpu_backend(model, level, 4) as backend:
        for generated in (False, True):
            actual = backend.trace(tokens_of(2, 150), list(expected), generated=generated)
            tiles = level.startswith("amx") and not generated
            for name in expected:
                differences = np.abs(actual[name] - expected[name]).max(axis=1)
                # Where two experts' scores are all but equal, a hair decides which is chosen.
                typical_difference = np.quantile(differences, 0.8 if "experts" in kind else 1)
                assert (
                    typical_difference < (6e-2 if tiles else 5e-3) * np.abs(expected[name]).max()
                ), name
            if "experts" in kind:
                continue
            mean_kl, same = divergence(expected["logits"], actual["logits"])
            assert mean_kl < (1e-3 if tiles else 1e-5)
            assert same > (0.9 if tiles else 0.97)


def with_orders(program, tensors, is_shared):
    """Give each matrix a permutation of its inputs: one for each width, or one for each matrix."""
    tables = {op.table for op in program.ops if isinstance(op, Embed)}
    matrices = [n for n, t in tensors.items() if len(t.shape) == 2 and n not in tables]
    ordered_tensors = dict(tensors)
    for seed, name in enumerate(matrices):
        width = tensors[name].shape[-1]
        order = np.random.default_rng(0 if is_shared else seed).permutation(width)
        ordered_tensors[name] = replace(tensors[name], order=order.astype(np.int32))
    return ordered_tensors


@cache
def expected_of_orders(kind, is_shared):
    """Return a model whose matrices have permuted inputs, and the reference backend's values."""
    program = PROGRAMS[kind]
    tensors = with_orders(program, random_tensors(program, "Q8_0", "Q8_0"), is_shared)
    values = [name for name in program.value_widths if name[0] in "hxl"]
    expected = ReferenceBackend(program, tensors, 1, 16).trace(tokens_of(2, 60), values)
    return (program, tensors), expected


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("level", LEVELS)
def test_inputs_are_gathered_in_the_order_of_columns(level, kind, is_shared):
    load_level(level)
    model, expected = expected_of_orders(kind, is_shared)
    with cpu_backend(model, level, 4) as backend:
        for generated in (False, True):
            actual = backend.trace(tokens_of(2, 60), list(expected), generated=generated)
            tiles = level.startswith("amx") and not generated
            for name in expected:
                differences = np.abs(actual[name] - expected[name]).max(axis=1)
                typical_difference = np.quantile(differences, 0.8 if "experts" in kind else 1)
                assert (
                    typical_difference < (6e-2 if tiles else 5e-3) * np.abs(expected[name]).max()
                ), name


@pytest.fixture(scope="module", params=families_on("cpu"))
def family(request, tmp_path_factory):
    """A tiny model of a family, and its values by the reference backend."""
    sizes = replace(tiny_of(request.param), fmt="Q8_0", embedding_fmt="Q8_0")
    loaded = load_path(write_tiny_gguf(tmp_path_factory.mktemp("family") / "tiny.gguf", sizes))
    program = build_program(loaded.spec)
    expected = ReferenceBackend(program, loaded.tensors, 1, 16).score(tokens_of(3, 100, 285))
    return (program, loaded.tensors), loaded.spec, expected


@pytest.mark.parametrize("level", LEVELS)
def test_tiny_models_of_every_family_agree_with_the_reference(level, family):
    model, spec, expected = family
    with cpu_backend(model, level, 8, num_states=2) as backend:
        for generated in (False, True):
            tiles = level.startswith("amx") and not generated
            actual = backend.score(tokens_of(3, 100, 285), generated=generated)
            mean_kl, same = divergence(expected, actual)
            # A router's Program has precise products: a hair decides whom it chooses. Where the
            # choice differs, all later rows differ if the model has recurrent states.
            remembers = spec.experts is not None and spec.attends is not None
            assert mean_kl < (5e-3 if remembers else 1e-3)
            # AMX rounds the products of experts, which in gpt-oss are most of a layer's output.
            rounds = tiles and (spec.experts is None or spec.experts.has_biases)
            assert same > (0.9 if remembers or rounds else 0.97)


@cache
def expected_with_windows():
    """Return a model with a sliding window, and its logits by the reference backend."""
    program, tensors = tiny_model(head_dim=64, windows=(50, None))
    expected = ReferenceBackend(program, tensors, 26, 16).score(tokens_of(0, 200))
    return (program, tensors), expected


@pytest.mark.parametrize(
    ("kv_format", "most_kl"), [("bf16", 1e-4), ("int16", 1e-5), ("int8", 1e-3)]
)
@pytest.mark.parametrize("level", LEVELS)
def test_keys_and_values_in_fewer_bits_stay_close_to_the_reference(level, kv_format, most_kl):
    load_level(level)
    model, expected = expected_with_windows()
    with cpu_backend(model, level, 4, kv_format=kv_format) as backend:
        actual = backend.score(tokens_of(0, 200), generated=True)
    mean_kl, same = divergence(expected, actual)
    assert 0 < mean_kl < most_kl
    assert same > 0.9


@cache
def expected_with_a_large_bias():
    """Return a model whose keys have a large bias, and its values by the reference backend."""
    program = PROGRAMS["biases"]
    tensors = dict(random_tensors(program))
    slow = [31, 15, 47]  # one of each head's pairs that hardly turn
    for name in [name for name in tensors if name.endswith("attn_k.bias")]:
        bias = tensors[name].dequantize()
        bias[slow] += 40
        tensors[name] = QuantTensor.from_floats(bias, FORMATS["F32"])
    expected = ReferenceBackend(program, tensors, 14, 16).score(tokens_of(0, 200))
    return (program, tensors), expected


@pytest.mark.parametrize("level", LEVELS)
def test_int8_keys_do_not_suffer_from_a_large_bias(level):
    load_level(level)
    model, expected = expected_with_a_large_bias()
    with cpu_backend(model, level, 14, kv_format="int8") as backend:
        actual = backend.score(tokens_of(0, 200), generated=True)
    mean_kl, _ = divergence(expected, actual)
    assert mean_kl < 1e-4


def odd_program():
    """Return a Program whose operations cannot be fused, with biases and both kinds of RoPE."""
    width, heads, dim = 64, 4, 16
    frequencies = tuple(10.0**-i for i in range(dim // 2))
    ops = (
        Embed("x", "table", 100, width),
        Linear("q", "x", "wq", width, width, "bq"),
        Linear("k", "x", "wk", width, width // 2, "bk"),
        Linear("v", "x", "wk", width, width // 2),
        RMSNorm("qn", "q", "dim_norm", width, 1e-6, heads),
        Rope("qr", "qn", heads, dim, frequencies, interleaved=False, magnitude=1.1),
        Rope("kr", "k", heads // 2, dim, frequencies[:4], interleaved=False),
        Attention("a", "qr", "kr", "v", 0, heads, heads // 2, dim, 0.3),
        Add("h", "a", "x", width),
        Linear("gate", "h", "wq", width, width),
        GatedActivation("act_raw", "gate", "h", width, Activation.GELU_TANH),
        Scale("act", "act_raw", width, 0.75),
        Rope("act_turned", "act", heads, dim, frequencies, interleaved=True),
        RMSNorm("n", "act_turned", "norm", width, 1e-5),
        Linear("f", "n", "wq", width, width),
        Linear("g", "n", "wq", width, width, "bq"),
        Add("s", "f", "x", width),
        Add("t", "s", "g", width),
        Linear("w", "t", "wq", width, width),
        Add("y", "x", "w", width),  # not in place: x is read again
        Add("z", "y", "x", width),
        RMSNorm("zn", "z", "norm", width, 1e-5, offset=0.5),
        Add("u", "z", "zn", width),  # not in place: z is read twice
        Logits("logits", "u", "table", width, 100, 20.0),
    )
    return Program("odd", ops, 100, 256)


@pytest.mark.parametrize("level", LEVELS)
def test_operations_that_are_not_fused_agree_with_the_reference(level):
    rng = np.random.default_rng(1)
    program = odd_program()
    tensors = {
        name: QuantTensor.from_floats(
            (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32), FORMATS["F32"]
        )
        for name, shape in program.weight_shapes.items()
    }
    tokens = rng.integers(0, 100, 90).tolist()
    with cpu_backend((program, tensors), level, 8) as backend:
        actual = backend.score(tokens)
    expected = ReferenceBackend(program, tensors, 1, 16).score(tokens)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def program_around(op):
    """Return a Program in which an operation writes the value "out" from random inputs."""
    embed = Embed("embedded", "embedding", NUM_IDS, 64)
    inputs = [
        Linear(name, "embedded", f"{name}.weight", 64, input_width(op, name))
        for name in dict.fromkeys(op.inputs)
    ]
    last = () if isinstance(op, Logits) else (Logits("logits", "embedded", "head", 64, NUM_IDS),)
    return Program("one", (embed, *inputs, op, *last), NUM_IDS, 64)


@cache
def expected_alone(index):
    """Return a model around OPS[place], and the operation's result by the reference backend."""
    program = program_around(OPS[index])
    tensors = random_tensors(program)
    tokens = tokens_of(4, 40, NUM_IDS)
    expected = ReferenceBackend(program, tensors, 3, 16).trace(tokens, ["out"])["out"]
    return (program, tensors), expected


@pytest.mark.parametrize("level", LEVELS)
def test_each_operation_alone_agrees_with_the_reference(level):
    load_level(level)
    tokens = tokens_of(4, 40, NUM_IDS)
    for index, op in enumerate(OPS):
        # For the first see test_external_input.py, for the second tests of whole Programs; the
        # others are operations of ranks.
        ranks = ExpertTerms | SumTerms | TakeColumns
        if isinstance(op, ExternalInput | SharedKvAttention | ranks):
            continue
        model, expected = expected_alone(index)
        with cpu_backend(model, level, 3) as backend:
            for generated in (False, True):
                actual = backend.trace(tokens, ["out"], generated=generated)["out"]
                atol = 4e-3 * np.abs(expected).max()
                np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=str(op))


@pytest.fixture(scope="module")
def real(smollm2_path):
    """The real model, tokens of held-out text, and the reference backend's logits."""
    loaded = load_path(smollm2_path)
    program = build_program(loaded.spec)
    tokens = heldout_pieces(loaded, 64)[0]
    expected = ReferenceBackend(program, loaded.tensors, 1, 16).score(tokens)
    return (program, loaded.tensors), tokens, expected


@pytest.mark.model
@pytest.mark.parametrize("level", LEVELS)
def test_the_real_model_agrees_with_the_reference(level, real):
    model, tokens, expected = real
    with cpu_backend(model, level, 16) as backend:
        mean_kl, same = divergence(expected, backend.score(tokens))
    assert mean_kl < 1e-3
    assert same >= 0.98
