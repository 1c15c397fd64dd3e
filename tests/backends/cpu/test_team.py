"""Threads and memory on several NUMA nodes, which are simulated with this machine's cores."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.cpu import LEVELS, Sequence, cpu_backend, tiny_model
from support.native import load_level, native_dir
from support.native_linear import aligned
from support.programs import PROGRAMS, random_tensors
from twostroke.backends.cpu import team
from twostroke.backends.cpu.library import load_library
from twostroke.core.hardware import MemoryNode

if TYPE_CHECKING:
    from collections.abc import Iterator

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
TOKENS = list(range(60))
Q8_0, F32 = 8, 0

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="this takes two cores that are allowed")


@pytest.fixture(autouse=True)
def built(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))


@pytest.fixture
def on_nodes(monkeypatch):
    """Return a function that simulates NUMA nodes with these cores for later thread pools."""

    def place_nodes(*nodes: tuple[int, ...]) -> None:
        made_up = tuple(MemoryNode(number, cores) for number, cores in enumerate(nodes))
        monkeypatch.setattr(team, "memory_nodes", lambda: made_up)

    return place_nodes


@contextmanager
def pool_of(num_threads: int, level: str = "portable") -> Iterator[tuple[ctypes.CDLL, int]]:
    load_level(level)
    library = load_library(level)
    with team.thread_pool(library, num_threads) as pool:
        yield library, pool


def pack(library: ctypes.CDLL, pool: int, kind: int, shape: tuple[int, int]) -> bytes:
    """Return a random matrix as the pool's threads pack it."""
    source_bytes = shape[0] * shape[1] * 4 if kind == F32 else shape[0] * shape[1] // 32 * 34
    source = np.random.default_rng(3).integers(0, 60, source_bytes).astype(np.uint8)
    packed = aligned(library.ts_linear_packed_bytes(kind, *shape))
    library.ts_pack(pool, kind, *shape, source.ctypes.data, packed.ctypes.data)
    return packed.tobytes()


def masks() -> dict[int, set[int]]:
    """Return the cores that each of this process's threads may use."""
    threads = (int(entry.name) for entry in Path("/proc/self/task").iterdir())
    masks_by_thread = {}
    for thread in threads:
        with suppress(ProcessLookupError):  # a thread of an earlier test may just have ended
            masks_by_thread[thread] = os.sched_getaffinity(thread)
    return masks_by_thread


def masks_while_computing(
    library: ctypes.CDLL, pool: int, num_expected: int
) -> set[frozenset[int]]:
    """Return the sets of cores that the calling thread may use, during tasks and between them."""
    caller, seen, done = threading.get_native_id(), set(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(frozenset(os.sched_getaffinity(caller)))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    library.ts_measure_bandwidth(pool, 10**7)
    for _ in range(100):  # on a busy machine the watcher may have slept all the while
        if len(seen) < num_expected:
            library.ts_measure_bandwidth(pool, 10**7)
    done.set()
    watcher.join()
    return seen


def test_each_thread_keeps_to_its_node_and_the_caller_only_while_it_computes(on_nodes):
    first, second = {CORES[0]}, {CORES[1]}
    on_nodes(tuple(first), tuple(second))
    before = masks()
    with pool_of(4) as (library, pool):
        workers = sorted(masks().keys() - before.keys())
        seen = masks_while_computing(library, pool, 2)
        after = masks()
    assert seen == {frozenset(first), frozenset(CORES)}
    assert after[threading.get_native_id()] == set(CORES)
    assert [after[thread] for thread in workers] == [first, second, second]


def test_a_caller_that_may_not_use_its_node_keeps_its_cores(on_nodes):
    on_nodes((CORES[0],), (CORES[1],))
    mask_sets = []

    def call(library: ctypes.CDLL, pool: int) -> None:
        os.sched_setaffinity(0, {CORES[1]})  # of this thread alone
        mask_sets.append(masks_while_computing(library, pool, 1))
        mask_sets.append({frozenset(os.sched_getaffinity(0))})

    with pool_of(2) as (library, pool):
        thread = threading.Thread(target=call, args=(library, pool))
        thread.start()
        thread.join()
    assert mask_sets == [{frozenset({CORES[1]})}] * 2


@pytest.mark.parametrize("kind", [F32, Q8_0])
@pytest.mark.parametrize("shape", [(16, 32), (40, 96), (1003, 64)])
@pytest.mark.parametrize("threads", [2, 3])
def test_equal_parts_are_packed_like_small_pieces(on_nodes, kind, shape, threads):
    with pool_of(threads) as (library, pool):
        pieces = pack(library, pool, kind, shape)
    on_nodes((CORES[0],), (CORES[1],))
    with pool_of(threads) as (library, pool):
        assert pack(library, pool, kind, shape) == pieces


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["Q4_1", "experts"])
def test_results_are_the_same_bits_on_several_nodes(on_nodes, level, kind):
    program = PROGRAMS.get(kind)
    model = (program, random_tensors(program, "Q4_0", "Q8_0")) if program else tiny_model(fmt=kind)
    results = []
    for nodes in ((), ((CORES[0],), tuple(CORES[1:]))):
        on_nodes(*nodes)
        with cpu_backend(model, level, 16, threads=2) as backend:
            sequence = Sequence(backend, TOKENS, list(range(8)))
            drawn_tokens = [sequence.prefill(37), *sequence.decode(4)]
            results.append((drawn_tokens, backend.score(TOKENS).tobytes()))
    assert results[1] == results[0]


def test_cores_that_the_system_refuses_change_nothing(on_nodes):
    model = tiny_model()
    with cpu_backend(model, "portable", 8) as backend:
        expected = backend.score(TOKENS)
    absent = [core for core in (900, 901) if core not in CORES]
    on_nodes(*((core,) for core in absent), (5000,))
    with cpu_backend(model, "portable", 8, threads=3) as backend:
        assert np.array_equal(backend.score(TOKENS), expected)
        assert all(mask == set(CORES) for mask in masks().values())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_its_cores(on_nodes):
    on_nodes((CORES[0],), (CORES[1],))

    def child(queue):
        queue.put((backend.score(TOKENS).tobytes(), os.sched_getaffinity(0)))
        backend.close()

    with cpu_backend(tiny_model(), "portable", 8, threads=2) as backend:
        expected = backend.score(TOKENS).tobytes(), set(CORES)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert queue.get(timeout=30) == expected
        process.join(timeout=30)
        assert process.exitcode == 0


def has_memory_policies() -> bool:
    """Whether `get_mempolicy` works here; QEMU lacks it for the processes that it emulates."""
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    return number is not None and ctypes.CDLL(None).syscall(number, None, None, 0, None, 0) == 0


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="no such file here")
@pytest.mark.skipif(not has_memory_policies(), reason="the system has no memory policies")
def test_pages_lie_on_all_nodes_in_turn(on_nodes):
    def num_interleaved() -> int:
        return Path("/proc/self/numa_maps").read_text().count(" interleave")

    before = num_interleaved()
    model = tiny_model()
    with cpu_backend(model, "portable", 8) as backend:
        backend.score(TOKENS)
        assert num_interleaved() == before
    on_nodes((CORES[0],), (CORES[1],))
    with cpu_backend(model, "portable", 8) as backend:
        assert num_interleaved() == before + 1
        backend.score(TOKENS)
    assert num_interleaved() == before
