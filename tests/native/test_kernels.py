"""The executor's kernels against NumPy twins, on each instruction-set level."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import numpy as np
import pytest

from support.native import load_level

LEVELS = ("portable", "avx2", "avx512", "amx_emulated", "amx")


class AttentionArguments(ctypes.Structure):
    """`TsAttention` of native/kernels/c_interface.cpp."""

    _fields_ = (
        ("pages", c_void_p),
        ("page_table", c_void_p),
        ("page_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("group", c_int64),
        ("position", c_int64),
        ("num_rows", c_int64),
        ("split", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


@pytest.fixture(params=LEVELS)
def library(request):
    return load_level(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def address(array):
    return c_void_p(array.ctypes.data)


def floats(values):
    return np.ascontiguousarray(values, np.float32)


def test_exp2_is_right_to_a_millionth_and_exact_where_it_must_be(library, rng):
    x = floats(np.concatenate([rng.uniform(-126, 0, 4000), rng.uniform(-1, 1, 4096), [0] * 16]))
    out = np.empty_like(x)
    library.ts_kernel_exp2(address(x), address(out), c_int64(x.size))
    assert np.abs(out[: x.size // 16 * 16] / np.exp2(x.astype(np.float64)) - 1).max() < 2e-7
    assert np.all(out[-16:] == 1)
    edges = floats([-np.inf, -1e30, -126.5, 300, np.nan] + [0] * 11)
    out = np.empty_like(edges)
    library.ts_kernel_exp2(address(edges), address(out), c_int64(16))
    assert np.all(out[:3] == 0)
    assert out[3] == 2.0**127
    assert np.isnan(out[4])


def test_tanh_is_right_to_a_millionth_however_small(library, rng):
    x = floats(np.concatenate([rng.uniform(-12, 12, 4096), 10.0 ** rng.uniform(-30, 0, 4096)]))
    x[::3] *= -1
    out = np.empty_like(x)
    library.ts_kernel_tanh(address(x), address(out), c_int64(x.size))
    assert np.abs(out / np.tanh(x.astype(np.float64)) - 1).max() < 4e-7
    edges = floats([0.0, 30, -30, 3e38, -np.inf, np.inf, np.nan] + [0] * 9)
    out = np.empty_like(edges)
    library.ts_kernel_tanh(address(edges), address(out), c_int64(16))
    assert np.array_equal(out[:6], [0, 1, -1, 1, -1, 1])
    assert np.isnan(out[6])


def test_float16_rounds_as_numpy_does(library):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1].astype(np.float64) + halves[1:]) / 2  # ties, and their neighbours
    x = floats(np.concatenate([halves, between, np.nextafter(floats(between), np.float32(1e9))]))
    x = floats(np.concatenate([x, -x])[: 2 * x.size // 16 * 16])
    out = np.empty(x.size, np.uint16)
    library.ts_kernel_halves(address(x), address(out), c_int64(x.size))
    assert np.array_equal(out, x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("width", [1, 15, 16, 64, 100, 576, 2048])
def test_rms_norm_is_as_its_formula(library, rng, width):
    x, weight = floats(rng.normal(size=width) * 30), floats(rng.normal(size=width))
    out = np.empty_like(x)
    library.ts_kernel_rms_norm(
        address(x), address(weight), c_int64(width), c_float(1e-5), address(out)
    )
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide * wide) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("activation", "formula", "spread"), [(0, silu, 40), (1, gelu_tanh, 4)])
@pytest.mark.parametrize("width", [1, 16, 50, 1536])
def test_gated_activation_is_as_its_formula(library, rng, width, activation, formula, spread):
    gate, up = floats(rng.normal(size=width) * spread), floats(rng.normal(size=width))
    out = np.empty_like(gate)
    library.ts_kernel_gate(
        c_int32(activation), address(gate), address(up), c_int64(width), address(out)
    )
    expected = formula(gate.astype(np.float64)) * up
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("activation", [0, 1])
def test_gated_activation_of_any_input_is_no_surprise(library, activation):
    gate = floats([0, -0.0, 1e30, -1e30, 3e38, -1e5, np.inf, np.nan, *np.full(8, 1e-30)])
    up, out = np.ones_like(gate), np.empty_like(gate)
    library.ts_kernel_gate(
        c_int32(activation), address(gate), address(up), c_int64(16), address(out)
    )
    expected = floats([0, 0, 1e30, 0, 3e38, 0, np.inf, np.nan, *np.full(8, 5e-31)])
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("width", [1, 16, 50, 4096])
def test_soft_cap_is_as_its_formula(library, rng, width, cap):
    x = floats(rng.normal(size=width) * 10.0 ** rng.uniform(-6, 4, width))
    capped = x.copy()
    library.ts_kernel_soft_cap(address(capped), c_float(cap), c_int64(width))
    np.testing.assert_allclose(capped, cap * np.tanh(x.astype(np.float64) / cap), rtol=5e-7)
    assert np.abs(capped).max() <= cap


def test_soft_cap_keeps_zero_and_nan_and_ends_at_the_cap(library):
    x = floats([0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-42, *np.zeros(8)])
    library.ts_kernel_soft_cap(address(x), c_float(30), c_int64(16))
    np.testing.assert_array_equal(x[:7], floats([0, 0, 30, -30, np.nan, 30, -30]))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "num_pairs"), [(16, 8), (64, 32), (80, 40), (64, 12)])
def test_rope_turns_pairs_and_leaves_the_rest(library, rng, interleaved, head_dim, num_pairs):
    frequencies = 10000.0 ** (-np.arange(num_pairs) / num_pairs)
    heads = floats(rng.normal(size=(3, head_dim)))
    position, magnitude = 1234, 1.25
    turned = heads.copy()
    library.ts_kernel_rope(
        address(frequencies), c_int32(num_pairs), c_int32(interleaved), c_double(magnitude),
        c_int32(head_dim), c_int64(position), address(turned), c_int64(heads.size),
    )  # fmt: skip
    cosine = np.cos(position * frequencies) * magnitude
    sine = np.sin(position * frequencies) * magnitude
    low = slice(0, 2 * num_pairs, 2) if interleaved else slice(0, num_pairs)
    high = slice(1, 2 * num_pairs, 2) if interleaved else slice(num_pairs, 2 * num_pairs)
    expected = heads.astype(np.float64)
    expected[:, low] = heads[:, low] * cosine - heads[:, high] * sine
    expected[:, high] = heads[:, low] * sine + heads[:, high] * cosine
    np.testing.assert_allclose(turned, expected, rtol=1e-6, atol=1e-6)


class Context:
    """Keys and values of one request in pages whose other contents are NaN."""

    def __init__(self, library, rng, page_size, kv_heads, group, head_dim, length):
        self.library, self.length, self.group = library, length, group
        shape = (length, kv_heads, head_dim)
        self.keys, self.values = floats(rng.normal(size=shape)), floats(rng.normal(size=shape))
        num_pages = -(-length // page_size)
        self.table = rng.permutation(2 * num_pages).astype(np.int32)[:num_pages]
        page_values = 2 * page_size * kv_heads * head_dim
        self.pages = np.full(2 * num_pages * page_values, np.nan, np.float16)
        self.arguments = AttentionArguments(
            self.pages.ctypes.data, self.table.ctypes.data, page_size, kv_heads, head_dim, group,
            0, length, 0, 0, head_dim**-0.5, 0,
        )  # fmt: skip
        library.ts_kernel_store(
            ctypes.byref(self.arguments), address(self.keys), address(self.values)
        )

    def see(self, window=None, soft_cap=None):
        """Let the rows see so many keys, their scores capped."""
        self.arguments.window, self.arguments.soft_cap = window or 0, soft_cap or 0
        return self

    def attend(self, q, position, split=0):
        """Attention of rows q (rows, heads, head_dim) from `position` on.

        Pages that no row sees are not there.
        """
        a = self.arguments
        a.position, a.num_rows, a.split = position, len(q), split
        seen = slice(
            self.first_seen(position) // a.page_size, -(-(position + len(q)) // a.page_size)
        )
        table = np.full_like(self.table, -(10**9))
        table[seen] = self.table[seen]
        a.page_table = table.ctypes.data
        q = floats(q)
        out = np.full_like(q, np.nan)
        self.library.ts_kernel_attention(ctypes.byref(a), address(q), address(out))
        a.page_table = self.table.ctypes.data
        return out

    def first_seen(self, position):
        window = self.arguments.window
        return max(0, position - window + 1) if window else 0

    def expected(self, q, position):
        k = self.keys.astype(np.float16).astype(np.float64)
        v = self.values.astype(np.float16).astype(np.float64)
        out = np.empty(q.shape)
        for row in range(len(q)):
            seen = slice(self.first_seen(position + row), position + row + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // self.group] @ q[row, head] * q.shape[2] ** -0.5
                if cap := self.arguments.soft_cap:
                    scores = cap * np.tanh(scores / cap)
                shares = np.exp(scores - scores.max())
                out[row, head] = shares / shares.sum() @ v[seen, head // self.group]
        return out


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "group", "head_dim"),
    [(16, 3, 3, 64), (32, 1, 1, 16), (64, 2, 7, 128), (16, 2, 4, 80), (16, 1, 4, 256)],
)
def test_attention_is_as_its_formula(library, rng, page_size, kv_heads, group, head_dim):
    context = Context(library, rng, page_size, kv_heads, group, head_dim, 300)
    for position, num_rows in ((0, 1), (0, 70), (63, 2), (64, 1), (250, 50), (299, 1)):
        q = floats(rng.normal(size=(num_rows, kv_heads * group, head_dim)) * 3)
        out = context.attend(q, position)
        np.testing.assert_allclose(out, context.expected(q, position), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 17, 63, 64, 65, 150, 299])
def test_a_window_and_a_cap_are_as_their_formulas(library, rng, window, soft_cap):
    for page_size, group, head_dim in ((16, 5, 32), (64, 1, 112)):
        context = Context(library, rng, page_size, 1, group, head_dim, 300).see(window, soft_cap)
        for position, num_rows in ((0, 1), (0, 70), (63, 2), (64, 1), (210, 90), (299, 1)):
            q = floats(rng.normal(size=(num_rows, group, head_dim)) * 3)
            out = context.attend(q, position)
            np.testing.assert_allclose(out, context.expected(q, position), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, None), (1, None), (40, 3.0), (64, None), (100, 30.0)]
)
def test_attention_of_a_row_has_the_same_bits_however_it_is_computed(
    library, rng, window, soft_cap
):
    context = Context(library, rng, 16, 2, 3, 64, 400).see(window, soft_cap)
    q = floats(rng.normal(size=(400, 6, 64)) * 3)
    whole = context.attend(q, 0)
    for row in (0, 15, 16, 63, 64, 65, 127, 128, 200, 399):
        assert np.array_equal(context.attend(q[row : row + 1], row)[0], whole[row])
        assert np.array_equal(context.attend(q[row : row + 1], row, split=2)[0], whole[row])
    for start, end in ((0, 7), (60, 70), (100, 133), (128, 400)):
        assert np.array_equal(context.attend(q[start:end], start), whole[start:end])
        assert np.array_equal(context.attend(q[start:end], start, split=1), whole[start:end])


def test_attention_does_not_see_where_its_pages_lie(library):
    outputs = []
    for seed, page_size in ((1, 16), (2, 16), (3, 32), (4, 64)):
        context = Context(library, np.random.default_rng(7), page_size, 2, 2, 32, 150)
        order = np.random.default_rng(seed).permutation(len(context.table)).astype(np.int32)
        context.table[:] = order
        library.ts_kernel_store(
            ctypes.byref(context.arguments), address(context.keys), address(context.values)
        )
        q = floats(np.random.default_rng(8).normal(size=(20, 4, 32)))
        outputs.append(context.attend(q, 130))
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def test_values_beyond_float16_are_saturated_not_spread(library, rng):
    context = Context(library, rng, 16, 1, 1, 16, 64)
    q = floats(rng.normal(size=(40, 1, 16)))
    before = context.attend(q, 0)
    context.values[41:] = np.inf
    context.values[45] = np.nan
    a = context.arguments
    a.position, a.num_rows = 0, 64
    library.ts_kernel_store(ctypes.byref(a), address(context.keys), address(context.values))
    assert np.array_equal(context.attend(q, 0), before)
    assert np.all(np.isfinite(context.attend(floats(rng.normal(size=(64, 1, 16))), 0)))


def choose_experts(library, scores, num_used, normalize):
    scores = floats(scores)
    chosen, shares = np.zeros(num_used, np.int32), np.zeros(num_used, np.float32)
    library.ts_kernel_choose_experts(
        address(scores), c_int64(scores.size), c_int64(num_used), c_int32(normalize),
        address(chosen), address(shares),
    )  # fmt: skip
    return chosen, shares


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "num_used"), [(1, 1), (8, 2), (16, 16), (60, 4), (128, 8)])
def test_experts_are_chosen_by_their_scores(library, rng, num_experts, num_used, normalize):
    for _ in range(50):
        scores = floats(rng.normal(size=num_experts) * 4).round(int(rng.integers(0, 3)))
        chosen, shares = choose_experts(library, scores, num_used, normalize)
        expected = np.argsort(-scores, kind="stable")[:num_used]
        assert np.array_equal(chosen, expected)
        weights = np.exp(scores.astype(np.float64))
        total = weights[expected].sum() if normalize else weights.sum()
        np.testing.assert_allclose(shares, weights[expected] / total, rtol=2e-6)


def test_scores_that_are_no_numbers_choose_experts_that_exist(library):
    for scores in (np.full(20, np.nan), np.full(20, np.inf), np.full(20, -np.inf)):
        chosen, _ = choose_experts(library, scores, 6, normalize=True)
        assert chosen.tolist() == [0, 1, 2, 3, 4, 5]
    chosen, _ = choose_experts(library, [np.nan, 1, np.nan, 3, np.inf, -np.inf], 4, normalize=False)
    assert chosen.tolist() == [4, 3, 1, 0]


@pytest.mark.parametrize("width", [1, 16, 50, 256])
def test_a_weighted_sum_is_as_its_formula(library, rng, width):
    x, factors = floats(rng.normal(size=(9, width + 3))), floats(rng.normal(size=4))
    rows, out = np.array([7, 0, 7, 2], np.int32), floats(rng.normal(size=width))
    expected = factors.astype(np.float64) @ x[rows, :width]
    for accumulate in (False, True):
        before = out.astype(np.float64) if accumulate else 0
        library.ts_kernel_weighted_sum(
            address(x), c_int64(width + 3), address(rows), address(factors), c_int64(4),
            c_int64(width), c_int32(accumulate), address(out),
        )  # fmt: skip
        np.testing.assert_allclose(out, before + expected, rtol=1e-5, atol=1e-5)
