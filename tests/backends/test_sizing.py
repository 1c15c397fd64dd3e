"""The size of the KV cache, and errors whose advice works."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from support.programs import program_of_layers
from twostroke.backends.kv_size import CacheSize, size_kv_cache
from twostroke.core.control_groups import MemoryLimit
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.options import PAGE_SIZES, CacheOptions
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.program.mesh import Mesh
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from twostroke.model.program import Program

MB = 10**6
CONTEXT = 8192
PROGRAM = program_of_layers([None] * 30, num_kv_heads=3, head_dim=64, context_length=CONTEXT)
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
WEIGHT_BYTES = 98 * MB


_WINDOWS = [None if layer % 6 == 5 else 512 for layer in range(18)]
GEMMA = program_of_layers(_WINDOWS)


def size(free_bytes: int = 10**11, *, running: int = 1, **options: Any) -> CacheSize:
    cache = CacheOptions(**options)
    return size_kv_cache(PROGRAM, cache, 256, WEIGHT_BYTES, free_bytes, max_running=running)


def refusal(free_bytes: int = 10**11, **options: int | None) -> str:
    with pytest.raises(MemoryLimitError) as caught:
        size(free_bytes, **options)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_small_model_reserves_little_of_plenty_of_memory() -> None:
    """The cache is as large as the weights and one context, or as the running short requests."""
    page_bytes = 16 * TOKEN_BYTES
    assert size().num_pages == 512 + WEIGHT_BYTES // page_bytes
    result = size(running=256)
    assert result == CacheSize(CONTEXT, 2048, 16, 2048 * page_bytes)
    assert size(running=10_000).num_pages == 8 * 512
    assert size(running=256, context_length=64).num_pages == 8 * 4


def test_int8_pages_hold_almost_twice_as_many_tokens() -> None:
    int8_size, usual = (
        size(7 * 10**8, running=256, kv_format=kv_format) for kv_format in ("int8", "f16")
    )
    assert int8_size.kv_format == "int8"
    assert 1.9 < int8_size.num_pages / usual.num_pages < 2
    assert int8_size.cache_bytes == int8_size.num_pages * 16 * 30 * 2 * 3 * (64 + 2)


def test_pages_take_half_of_what_is_free() -> None:
    free = 10**9
    result = size(free, running=256)
    assert 512 <= result.num_pages < 2048
    assert 0.45 * free < result.cache_bytes + WEIGHT_BYTES < 0.6 * free


def test_one_whole_context_may_take_more_than_half() -> None:
    result = size(WEIGHT_BYTES + 128 * 2**20 + 200 * MB)
    assert (result.num_pages, result.context_length) == (512, CONTEXT)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requested_memory_is_filled_and_not_exceeded(page_size: int) -> None:
    result = size(memory_bytes=200 * MB, page_size=page_size)
    assert result.page_size == page_size
    assert 0 <= 200 * MB - result.cache_bytes < page_size * TOKEN_BYTES
    assert result.cache_bytes == result.num_pages * page_size * TOKEN_BYTES


def test_ranks_that_divide_places_store_their_share_of_each_page() -> None:
    mesh = Mesh(column_parts=(1, 1), kv_by_tokens=True)
    parts = [rank.program for rank in shard(PROGRAM, mesh)]
    for local_parts, share in ((parts, 1.0), (parts[:1], 0.5)):  # on one machine, on two
        result = size_kv_cache(
            PROGRAM, CacheOptions(200 * MB), 256, WEIGHT_BYTES, 10**11, parts=local_parts, mesh=mesh
        )
        assert result.page_size == 128
        assert result.cache_bytes == result.num_pages * 128 * TOKEN_BYTES * share


def test_the_last_page_of_a_context_can_be_partial() -> None:
    assert size(context_length=17, running=100).num_pages == 8 * 2


def test_a_context_longer_than_the_models_names_the_option() -> None:
    with pytest.raises(UsageError, match=r"at most 8192 .* not 8193: lower --context-length"):
        size(context_length=8193)


def test_too_little_memory_says_weights_cache_and_what_would_fit() -> None:
    output = refusal(WEIGHT_BYTES + 128 * 2**20 + 24 * MB)
    for part in ("98 MB for its weights", "189 MB of KV cache", "8192 tokens", "256 MB of memory"):
        assert part in output
    assert "656 tokens would fit: use --context-length 656." in output
    assert "--kv-memory" not in output


@pytest.mark.parametrize("free_mb", [24, 0])
def test_a_limit_of_a_control_group_is_named(free_mb: int) -> None:
    limit = MemoryLimit(300 * MB, 0, "memory.max of /sys/fs/cgroup/box")
    available_bytes = WEIGHT_BYTES + 128 * 2**20 + free_mb * MB
    with pytest.raises(MemoryLimitError) as caught:
        size_kv_cache(
            PROGRAM, CacheOptions(), 256, WEIGHT_BYTES, available_bytes, group_limit=limit
        )
    output = str(caught.value)
    assert "free (memory.max of /sys/fs/cgroup/box allows 300 MB)" in output
    remedy = "use --context-length 656." if free_mb else "Raise that limit, or take a smaller"
    assert remedy in output


def test_a_small_cache_error_offers_both_options() -> None:
    output = refusal(memory_bytes=24 * MB)
    assert output.endswith("use --context-length 1040, or --kv-memory 189MB.")


def test_a_cache_larger_than_memory_has_its_own_sentence() -> None:
    output = refusal(10**9, memory_bytes=2 * 10**9)
    assert "--kv-memory asks for 2,000 MB" in output
    assert re.search(r"Lower --kv-memory to at most 751MB, which holds \d+ tokens", output)


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 10**6}])
def test_weights_that_fill_the_memory_leave_no_context(options: dict[str, int]) -> None:
    assert "no context would fit" in refusal(WEIGHT_BYTES + 10 * MB, **options)


def test_layers_with_a_window_need_pages_for_the_window_only() -> None:
    """One cache group of six has no window; the others need 512 positions and 256 rows."""
    result = size_kv_cache(GEMMA, CacheOptions(), 256, WEIGHT_BYTES, 10**11, max_running=10**4)
    num_near = (512 + 256 + 16 - 3) // 16 + 1
    assert result.num_pages == 8 * (2048 + 5 * num_near)
    assert result.cache_bytes == result.num_pages * 16 * 3 * 1024
    assert result.cache_bytes < 0.2 * 8 * 32768 * 18 * 1024


def test_below_the_window_every_group_needs_equally_many_pages() -> None:
    options = CacheOptions(context_length=320)
    result = size_kv_cache(GEMMA, options, 256, WEIGHT_BYTES, 10**11, max_running=10**4)
    assert result.num_pages == 8 * 6 * 20


@given(
    program=st.sampled_from([PROGRAM, GEMMA]),
    free_mb=st.integers(1, 2000),
    memory_mb=st.none() | st.integers(1, 3000),
    context=st.none() | st.integers(2, CONTEXT),
    page_size=st.sampled_from(PAGE_SIZES),
)
def test_every_advice_works_when_it_is_followed(
    program: Program, free_mb: int, memory_mb: int | None, context: int | None, page_size: int
) -> None:
    options = CacheOptions(
        memory_bytes=None if memory_mb is None else memory_mb * MB,
        context_length=context,
        page_size=page_size,
    )
    available_bytes = free_mb * MB
    for _ in range(3):  # lowering the cache may make the context the next thing to lower
        result = _size_or_refusal(program, options, available_bytes)
        if isinstance(result, CacheSize):
            assert _groups(program, page_size).num_needed(result.context_length) <= result.num_pages
            assert result.cache_bytes <= available_bytes - WEIGHT_BYTES
            return
        available_bytes -= free_mb * MB // 200 + 3 * MB  # processes use a little more by then
        advised = _follow(result, options)
        if advised is None:
            assert "no context would fit" in result
            return
        options = advised
    pytest.fail("the advice led nowhere")


def _groups(program: Program, page_size: int) -> PageGroups:
    return PageGroups(page_size, tuple(group.window for group in program.cache_groups))


def _size_or_refusal(program: Program, options: CacheOptions, free_bytes: int) -> CacheSize | str:
    try:
        return size_kv_cache(program, options, 256, WEIGHT_BYTES, free_bytes)
    except MemoryLimitError as error:
        return str(error)


def _follow(message: str, options: CacheOptions) -> CacheOptions | None:
    """Return the options that an error message advises; None without advice."""
    if match := re.search(r"use --context-length (\d+)", message):
        return replace(options, context_length=int(match[1]))
    if match := re.search(r"--kv-memory (?:to at most )?(\d+)MB", message):
        return replace(options, memory_bytes=int(match[1]) * MB)
    return None
