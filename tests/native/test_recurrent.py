"""Recurrent kernels against NumPy twins, on each instruction-set level."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from itertools import pairwise

import numpy as np
import pytest

from support.native import address, floats


def at(array):
    return c_void_p(None) if array is None else address(array)


def convolve(library, x, taps, bias, before):
    """Return a convolution of rows, and the state after them."""
    (num_rows, width), kernel = x.shape, len(taps)
    out, after = np.empty_like(x), np.full((kernel - 1, width), np.nan, np.float32)
    library.ts_kernel_convolve(
        at(x), at(taps), at(bias), *map(c_int64, (num_rows, width, kernel)), at(before), at(after),
        at(out),
    )  # fmt: skip
    return out, after


@pytest.mark.parametrize(("width", "kernel"), [(16, 4), (50, 4), (1, 2), (200, 3), (33, 1)])
def test_a_convolution_matches_its_formula_however_rows_are_cut(library, rng, width, kernel):
    x, taps = floats(rng.normal(size=(9, width))), floats(rng.normal(size=(kernel, width)))
    bias = floats(rng.normal(size=width)) if kernel == 3 else None
    rows = np.concatenate([np.zeros((kernel - 1, width)), x])
    expected = sum(rows[tap : tap + 9] * taps[tap] for tap in range(kernel))
    out, after = convolve(library, x, taps, bias, None)
    np.testing.assert_allclose(out, expected + (0 if bias is None else bias), atol=1e-5)
    assert np.array_equal(after, rows[9:])
    parts, state = [], None
    for cut in np.split(x, [1, 2, 4, 5]):
        part, state = convolve(library, floats(cut), taps, bias, state)
        parts.append(part)
    assert np.array_equal(np.concatenate(parts), out)
    assert np.array_equal(state, after)


def delta_rule(library, x, gates, key_dim, rate, biases, before):
    """Return a head's output for rows, and the state after them; with one bias or one a channel."""
    biases = floats(np.atleast_1d(biases))
    value_dim = x.shape[1] - 2 * key_dim
    out = np.empty((len(x), value_dim), np.float32)
    after = np.full((key_dim, value_dim), np.nan, np.float32)
    library.ts_kernel_delta_rule(
        at(x), at(gates), *map(c_int64, (len(x), key_dim, value_dim)), c_float(rate),
        at(biases), c_int64(len(biases)), at(before), at(after), at(out),
    )  # fmt: skip
    return out, after


def delta_rule_twin(x, gates, key_dim, rate, biases, before):
    """The same in float64."""
    x, gates = x.astype(np.float64), gates.astype(np.float64)
    state = np.zeros((key_dim, x.shape[1] - 2 * key_dim)) if before is None else before * 1.0
    out = []
    for row, (*decays, strength) in zip(x, gates, strict=True):
        query, key, value = np.split(row, [key_dim, 2 * key_dim])
        query, key = (part / np.sqrt(part @ part + 1e-6) for part in (query, key))
        state = state * np.exp(rate * np.logaddexp(0, np.array(decays) + biases))[:, None]
        state += np.outer(key, (value - key @ state) / (1 + np.exp(-strength)))
        out.append(query @ state / np.sqrt(key_dim))
    return np.array(out), state


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 64), (8, 8), (4, 20), (33, 100), (256, 48), (1, 1)]
)
def test_a_head_of_the_delta_rule_matches_its_formula(library, rng, key_dim, value_dim):
    x = floats(rng.normal(size=(21, 2 * key_dim + value_dim)) * 3)
    gates = floats(rng.normal(size=(21, 2)) * 3)
    start = floats(rng.normal(size=(key_dim, value_dim)))
    for before in (None, start):
        original_state = None if before is None else before.copy()
        out, after = delta_rule(library, x, gates, key_dim, -0.3, 0.7, before)
        expected, state = delta_rule_twin(x, gates, key_dim, -0.3, 0.7, before)
        np.testing.assert_allclose(out, expected, atol=4e-6 * np.abs(expected).max())
        np.testing.assert_allclose(after, state, atol=4e-6 * np.abs(state).max())
        assert original_state is None or np.array_equal(before, original_state)


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 64), (8, 8), (4, 20), (33, 100), (256, 48)]
)
def test_a_head_with_decays_of_channels_matches_its_formula(library, rng, key_dim, value_dim):
    x = floats(rng.normal(size=(21, 2 * key_dim + value_dim)) * 3)
    gates = floats(rng.normal(size=(21, key_dim + 1)) * 3)
    biases = rng.normal(size=key_dim)
    start = floats(rng.normal(size=(key_dim, value_dim)))
    for before in (None, start):
        original_state = None if before is None else before.copy()
        out, after = delta_rule(library, x, gates, key_dim, -0.3, biases, before)
        expected, state = delta_rule_twin(x, gates, key_dim, -0.3, biases, before)
        np.testing.assert_allclose(out, expected, atol=4e-6 * np.abs(expected).max())
        np.testing.assert_allclose(after, state, atol=4e-6 * np.abs(state).max())
        assert original_state is None or np.array_equal(before, original_state)
    # With equal decays of all channels, the rule is that with one decay.
    gates[:, 1:-1] = gates[:, :1]
    out, _ = delta_rule(library, x, gates, key_dim, -0.3, np.full(key_dim, 0.5), start)
    uniform, _ = delta_rule(library, x, floats(gates[:, -2:]), key_dim, -0.3, 0.5, start)
    np.testing.assert_allclose(out, uniform, atol=4e-6 * np.abs(uniform).max())


