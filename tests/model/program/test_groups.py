"""The division of layers into groups that share pages, and the size of a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.programs import program_of_layers
from twostroke.model.program import CacheFormat, CacheGroup, CacheLayer, Program
from twostroke.model.program.kv_layout import group_layers
from twostroke.model.program.ops import Attention, ExternalInput


def program(*windows: int | None, num_kv_heads: int = 1, head_dim: int = 256) -> Program:
    return program_of_layers(windows, num_kv_heads=num_kv_heads, head_dim=head_dim)


def gemma(num_layers: int) -> list[int | None]:
    """Return the windows of a model in which every sixth layer has none."""
    return [None if layer % 6 == 5 else 512 for layer in range(num_layers)]


def test_without_windows_there_is_one_group_of_all_layers() -> None:
    assert program(*[None] * 30).cache_groups == (CacheGroup(tuple(range(30))),)


def test_with_one_window_everywhere_there_is_one_group() -> None:
    assert program(*[4096] * 32).cache_groups == (CacheGroup(tuple(range(32)), 4096),)


def test_window_as_long_as_the_context_is_none() -> None:
    assert program(*[32768, None] * 4).cache_groups == (CacheGroup(tuple(range(8))),)


def test_gemma_3_270m_has_six_groups_of_three_layers() -> None:
    groups = program(*gemma(18)).cache_groups
    assert groups[0] == CacheGroup((5, 11, 17))
    assert [group.window for group in groups[1:]] == [512] * 5
    assert [len(group.layers) for group in groups] == [3] * 6
    # Some of each third, so that each of three stages stores a third of every page.
    assert groups[1].layers == (0, 6, 12)
    assert program(*gemma(18)).page_bytes(16) == 16 * 3 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(26, [2] * 13), (34, [5] * 6 + [4]), (48, [8] * 6)]
)
def test_larger_gemmas_leave_few_slots_empty(num_layers: int, sizes: list[int]) -> None:
    assert [len(group.layers) for group in group_layers(gemma(num_layers))] == sizes


@given(st.lists(st.sampled_from([None, None, 128, 4096, 1]), min_size=1, max_size=90))
def test_each_layer_is_in_one_group_of_its_window(windows: list[int | None]) -> None:
    groups = group_layers(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert len(groups) <= 16
    size = max(len(group.layers) for group in groups)
    assert len(groups) * size < 2 * len(windows) + size, "more empty places than layers"


def test_bytes_of_a_page_follow_those_of_a_value() -> None:
    some = program(None, 8, 8, num_kv_heads=2, head_dim=8)
    assert (
        some.page_bytes(16, CacheFormat(1)) * 2
        == some.page_bytes(16, CacheFormat(2))
        == 16 * 32 * 2
    )
    assert CacheLayer(1, 3).bytes_per_token(CacheFormat(1.25)) == 8


def test_page_fits_the_largest_group_if_layers_differ() -> None:
    small = Attention("a", "x", "x", "x", 0, 1, 1, 8, 1.0)
    large = Attention("b", "x", "x", "x", 1, 2, 2, 8, 1.0, window=5)
    mixed = Program("mixed", (ExternalInput("x", 16), small, large), 1000, 32768)
    assert mixed.page_bytes(4) == 4 * 2 * 2 * 8 * 2
