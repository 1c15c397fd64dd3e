"""Fewer threads compute while other programs keep cores busy, and no token changes."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.cpu import LEVELS, Sequence, cpu_backend, tiny_model
from support.native import load_level, native_dir
from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.team import ActiveThreads, thread_pool

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

QUIET, CROWDED = 0.1, 0.9  # shares of a step in which a thread waits
STEP_S = 0.005


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))


def decisions(num_threads: int, waits: Items[float], step_s: float = STEP_S) -> list[int]:
    """Return how many threads compute after each step.

    `waits`: for each step, the ratio of its time that threads waited for each other.
    """
    load_level("portable")
    library = load_library("portable")
    elapsed_s = np.full(len(waits), step_s)
    waiting_s = np.array(waits) * elapsed_s
    active = np.zeros(len(waits), np.int32)
    arrays = elapsed_s.ctypes.data, waiting_s.ctypes.data, active.ctypes.data
    library.ts_crowding(num_threads, len(waits), *arrays)
    return active.tolist()


def beside_others(num_threads: int, num_free: int, seconds: float) -> list[int]:
    """Return the numbers of threads if more than `num_free` threads wait for each other."""
    waits: list[float] = []
    active = num_threads
    for _ in range(int(seconds / STEP_S)):
        waits.append(CROWDED if active > num_free else QUIET)
        active = decisions(num_threads, waits)[-1]
    return decisions(num_threads, waits)


@pytest.mark.parametrize("num_threads", [1, 2, 4, 16])
def test_all_threads_compute_on_a_quiet_machine(num_threads: int) -> None:
    waits = [random.Random(i).uniform(0, 0.3) for i in range(2000)]
    assert set(decisions(num_threads, waits)) == {num_threads}


def test_one_late_step_changes_nothing() -> None:
    waits = [CROWDED if step % 50 == 7 else QUIET for step in range(2000)]
    assert set(decisions(2, waits)) == {2}


@pytest.mark.parametrize(("num_threads", "num_free"), [(2, 1), (4, 3), (8, 2)])
def test_threads_rest_until_the_others_have_cores(num_threads: int, num_free: int) -> None:
    active = beside_others(num_threads, num_free, 3.0)
    first = active.index(num_free)
    assert first * STEP_S < 0.05 * (num_threads - num_free)
    assert min(active) == num_free
    assert active[first:].count(num_free) > 0.85 * len(active[first:])


def test_a_resting_thread_is_tried_ever_more_rarely() -> None:
    active = beside_others(2, 1, 20.0)
    tries = [i * STEP_S for i in range(1, len(active)) if active[i - 1 : i + 1] == [1, 2]]
    gaps = np.diff(tries)
    assert 0.2 < gaps[0] < 0.7
    assert np.all(np.diff(gaps) > -0.1)
    assert 3.5 < gaps[-1] < 4.5


def test_threads_come_back_when_cores_are_free() -> None:
    waits = [CROWDED] * 20 + [QUIET] * 1000
    assert decisions(2, waits)[19] == 1
    assert decisions(2, waits)[-1] == 2


def test_slow_steps_decide_one_by_one() -> None:
    assert decisions(2, [CROWDED, QUIET], step_s=0.5) == [1, 2]


@pytest.mark.parametrize("level", LEVELS)
def test_any_number_of_threads_in_each_step_gives_the_same_tokens(level: str) -> None:
    """Threads pause and return in any order, also while they still wake up."""
    expected = drawn_with(level, [1])
    draw = random.Random(5)
    for _ in range(3):
        assert drawn_with(level, [draw.choice([1, 1, 2, 3, 4, 4]) for _ in range(97)]) == expected


def drawn_with(level: str, counts: list[int]) -> list[object]:
    """Return the drawn tokens and log-probabilities.

    Step i is computed by `counts[i]` of four threads; the counts repeat.
    """
    drawn_tokens: list[object] = []
    with cpu_backend(tiny_model(num_layers=3), level, num_pages=16, threads=4) as backend:
        fix = load_library(level).ts_pool_fix_num_active
        for prompt_tokens, chunk in ((100, 100), (90, 7)):
            prompt = [token % 250 for token in range(prompt_tokens)]
            sequence = Sequence(backend, prompt, list(range(16)))
            for step in range(130):
                fix(backend._pool, counts[step % len(counts)])
                drawn_tokens.append(sequence.step(chunk))
            backend.forget(sequence.request)
    return drawn_tokens


def test_a_log_line_says_once_that_threads_rest(caplog: pytest.LogCaptureFixture) -> None:
    load_level("portable")
    library = load_library("portable")
    with thread_pool(library, 3) as pool, caplog.at_level(logging.INFO):
        threads = ActiveThreads(library, pool, 3)
        assert not threads.after_step(5.0)
        library.ts_pool_fix_num_active(pool, 2)
        assert [threads.after_step(0.9) for _ in range(5)] == [True] * 5
        library.ts_pool_fix_num_active(pool, 0)
        assert not threads.after_step(5.0)
    [record] = caplog.records
    assert "2 of 3 threads compute" in record.getMessage()
    assert "--threads 2 keeps it so" in record.getMessage()
