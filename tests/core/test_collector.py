"""The garbage collector in a server."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from twostroke.core.process_tuning import tune_garbage_collector

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("_as_it_was")
def test_old_objects_are_exempt_and_a_step_causes_no_collection() -> None:
    objects: list[list[int]] = [[] for _ in range(10)]
    tune_garbage_collector()
    assert gc.get_freeze_count() > len(objects)
    before = gc.get_stats()[0]["collections"]
    step = [[number] for number in range(1024)]
    assert gc.get_stats()[0]["collections"] == before
    assert len(step) == 1024


@pytest.mark.usefixtures("_as_it_was")
def test_cycles_that_grew_old_are_not_compared_with_exempt_objects() -> None:
    objects: list[list[int]] = [[] for _ in range(600_000)]
    tune_garbage_collector()
    assert gc.get_freeze_count() > len(objects)
    gc.set_threshold(700)
    before = gc.get_stats()[2]["collections"]
    cycles: list[list[object]] = []
    for _ in range(100_000):
        cycles.append([cycles])
    assert gc.get_stats()[2]["collections"] > before


@pytest.mark.usefixtures("_as_it_was")
def test_cycles_are_still_collected() -> None:
    tune_garbage_collector()
    before = gc.get_stats()[0]["collections"]
    for _ in range(60_000):
        cycle: list[object] = []
        cycle.append(cycle)
    assert gc.get_stats()[0]["collections"] > before