@pytest.mark.parametrize("has_channels", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (20, 72)])
def test_the_delta_rule_does_not_depend_on_how_rows_are_cut(
    library, rng, key_dim, value_dim, has_channels
):
    x = floats(rng.normal(size=(40, 2 * key_dim + value_dim)))
    biases = rng.normal(size=key_dim if has_channels else 1)
    gates = floats(rng.normal(size=(40, len(biases) + 1)))
    zeros = np.zeros((key_dim, value_dim), np.float32)
    out, after = delta_rule(library, x, gates, key_dim, -0.1, biases, zeros)
    for cuts in ([1, 2, 3, 11, 12, 30], [8, 16], [7, 22], range(1, 40)):
        parts, state, bounds = [], None, [0, *cuts, 40]
        for begin, end in pairwise(bounds):
            rows, part_gates = floats(x[begin:end]), floats(gates[begin:end])
            part, state = delta_rule(library, rows, part_gates, key_dim, -0.1, biases, state)
            parts.append(part)
        assert np.array_equal(np.concatenate(parts), out)
        assert np.array_equal(state, after)


def test_gates_are_right_at_their_extremes(library):
    """The state after a row whose key is zero is the decay; later output shows the strength."""
    for decay in (-80.0, -20.0, -3.0, 0.0, 2.0, 30.0, 1e4):
        x, gates = floats([[1, 0, 5]]), floats([[decay, 0]])
        _, after = delta_rule(library, x, gates, 1, -0.5, 0.0, np.ones((1, 1), np.float32))
        expected = np.exp(-0.5 * np.logaddexp(0, decay))
        np.testing.assert_allclose(after[0, 0], expected, rtol=1e-6, atol=1e-37)
    for strength in (-1e4, -30.0, -2.0, 0.0, 3.0, 1e4):
        x, gates = floats([[1, 1e4, 2]]), floats([[0, strength]])
        _, after = delta_rule(library, x, gates, 1, -0.5, 0.0, None)
        expected = 2 * np.exp(-np.logaddexp(0, -strength))
        np.testing.assert_allclose(after[0, 0], expected, rtol=1e-6, atol=1e-12)
    _, after = delta_rule(library, floats([[1, 1, 1]]), floats([[np.nan, 0]]), 1, -1.0, 0.0, None)
    assert np.isnan(after[0, 0])


def test_rows_are_gated(library, rng):
    for width, gate in [(1, -3.0), (16, 0.0), (50, 2.5)]:
        x, out = floats(rng.normal(size=width)), np.empty(width, np.float32)
        library.ts_kernel_gate_row(at(x), at(floats([gate])), c_int64(width), at(out))
        np.testing.assert_allclose(out, x / (1 + np.exp(-gate)), rtol=1e-6)


