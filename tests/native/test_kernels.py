"""The executor's kernels against NumPy twins, on each instruction-set level."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64

import numpy as np

from support.native import address, floats


def test_exp2_is_right_to_a_millionth_and_exact_at_zero(library, rng):
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


def test_rms_norm_matches_its_formula(library, rng):
    for width in [1, 15, 16, 64, 100, 576, 2048]:
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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_gated_activation_matches_its_formula(library, rng):
    for activation, formula, spread in [(0, silu, 40), (1, gelu_tanh, 4), (2, sigmoid, 20)]:
        for width in [1, 16, 50, 1536]:
            gate, up = floats(rng.normal(size=width) * spread), floats(rng.normal(size=width))
            out = np.empty_like(gate)
            library.ts_kernel_gate(
                c_int32(activation), address(gate), address(up), c_int64(width), address(out)
            )
            expected = formula(gate.astype(np.float64)) * up
            np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)


def test_the_clamped_activation_of_gpt_oss_matches_its_formula(library, rng):
    for width in [1, 16, 50, 1536]:
        gate, up = floats(rng.normal(size=width) * 6), floats(rng.normal(size=width) * 6)
        out = np.empty_like(gate)
        library.ts_kernel_gate(c_int32(3), address(gate), address(up), c_int64(width), address(out))
        clamped = np.minimum(gate.astype(np.float64), 7)
        expected = clamped * sigmoid(1.702 * clamped) * (np.clip(up.astype(np.float64), -7, 7) + 1)
        np.testing.assert_allclose(out, expected, rtol=3e-6, atol=1e-6)
    gate = floats([np.nan, 0, np.inf, -1e30, *np.ones(12)])
    up = floats([1, np.nan, np.inf, -np.inf, *np.full(12, -np.inf)])
    out = np.empty_like(gate)
    library.ts_kernel_gate(c_int32(3), address(gate), address(up), c_int64(16), address(out))
    assert np.isnan(out[:2]).all()
    np.testing.assert_allclose(out[2], 56 / (1 + np.exp(-1.702 * 7)), rtol=1e-6)
    assert np.isfinite(out[3:]).all()


def test_gated_activation_of_extreme_inputs(library):
    for activation in [0, 1]:
        gate = floats([0, -0.0, 1e30, -1e30, 3e38, -1e5, np.inf, np.nan, *np.full(8, 1e-30)])
        up, out = np.ones_like(gate), np.empty_like(gate)
        library.ts_kernel_gate(
            c_int32(activation), address(gate), address(up), c_int64(16), address(out)
        )
        expected = floats([0, 0, 1e30, 0, 3e38, 0, np.inf, np.nan, *np.full(8, 5e-31)])
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


def test_soft_cap_matches_its_formula(library, rng):
    for cap in [1.0, 30.0, 50.0]:
        for width in [1, 16, 50, 4096]:
            x = floats(rng.normal(size=width) * 10.0 ** rng.uniform(-6, 4, width))
            capped = x.copy()
            library.ts_kernel_soft_cap(address(capped), c_float(cap), c_int64(width))
            np.testing.assert_allclose(capped, cap * np.tanh(x.astype(np.float64) / cap), rtol=5e-7)
            assert np.abs(capped).max() <= cap


def test_soft_cap_keeps_zero_and_nan_and_ends_at_the_cap(library):
    x = floats([0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-42, *np.zeros(8)])
    library.ts_kernel_soft_cap(address(x), c_float(30), c_int64(16))
    np.testing.assert_array_equal(x[:7], floats([0, 0, 30, -30, np.nan, 30, -30]))


class Temperature(ctypes.Structure):
    """As in native/kernels/rope.h."""

    _fields_ = (("scale", c_double), ("length", c_int64), ("offset", c_int64))


def rotate(library, heads, position, frequencies, *, interleaved, magnitude=1, temperature=(0, 1)):
    """Rotate heads (heads, head_dim) in place, as at a position."""
    library.ts_kernel_rope(
        address(frequencies), c_int32(len(frequencies)), c_int32(interleaved), c_double(magnitude),
        ctypes.byref(Temperature(*temperature)), c_int32(heads.shape[1]), c_int64(position),
        address(heads), c_int64(heads.size),
    )  # fmt: skip


def test_queries_are_multiplied_by_the_temperature_of_their_position(library, rng):
    frequencies = np.array([1.0, 0.1, 0.01, 0, 0, 0, 0, 0])
    heads = floats(rng.normal(size=(2, 16)))
    for interleaved in [True, False]:
        for length, offset in [(20, 0), (20, 1), (8192, 1), (1, 0)]:
            for position in [0, 18, 19, 20, 39, 8190, 8191, 1 << 16]:
                plain, warm = heads.copy(), heads.copy()
                rotate(library, plain, position, frequencies, interleaved=interleaved)
                rotate(
                    library, warm, position, frequencies, interleaved=interleaved,
                    temperature=(0.25, length, offset),
                )  # fmt: skip
                factor = 1 + 0.25 * np.log1p((position + offset) // length)
                np.testing.assert_allclose(warm, plain * factor, rtol=1e-6, atol=1e-6)
                assert np.array_equal(warm, plain) == (position + offset < length)


def test_rope_rotates_pairs_and_leaves_the_rest(library, rng):
    for interleaved in [True, False]:
        for head_dim, num_pairs in [(16, 8), (64, 32), (80, 40), (64, 12)]:
            frequencies = 10000.0 ** (-np.arange(num_pairs) / num_pairs)
            heads = floats(rng.normal(size=(3, head_dim)))
            position, magnitude = 1234, 1.25
            turned = heads.copy()
            rotate(
                library, turned, position, frequencies, interleaved=interleaved, magnitude=magnitude
            )
            cosine = np.cos(position * frequencies) * magnitude
            sine = np.sin(position * frequencies) * magnitude
            low = slice(0, 2 * num_pairs, 2) if interleaved else slice(0, num_pairs)
            high = slice(1, 2 * num_pairs, 2) if interleaved else slice(num_pairs, 2 * num_pairs)
            expected = heads.astype(np.float64)
            expected[:, low] = heads[:, low] * cosine - heads[:, high] * sine
            expected[:, high] = heads[:, low] * sine + heads[:, high] * cosine
            np.testing.assert_allclose(turned, expected, rtol=1e-6, atol=1e-6)


OF_INPUTS = 3  # of the kinds of shares


def choose_experts(library, scores, num_used, normalize):
    scores = floats(scores)
    expert_ids, shares = np.zeros(num_used, np.int32), np.zeros(num_used, np.float32)
    library.ts_kernel_choose_experts(
        address(scores), c_int64(scores.size), c_int64(num_used), c_int32(normalize),
        address(expert_ids), address(shares),
    )  # fmt: skip
    return expert_ids, shares


def test_experts_are_chosen_by_their_scores(library, rng):
    for normalize in [False, True]:
        for num_experts, num_used in [(1, 1), (8, 2), (16, 16), (60, 4), (128, 8)]:
            for _ in range(50):
                scores = floats(rng.normal(size=num_experts) * 4).round(int(rng.integers(0, 3)))
                expert_ids, shares = choose_experts(library, scores, num_used, normalize)
                expected = np.argsort(-scores, kind="stable")[:num_used]
                assert np.array_equal(expert_ids, expected)
                weights = np.exp(scores.astype(np.float64))
                total = weights[expected].sum() if normalize else weights.sum()
                np.testing.assert_allclose(shares, weights[expected] / total, rtol=2e-6)


def test_shares_of_inputs_are_sigmoids_of_the_largest_scores(library, rng):
    for num_experts, num_used in [(1, 1), (16, 1), (128, 3)]:
        scores = floats(rng.normal(size=num_experts) * 8)
        chosen, shares = choose_experts(library, scores, num_used, OF_INPUTS)
        expected = np.argsort(-scores, kind="stable")[:num_used]
        assert np.array_equal(chosen, expected)
        weights = 1 / (1 + np.exp(-scores.astype(np.float64)))
        np.testing.assert_allclose(shares, weights[expected], rtol=2e-6)
    # Where the sigmoid is 1 for both, the larger score is chosen.
    chosen, shares = choose_experts(library, [60.0, 70.0], 1, OF_INPUTS)
    assert (chosen.tolist(), shares.tolist()) == ([1], [1.0])


def test_scores_that_are_nan_choose_experts_that_exist(library):
    for scores in (np.full(20, np.nan), np.full(20, np.inf), np.full(20, -np.inf)):
        expert_ids, _ = choose_experts(library, scores, 6, normalize=True)
        assert expert_ids.tolist() == [0, 1, 2, 3, 4, 5]
    expert_ids, _ = choose_experts(
        library, [np.nan, 1, np.nan, 3, np.inf, -np.inf], 4, normalize=False
    )
    assert expert_ids.tolist() == [4, 3, 1, 0]


def test_a_weighted_sum_matches_its_formula(library, rng):
    for width in [1, 16, 50, 256]:
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
