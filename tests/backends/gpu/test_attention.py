"""Attention over KV pages, and the store of keys and values, agree with NumPy twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from twostroke.backends.gpu.kernels import attention, rope  # noqa: E402
from twostroke.backends.gpu.kernels.attention import AttentionItems, HeadLayout  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.kernels.norm import Norm  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402
from twostroke.backends.gpu.tiles import MAX_PIECES, Tiling, divide  # noqa: E402

PAGE, PAGES = 16, 24


def heads_of(rng: np.random.Generator, window: int | None = None, cap: float = 0.0) -> HeadLayout:
    kv, group, dim = (int(rng.choice(choices)) for choices in ((1, 2, 3), (1, 2, 5), (16, 24, 64)))
    line = kv * PAGE * dim
    offsets = {
        "page_size": PAGE,
        "page_stride": 2 * line + 64,
        "keys_at": 32,
        "values_at": 32 + line,
    }
    tables = {"table_stride": 32, "group_at": 16}
    shape = {"num_heads": kv * group, "num_kv_heads": kv, "head_dim": dim, "scale": dim**-0.5}
    return HeadLayout(**shape, window=window or 0, soft_cap=cap, **offsets, **tables)


def attend(heads: HeadLayout, q: Any, keys: Any, values: Any, position: int) -> Any:
    """Return one row's attention; q is (heads, dim), keys and values (tokens, kv_heads, dim)."""
    first = max(0, position + 1 - heads.window) if heads.window else 0
    seen = slice(first, position + 1)
    rows = []
    for head in range(heads.num_heads):
        scores = keys[seen, head // heads.group] @ q[head] * heads.scale
        if heads.soft_cap:
            scores = heads.soft_cap * np.tanh(scores / heads.soft_cap)
        shares = np.exp(scores - scores.max())
        rows.append(shares / shares.sum() @ values[seen, head // heads.group])
    return np.concatenate(rows)


@pytest.mark.seeds(4)
def test_attention_equals_its_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window, cap = [(None, 0.0), (140, 0.0), (None, 5.0), (9, 2.0)][seed % 4]
    heads, dtype = heads_of(rng, window, cap), (torch.float16, torch.float32)[seed % 2]
    counts = [1, 3, 20, 1, 17 + seed]
    starts = [int(rng.integers(0, 150)) for _ in counts]
    tables = np.full((8, 2, 16), -1, np.int32)
    table_of = rng.permutation(8)[: len(counts)]
    pool = iter(rng.permutation(60).tolist())
    cache = rng.standard_normal((60, heads.page_stride)).astype(np.float16)
    slices, row = [], 0
    for count, start, table in zip(counts, starts, table_of, strict=True):
        first = max(0, start + 1 - (window or 10**6)) // PAGE
        for index in range(first, -(-(start + count) // PAGE)):
            tables[table, 1, index] = next(pool)
        slices.append((row, count, start, table))
        row += count
    q = rng.standard_normal((row, heads.num_heads * heads.head_dim)).astype(np.float16)
    block = attention.small_block(heads.group)
    large = attention.large_block(heads.group, heads.head_dim)
    tiling = Tiling(window, attention.rows_of(heads.group, block), 32 // heads.group or 1, piece=32)
    (items,) = divide(np.array(slices, np.int32), tiling, 10_000)
    frame, page_ids = [], []
    for part in (items.small, items.large, items.merges):
        page_ids += [len(frame), len(part)]
        frame += part.reshape(-1).tolist()
    slots = int(items.merges[:, 2].sum())
    work = AttentionItems(
        torch.tensor(page_ids, dtype=torch.int32),
        torch.tensor(frame, dtype=torch.int32),
        torch.from_numpy(tables),
        torch.zeros(max(1, slots), heads.num_heads, heads.head_dim),
        torch.zeros(max(1, slots), heads.num_heads, 2),
    )
    output = torch.zeros(q.shape, dtype=dtype)
    gpu, tensors = (
        interpreted(dtype),
        (torch.from_numpy(q).to(dtype), torch.from_numpy(cache), output),
    )
    attention.launch(gpu, work, 0, block, *tensors, heads)
    attention.launch(gpu, work, 2, large, *tensors, heads)
    attention.merge(gpu, work, 4, output, heads)
    assert slots
    for first_row, count, start, table in slices:
        reached = start + count
        lines = np.zeros((2, reached, heads.num_kv_heads, heads.head_dim), np.float32)
        for position in range(reached):
            page = tables[table, 1, position // PAGE]
            if page >= 0:
                for kind, at in enumerate((heads.keys_at, heads.values_at)):
                    stored = cache[page, at:][: heads.num_kv_heads * PAGE * heads.head_dim]
                    stored = stored.reshape(heads.num_kv_heads, PAGE, heads.head_dim)
                    lines[kind, position] = stored[:, position % PAGE]
        for i in range(count):
            queries = q[first_row + i].reshape(heads.num_heads, -1).astype(np.float32)
            expected = attend(heads, queries, *lines, start + i)
            result = output[first_row + i].numpy()
            np.testing.assert_allclose(result, expected, rtol=5e-3, atol=5e-3)


def test_pieces_depend_on_the_context_alone() -> None:
    tiling = Tiling(None, 4, 32)
    for position in (0, 255, 256, 8191, 8192, 70_000, 131_071):
        (alone,) = divide(np.array([[0, 1, position, 3]], np.int32), tiling, 10_000)
        slices = [[0, 1, 5, 0], [1, 40, 17, 2], [41, 1, position, 3], [42, 1, 99, 1]]
        (among,) = divide(np.array(slices, np.int32), tiling, 10_000)
        tiles = among.small[among.small[:, 0] == 41]
        np.testing.assert_array_equal(tiles[:, 4:6], alone.small[:, 4:6])
        assert len(tiles) <= MAX_PIECES
        assert tiles[0, 4] == 0
        assert tiles[-1, 5] == position + 1


def test_tiles_of_long_contexts_come_first() -> None:
    slices = np.array([[0, 200, 0, 0], [200, 30, 900, 1]], np.int32)
    (items,) = divide(slices, Tiling(None, 4, 32), 10_000)
    sizes = items.large[:, 5] - items.large[:, 4]
    assert sizes[0] == 930
    assert (np.diff(sizes) <= 0).all()


def test_pieces_for_which_there_are_no_slots_come_in_another_pass() -> None:
    tiling = Tiling(None, 4, 32)
    slices = np.array([[0, 30, 0, 2], *([30 + i, 1, 1000 * i, i] for i in range(9))], np.int32)
    (whole_division,) = divide(slices, tiling, 10_000)
    passes = divide(slices, tiling, 50)
    assert len(passes) > 2
    assert [len(part.large) for part in passes] == [1, *[0] * (len(passes) - 1)]
    for part in passes:
        assert part.merges[:, 1:3].sum(1).max() <= 50
        slots = part.small[part.small[:, 6] >= 0, 6]
        np.testing.assert_array_equal(slots, np.arange(len(slots)))
    for name, columns in (("small", [0, 1, 2, 3, 4, 5, 7]), ("merges", [0, 2])):
        together = np.concatenate([getattr(part, name) for part in passes])
        np.testing.assert_array_equal(
            together[:, columns], getattr(whole_division, name)[:, columns]
        )


def normalized(heads: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return heads (heads, dim) after an RMS norm of each."""
    return heads / np.sqrt((heads**2).mean(1, keepdims=True) + 1e-5) * weight


def rotated(x: Any, turn: Any, position: int, dim: int) -> Any:
    cosine, sine = turn.table.numpy()[position]
    pairs, x = turn.num_pairs, x.reshape(-1, dim).copy()
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if turn.is_interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    left, right = x[:, first].copy(), x[:, second].copy()
    x[:, first], x[:, second] = left * cosine - right * sine, left * sine + right * cosine
    return x


@pytest.mark.seeds(6)
def test_keys_and_values_are_turned_and_stored(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = heads_of(rng)
    dim, counts = heads.head_dim, (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    rows, parts = (70 if seed == 5 else 3), 1 + seed % 2
    width = dim * sum(counts)
    product = rng.standard_normal((parts, rows, width), np.float32)
    whole_product = Parts(torch.from_numpy(product), width, width, parts, rows * width)
    biases = [rng.standard_normal(dim * count).astype(np.float32) for count in counts]
    weights = [rng.standard_normal(dim).astype(np.float32) for _ in range(2)]
    sources, at = [], 0
    for i, count in enumerate(counts):
        norm = Norm(torch.from_numpy(weights[i]), 1e-5) if i < 2 and seed % 3 == 0 else None
        bias = torch.from_numpy(biases[i]) if seed % 2 else None
        sources.append(rope.HeadSource(whole_product.columns(at, dim * count), bias, norm))
        at += dim * count
    pairs = dim // 2 if seed % 3 else dim // 4
    turn = rope.Rotation(torch.randn(250, 2, pairs), pairs, bool(seed & 2))
    positions = rng.permutation(250)[:rows].astype(np.int32)
    tables = np.arange(2 * rows * 32, dtype=np.int32).reshape(2 * rows, 32)
    extra = np.zeros(rows + 1, np.int32)
    extra[2:] = 1  # row 1 is stored in one more table
    cache = torch.zeros(2 * rows * 32, heads.page_stride, dtype=torch.float16)
    output = torch.zeros(rows, heads.num_heads * dim)
    arrays = (
        positions,
        np.arange(rows, dtype=np.int32),
        extra,
        np.array([rows + 1], np.int32),
        tables,
    )
    slots = rope.SlotMapping(*map(torch.from_numpy, arrays))
    header = torch.tensor([rows], dtype=torch.int32)
    head_sources = (sources[0], sources[1], sources[2])
    rope.launch(
        interpreted(), header, rows, slots, head_sources, (turn, turn), heads, cache, output
    )
    for row in range(rows):
        x = product[:, row].sum(0) + (np.concatenate(biases) if seed % 2 else 0)
        queries, keys, values = np.split(x.reshape(-1, dim), np.cumsum(counts[:2]))
        if seed % 3 == 0:
            queries, keys = normalized(queries, weights[0]), normalized(keys, weights[1])
        queries, keys = (rotated(x, turn, positions[row], dim) for x in (queries, keys))
        np.testing.assert_allclose(output[row].numpy(), queries.reshape(-1), rtol=1e-4, atol=1e-4)
        stored_in = [row, rows + 1] if row == 1 else [row]
        for table in stored_in:
            page = cache[tables[table, 16 + positions[row] // PAGE]].numpy()
            for head_values, offset in ((keys, heads.keys_at), (values, heads.values_at)):
                stored = page[offset:][: head_values.size * PAGE].reshape(-1, PAGE, dim)
                np.testing.assert_allclose(
                    stored[:, positions[row] % PAGE], head_values, rtol=2e-3, atol=2e-3
                )
