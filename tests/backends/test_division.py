"""How options divide a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.cpu import tiny_model
from twostroke.backends.division import mesh_for
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions

if TYPE_CHECKING:
    import pytest


def test_keys_and_values_are_divided_by_places_where_heads_would_store_them_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tiny_model(num_heads=6, num_kv_heads=3)[0]
    uneven = ParallelOptions(tensor=2)
    by_places = {
        "uneven": EngineOptions(parallel=uneven),
        "rows": EngineOptions(parallel=ParallelOptions(context=2)),
    }
    by_heads = {
        "even": EngineOptions(parallel=ParallelOptions(tensor=3)),
        "told": EngineOptions(parallel=ParallelOptions(tensor=2, kv_shares="heads")),
        "apart": EngineOptions(parallel=ParallelOptions(tensor=2, attention_shares=(1, 0))),
        "page size": EngineOptions(cache=CacheOptions(page_size=32), parallel=uneven),
        "torch": EngineOptions(ComputeOptions("torch"), parallel=uneven),
        "Ray": EngineOptions(parallel=ParallelOptions(tensor=2, launcher="ray")),
    }
    for name, options in (by_places | by_heads).items():
        assert mesh_for(options, program).kv_by_tokens == (name in by_places), name
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not mesh_for(by_places["uneven"], program).kv_by_tokens