def mamba2(library, x, steps, key_dim, constants, before):
    """Return a head's output for rows, and the state after them."""
    value_dim = x.shape[1] - 2 * key_dim
    out = np.empty((len(x), value_dim), np.float32)
    after = np.full((key_dim, value_dim), np.nan, np.float32)
    library.ts_kernel_mamba2(
        at(x), at(steps), *map(c_int64, (len(x), key_dim, value_dim)), at(floats(constants)),
        at(before), at(after), at(out),
    )  # fmt: skip
    return out, after


def mamba2_twin(x, steps, key_dim, constants, before):
    """The same in float64."""
    x, (rate, bias, skip, *limits) = x.astype(np.float64), constants
    value_dim = x.shape[1] - 2 * key_dim
    state = np.zeros((key_dim, value_dim)) if before is None else before * 1.0
    out = []
    for row, raw_step in zip(x, steps.astype(np.float64), strict=True):
        value, key, query = np.split(row, [value_dim, value_dim + key_dim])
        step = np.clip(np.logaddexp(0, raw_step + bias), *limits)
        state = state * np.exp(rate * step) + np.outer(key, step * value)
        out.append(query @ state + skip * value)
    return np.array(out), state


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 64), (64, 64), (16, 16), (4, 20), (33, 100), (256, 48), (1, 1)]
)
@pytest.mark.parametrize("limits", [(0.0, np.inf), (0.5, 1.5)])
def test_a_head_of_mamba2_matches_its_formula(library, rng, key_dim, value_dim, limits):
    x, steps = floats(rng.normal(size=(21, 2 * key_dim + value_dim))), floats(rng.normal(size=21))
    start = floats(rng.normal(size=(key_dim, value_dim)))
    constants = (-0.3, 0.7, -1.4, *limits)
    for before in (None, start):
        original_state = None if before is None else before.copy()
        out, after = mamba2(library, x, steps, key_dim, constants, before)
        expected, state = mamba2_twin(x, steps, key_dim, constants, before)
        np.testing.assert_allclose(out, expected, atol=4e-6 * np.abs(expected).max())
        np.testing.assert_allclose(after, state, atol=4e-6 * np.abs(state).max())
        assert original_state is None or np.array_equal(before, original_state)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (20, 72)])
def test_mamba2_does_not_depend_on_how_rows_are_cut(library, rng, key_dim, value_dim):
    x, steps = floats(rng.normal(size=(40, 2 * key_dim + value_dim))), floats(rng.normal(size=40))
    constants = (-0.1, 0.1, 0.5, 0.0, np.inf)
    zeros = np.zeros((key_dim, value_dim), np.float32)
    out, after = mamba2(library, x, steps, key_dim, constants, zeros)
    for cuts in ([1, 2, 3, 11, 12, 30], [8, 16], [7, 22], range(1, 40)):
        parts, state = [], None
        for begin, end in pairwise([0, *cuts, 40]):
            rows, part_steps = floats(x[begin:end]), floats(steps[begin:end])
            part, state = mamba2(library, rows, part_steps, key_dim, constants, state)
            parts.append(part)
        assert np.array_equal(np.concatenate(parts), out)
        assert np.array_equal(state, after)


def test_time_steps_are_right_at_their_extremes(library):
    for raw_step in (-80.0, -20.0, -3.0, 0.0, 2.0, 30.0, 1e4):
        constants = (-0.5, 0.0, 0.0, 0.0, np.inf)
        ones_array = np.ones((1, 1), np.float32)
        _, after = mamba2(
            library, floats([[5, 0, 1]]), floats([raw_step]), 1, constants, ones_array
        )
        expected = np.exp(-0.5 * np.logaddexp(0, raw_step))
        np.testing.assert_allclose(after[0, 0], expected, rtol=1e-6, atol=1e-37)
    _, after = mamba2(library, floats([[1, 1, 1]]), floats([np.nan]), 1, constants, None)
    assert np.isnan(after[0, 0])
