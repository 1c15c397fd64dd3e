"""Attention over key-value pages in every format against NumPy twins, on each level."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import numpy as np

from support.native import address, floats


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
        ("format", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("balance", c_void_p),
        ("is_prompt", c_int64),
        ("sinks", c_void_p),
        ("is_chunked", c_int64),
    )


FORMATS = ("f16", "bf16", "int8", "int16")
PROMPT = "int16 prompt"  # rows that AMX computes in bfloat16 tiles
MOST_STORED, MOST_SUM = 4095, 2**31 - 1


def as_bfloat16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def as_bytes(x):
    """Heads (..., head_dim) as they come back from int8 with a float16 scale."""
    scale = (np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    wide = scale.astype(np.float32)
    factor = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
    return np.clip(np.rint(x * factor), -127, 127).astype(np.float64) * wide


def as_codes(x, through=np.asarray):
    """Heads (..., head_dim) as they come back from int16 with a bfloat16 scale, rounded up."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(MOST_STORED)
    scale = ((scale.view(np.uint32) + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    factor = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.clip(np.rint(x * factor), -MOST_STORED, MOST_STORED)
    return through(codes * scale).astype(np.float64)


def as_query_codes(q, factor):
    """Queries (..., head_dim), times a factor, as the whole numbers that meet int16 keys."""
    max_scale = np.float32(
        min(MOST_SUM // (64 * MOST_STORED), MOST_SUM // (q.shape[-1] * MOST_STORED))
    )
    q = q * np.float32(factor)
    largest = np.abs(q).max(axis=-1, keepdims=True)
    return np.rint(q * (max_scale / largest)).astype(np.float64) * (largest / max_scale) / factor


def spread(x):
    """Heads (..., head_dim) after sums and differences of values ever further apart."""
    distance = 1
    while x.shape[-1] % (2 * distance) == 0:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x, distance = np.stack([a + b, a - b], axis=-2).reshape(x.shape), 2 * distance
    return x


def as_stored(fmt, keys, values):
    """Keys and values as pages give them back, in float64."""
    if fmt.startswith("int16"):
        through = as_bfloat16 if fmt == PROMPT else np.asarray
        return as_codes(keys, through), as_codes(values, through)
    if fmt != "int8":
        through = as_bfloat16 if fmt == "bf16" else np.float16
        return through(keys).astype(np.float64), through(values).astype(np.float64)
    width = keys.shape[-1] & -keys.shape[-1]
    return spread(as_bytes(spread(keys) / np.float32(width))), as_bytes(values)


class Context:
    """Keys and values of one request in pages whose other contents are NaN."""

    def __init__(self, library, rng, page_size, kv_heads, group, head_dim, length, fmt="f16"):
        self.library, self.length, self.group = library, length, group
        self.sinks = None
        self.fmt = fmt if "amx" in library._name else fmt.removesuffix(" prompt")
        shape = (length, kv_heads, head_dim)
        self.keys, self.values = floats(rng.normal(size=shape)), floats(rng.normal(size=shape))
        self.keys[..., 3] *= 4  # a channel that sticks out, as real keys have
        num_pages = -(-length // page_size)
        self.table = rng.permutation(2 * num_pages).astype(np.int32)[:num_pages]
        stored = fmt.removesuffix(" prompt")
        head_bytes = {"int8": head_dim + 2, "int16": 2 * head_dim + 2}.get(stored, 2 * head_dim)
        self.pages = np.full(4 * num_pages * page_size * kv_heads * head_bytes, 0xFF, np.uint8)
        self.arguments = AttentionArguments(
            self.pages.ctypes.data, self.table.ctypes.data, page_size, kv_heads, head_dim, group,
            0, length, 0, 0, FORMATS.index(stored), head_dim**-0.5, 0, None, fmt == PROMPT, None, 0,
        )  # fmt: skip
        self.store()

    def store(self):
        a = self.arguments
        a.position, a.num_rows = 0, self.length
        keys, values = address(self.keys), address(self.values)
        self.library.ts_kernel_store(ctypes.byref(a), keys, values)

    def see(self, window=None, soft_cap=None, is_chunked=False):
        """Let the rows see so many keys, or chunks of so many, their scores capped."""
        self.arguments.window, self.arguments.soft_cap = window or 0, soft_cap or 0
        self.arguments.is_chunked = is_chunked
        return self

    def sink(self, sinks):
        """Give each query head a score whose value is zero."""
        self.sinks = floats(sinks)
        self.arguments.sinks = self.sinks.ctypes.data
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
        if self.arguments.is_chunked:
            return position // window * window
        return max(0, position - window + 1) if window else 0

    def expected(self, q, position):
        k, v = as_stored(self.fmt, self.keys, self.values)
        out, scale = np.empty(q.shape), np.float32(q.shape[2] ** -0.5)
        cap = np.float32(self.arguments.soft_cap)
        factor = scale / cap if cap else scale * np.float32(np.log2(np.e))
        if self.fmt == "int16":
            q = as_query_codes(q, factor)
        if self.fmt == PROMPT:
            q = as_bfloat16(q * factor) / np.float64(factor)
        rows = np.arange(position, position + len(q))
        firsts = np.array([self.first_seen(row) for row in rows])
        places = np.arange(firsts[0], position + len(q))
        k, v = k[places], v[places]
        is_hidden = (places < firsts[:, None]) | (places > rows[:, None])
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // self.group].T * q.shape[2] ** -0.5
            if cap:
                scores = cap * np.tanh(scores / cap)
            scores[is_hidden] = -np.inf
            sink = -np.inf if self.sinks is None else self.sinks[head]
            most = np.maximum(scores.max(axis=1), sink)
            shares = np.exp(scores - most[:, None])
            total = shares.sum(axis=1) + np.exp(sink - most)
            out[:, head] = shares / total[:, None] @ v[:, head // self.group]
        return out


def within(context):
    """Tolerances; with int16 shares are rounded, too, to at most half of a code each."""
    fmt, values = context.fmt, context.values
    if not fmt.startswith("int16"):
        return {"rtol": 1e-4, "atol": 3e-5}
    if fmt == PROMPT:
        return {"rtol": 1e-4, "atol": np.abs(values).max() / 2**8}
    return {"rtol": 1e-4, "atol": 2.5 * np.abs(values).max() / (MOST_SUM // (64 * MOST_STORED))}


def test_attention_matches_its_formula(library, rng):
    for page_size, kv_heads, group, head_dim in [
        (16, 3, 3, 64),
        (32, 1, 1, 16),
        (64, 2, 7, 128),
        (16, 2, 4, 80),
        (16, 1, 4, 256),
    ]:
        for fmt in (*FORMATS, PROMPT):
            context = Context(library, rng, page_size, kv_heads, group, head_dim, 300, fmt)
            for position, num_rows in ((0, 1), (0, 70), (63, 2), (64, 1), (250, 50), (299, 1)):
                q = floats(rng.normal(size=(num_rows, kv_heads * group, head_dim)) * 3)
                out = context.attend(q, position)
                np.testing.assert_allclose(out, context.expected(q, position), **within(context))


def test_windows_and_caps_match_their_formulas(library, rng):
    for soft_cap in [None, 5.0]:
        for window in [None, 1, 7, 16, 17, 63, 64, 65, 150, 299]:
            for page_size, group, head_dim, fmt in (
                (16, 5, 32, "f16"),
                (64, 1, 112, "int16"),
                (16, 3, 80, PROMPT),
            ):
                context = Context(library, rng, page_size, 1, group, head_dim, 300, fmt).see(
                    window, soft_cap
                )
                for position, num_rows in ((0, 1), (0, 70), (63, 2), (64, 1), (210, 90), (299, 1)):
                    q = floats(rng.normal(size=(num_rows, group, head_dim)) * 3)
                    out = context.attend(q, position)
                    np.testing.assert_allclose(
                        out, context.expected(q, position), **within(context)
                    )


def test_chunks_match_their_formula(library, rng):
    for chunk in [1, 7, 16, 63, 64, 65, 100, 128, 299, 1000]:
        for page_size, group, head_dim, fmt in (
            (16, 5, 32, "f16"),
            (64, 1, 112, "int16"),
            (16, 3, 64, "int8"),
            (16, 3, 80, PROMPT),
        ):
            context = Context(library, rng, page_size, 1, group, head_dim, 300, fmt)
            context.see(chunk, is_chunked=True)
            for position, num_rows in ((0, 1), (0, 300), (63, 2), (64, 1), (210, 90), (299, 1)):
                q = floats(rng.normal(size=(num_rows, group, head_dim)) * 3)
                expected = context.expected(q, position)
                for split in (0, 1, 3):
                    out = context.attend(q, position, split)
                    np.testing.assert_allclose(out, expected, **within(context))


def test_sinks_take_their_part_of_the_softmax_once(library, rng):
    for window, soft_cap, group, fmt in [
        (None, None, 8, "f16"),
        (128, None, 8, "int16"),
        (70, 5.0, 3, "int8"),
        (1, None, 1, "bf16"),
        (None, None, 5, PROMPT),
    ]:
        context = Context(library, rng, 16, 2, group, 64, 300, fmt).see(window, soft_cap)
        sinks = rng.normal(size=2 * group) * 4
        sinks[:2] = -1000, 100  # no part of the softmax, and nearly all of it
        context.sink(sinks)
        for position, num_rows in ((0, 1), (0, 70), (63, 2), (210, 90), (299, 1)):
            q = floats(rng.normal(size=(num_rows, 2 * group, 64)) * 3)
            for split in (0, 1, 3):
                out = context.attend(q, position, split)
                np.testing.assert_allclose(out, context.expected(q, position), **within(context))


def test_attention_of_a_row_has_the_same_bits_however_it_is_computed(library, rng):
    for window, soft_cap, has_sinks, is_chunked in [
        (None, None, False, False),
        (None, None, True, False),
        (1, None, False, False),
        (40, 3.0, False, False),
        (64, None, True, False),
        (100, 30.0, False, False),
        (100, None, False, True),
        (200, None, False, False),
    ]:
        for fmt in (*FORMATS, PROMPT):
            context = Context(library, rng, 16, 2, 3, 64, 400, fmt)
            context.see(window, soft_cap, is_chunked)
            if has_sinks:
                context.sink(rng.normal(size=6) * 4)
            q = floats(rng.normal(size=(400, 6, 64)) * 3)
            whole_result = context.attend(q, 0)
            for row in (0, 15, 16, 63, 64, 65, 127, 128, 200, 399):
                assert np.array_equal(context.attend(q[row : row + 1], row)[0], whole_result[row])
                assert np.array_equal(
                    context.attend(q[row : row + 1], row, split=2)[0], whole_result[row]
                )
            for start, end in ((0, 7), (60, 70), (100, 133), (128, 400)):
                assert np.array_equal(context.attend(q[start:end], start), whole_result[start:end])
                assert np.array_equal(
                    context.attend(q[start:end], start, split=1), whole_result[start:end]
                )


def test_a_row_alone_has_the_bits_of_a_row_among_many_for_every_group(library, rng):
    for group in (1, 2, 4, 5, 6, 7, 8, 9, 16):
        for fmt, window in zip(FORMATS, (None, 200, None, 130), strict=True):
            context = Context(library, rng, 48, 2, group, 80, 400, fmt).see(window)
            q = floats(rng.normal(size=(40, 2 * group, 80)) * 3)
            many = context.attend(q, 350)
            for row in (0, 33, 34, 39):
                for split in (0, 2):
                    alone = context.attend(q[row : row + 1], 350 + row, split)
                    assert np.array_equal(alone[0], many[row])


def test_attention_does_not_depend_on_where_its_pages_are(library):
    outputs = []
    for seed, page_size in ((1, 16), (2, 16), (3, 32), (4, 64)):
        context = Context(library, np.random.default_rng(7), page_size, 2, 2, 32, 150)
        order = np.random.default_rng(seed).permutation(len(context.table)).astype(np.int32)
        context.table[:] = order
        context.store()
        q = floats(np.random.default_rng(8).normal(size=(20, 4, 32)))
        outputs.append(context.attend(q, 130))
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def test_values_that_a_page_cannot_hold_are_saturated(library, rng):
    for fmt in (*FORMATS, PROMPT):
        context = Context(library, rng, 16, 1, 1, 16, 64, fmt)
        q = floats(rng.normal(size=(40, 1, 16)))
        before = context.attend(q, 0)
        context.values[41:] = np.inf
        context.values[45] = np.nan
        context.keys[50] = -np.inf
        context.keys[51, 0, 5] = np.nan
        context.store()
        assert np.array_equal(context.attend(q, 0), before)
        assert np.all(np.isfinite(context.attend(floats(rng.normal(size=(50, 1, 16))), 0)))


def test_int8_keys_lose_their_mean_and_change_by_factors_and_scores_stay(library, rng):
    for head_dim in (32, 80):
        context = Context(library, rng, 16, 2, 3, head_dim, 150, "int8")
        q, mean = rng.normal(size=(150, 6, head_dim)), rng.normal(size=(2, head_dim)) * 32
        expected = context.expected(q, 0)
        context.keys = np.round(context.keys * 1024) / 1024  # so that the sums are exact
        rounded_result = context.expected(q, 0)
        assert np.allclose(rounded_result, expected, atol=0.05)
        mean, factor = np.round(mean), 2.0 ** rng.integers(-4, 5, size=(2, head_dim))
        balance = floats([mean, factor, 1 / factor])
        even, context.keys = context.keys, floats(context.keys / factor + mean)
        context.arguments.balance = balance.ctypes.data
        context.store()
        context.keys = even
        turned = q.reshape(150, 2, 3, head_dim) * factor[:, None]
        assert np.allclose(context.attend(turned.reshape(q.shape), 0), rounded_result, atol=1e-4)


def test_keys_lose_their_mean_before_they_become_bfloat16(library, rng):
    context = Context(library, rng, 16, 2, 3, 64, 150, PROMPT)
    q, mean = floats(rng.normal(size=(150, 6, 64))), np.round(rng.normal(size=(2, 64)) * 8)
    right = context.expected(q, 0)
    context.keys = floats(context.keys + mean)
    context.store()
    error = np.abs(context.attend(q, 0) - right).mean()
    balance = floats([mean, np.ones_like(mean), np.ones_like(mean)])
    context.arguments.balance = balance.ctypes.data
    difference = np.abs(context.attend(q, 0) - right).mean()
    assert difference < error / 2 if context.fmt == PROMPT else difference == error


def test_a_head_of_zeros_is_stored_as_zeros(library, rng):
    for fmt in ("int8", "int16"):
        for head in (0, 1e-35):
            context = Context(library, rng, 16, 1, 1, 32, 16, fmt)
            context.values[:], context.keys[:] = head, head
            context.store()
            out = context.attend(floats(rng.normal(size=(16, 1, 32))), 0)
            assert np.all(np.abs(out) <= head)


def test_a_query_that_is_no_number_spoils_its_own_row_alone(library, rng):
    for fmt in (*FORMATS, PROMPT):
        context = Context(library, rng, 16, 1, 1, 64, 100, fmt)
        q = floats(rng.normal(size=(100, 1, 64)))
        before = context.attend(q, 0)
        q[50, 0, 7], q[80, 0, 9] = np.nan, np.inf
        out = context.attend(q, 0)
        spoiled = np.isin(np.arange(100), (50, 80))
        assert np.isnan(out[spoiled]).all(axis=(1, 2)).all()
        assert np.array_equal(out[~spoiled], before[~spoiled])


def test_the_largest_numbers_of_int16_do_not_overflow(library):
    for head_dim in (16, 64, 128, 256, 512):
        ones_array = np.ones((130, 1, head_dim), np.float32)
        for sign in (1, -1):
            context = Context(library, np.random.default_rng(1), 16, 1, 1, head_dim, 130, "int16")
            context.keys, context.values = ones_array * sign, ones_array
            context.store()
            np.testing.assert_allclose(context.attend(ones_array, 0), ones_array, rtol=1e-3)


def test_spreading_evens_out_an_outlier_and_keeps_products(library, rng):
    for head_dim in (16, 64, 96, 256, 512):
        a, b = floats(rng.normal(size=(2, head_dim)))
        a[3] = 100
        turned = [x.copy() for x in (a, b)]
        for x in turned:
            library.ts_kernel_spread(address(x), c_int64(head_dim))
        width = head_dim & -head_dim
        assert np.array_equal(turned[0], spread(a))
        assert np.isclose(turned[0] @ turned[1] / width, a @ b, rtol=1e-4, atol=1e-3)
        assert np.abs(turned[0][:width]).max() < 100 + 5 * width**0.5
