"""The life of a cpu backend: packed weights, threads, forks, closing, refusals."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from support.cpu import LEVELS, PAGE_SIZE, Sequence, cpu_backend, greedy_request, run, tiny_model
from support.mixed_bits import mixed_bits
from support.native import IS_ARM, load_level, native_dir
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.plan import MeasuredOpTime
from twostroke.backends.cpu.team import measure_bandwidth, measure_peak
from twostroke.core.draft_tree import ROOT, DraftBranch
from twostroke.core.errors import BackendError
from twostroke.core.step import Slice


@pytest.fixture
def _has_address_space_limit():
    """Skip a test where RLIMIT_AS has no effect: QEMU ignores it for the processes it emulates."""
    script = """
import mmap, resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    mmap.mmap(-1, 4 << 30)
except (OSError, MemoryError):
    print("limited")
"""
    if b"limited" not in subprocess.check_output([sys.executable, "-c", script], timeout=60):
        pytest.skip("the system ignores limits of the address space (RLIMIT_AS)")


@pytest.fixture(autouse=True)
def built(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))


@pytest.fixture(scope="module")
def model():
    return tiny_model(fmt="Q8_0", embedding_fmt="Q8_0")


TOKENS = list(range(60))


def test_tensors_are_released_and_progress_reaches_the_end(model):
    program, tensors = model
    released, progress = [], []
    backend = CpuBackend(
        program,
        tensors,
        4,
        16,
        2,
        level="portable",
        release=released.extend,
        progress=lambda done, total: progress.append((done, total)),
    )
    backend.close()
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) == 2]
    assert {id(t) for t in released} == {id(t) for t in matrices}
    assert progress[-1][0] == progress[-1][1] == sum(t.num_bytes for t in matrices)


def test_facts_tell_apart_what_rounds_otherwise(model):
    precisions = []
    for options in ({}, {"kv_format": "int8"}, {"activation_bits": mixed_bits(*model)}):
        backend = CpuBackend(*model, 4, 16, 1, level="portable", **options)
        precisions.append(backend.facts.precision)
        backend.close()
    assert precisions[0] == "15 f16"
    assert len(set(precisions)) == 3


def test_steps_may_come_from_any_thread(model):
    with cpu_backend(model, "portable", 8, threads=3) as backend:
        expected = backend.score(TOKENS)
        results = []
        for _ in range(5):
            thread = threading.Thread(target=lambda: results.append(backend.score(TOKENS)))
            thread.start()
            thread.join()
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_alone_and_exits(model):
    def child(queue):
        queue.put(backend.score(TOKENS))
        backend.close()

    with cpu_backend(model, "portable", 8, threads=2) as backend:
        expected = backend.score(TOKENS)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert np.array_equal(queue.get(timeout=30), expected)
        process.join(timeout=30)
        assert process.exitcode == 0
        assert np.array_equal(backend.score(TOKENS), expected)


def test_closing_twice_does_no_harm_and_running_after_it_is_refused(model):
    backend = CpuBackend(*model, 4, 16, 2, level="portable")
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.score(TOKENS)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages_of_any_size_give_the_same_tokens(model, page_size):
    with cpu_backend(model, "portable", 32, page_size=page_size) as backend:
        sequence = Sequence(backend, TOKENS, list(range(8)))
        drawn_tokens = [sequence.prefill(50), *sequence.decode(10)]
    with cpu_backend(model, "portable", 32) as backend:
        sequence = Sequence(backend, TOKENS, list(range(8)))
        assert [sequence.prefill(1000), *sequence.decode(10)] == drawn_tokens


def test_times_of_fused_operations_start_again_after_each_read(model):
    with cpu_backend(model, "portable", 8) as backend:
        sequence = Sequence(backend, TOKENS, list(range(8)))
        sequence.prefill(1000)
        times = backend.times()
        assert len(times) == len(backend.fused)
        assert all(time.elapsed_s > 0 and time.waiting_s >= 0 for time in times)
        assert backend.times() == [MeasuredOpTime(0, 0)] * len(times)


def test_copied_pages_continue_as_their_originals(model):
    with cpu_backend(model, "portable", 16) as backend:
        first = Sequence(backend, TOKENS, list(range(8)))
        drawn_tokens = first.prefill(1000)
        for page in range(8):
            backend.copy_page(page, 8 + page)
        second = Sequence(backend, TOKENS, list(range(8, 16)))
        second.commit(second.slice(1000), drawn_tokens)
        assert second.decode(5) == first.decode(5)


def test_limits_of_the_machine_are_measured():
    assert measure_bandwidth("portable", 2, 8 << 20) > 1e8
    peak, kind = measure_peak("portable", 1)
    assert peak > 1e8
    assert kind


def test_instructions_of_twice_the_width_have_a_higher_peak():
    """A compiler that kept sums in memory would lose half of the peak or more.

    Only the oldest processors with AVX2 (AMD's before 2019) compute its halves one by one.
    """
    if IS_ARM:
        pytest.skip("the levels of AArch64 are equally wide")
    load_level("avx2")
    best = {level: max(measure_peak(level, 1)[0] for _ in range(3)) for level in LEVELS[:2]}
    assert best["avx2"] > 1.4 * best["portable"]


def resident_bytes():
    """Return the bytes of physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_many_rows_far_into_a_long_context_take_little_memory():
    length = 8192
    sizes = {"num_layers": 1, "num_heads": 8, "num_kv_heads": 1, "head_dim": 64}
    model = tiny_model(fmt="F32", context_length=length, **sizes)
    with cpu_backend(model, "portable", length // PAGE_SIZE, threads=16) as backend:
        request = greedy_request([i % 250 for i in range(length)])
        request.pages = [list(range(length // PAGE_SIZE))]
        request.num_computed = length - 384  # on pages that are still zero
        before = resident_bytes()
        run(backend, Slice(request, request.num_computed, 384, samples=True))
        assert resident_bytes() - before < 90e6


@pytest.mark.usefixtures("_has_address_space_limit")
def test_more_threads_than_the_system_gives_are_refused():
    script = """
import resource
from support.cpu import tiny_model
from twostroke.backends.cpu import CpuBackend
from twostroke.core.errors import BackendError
model = tiny_model(fmt="Q8_0", embedding_fmt="Q8_0")
limit = 1 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    CpuBackend(*model, 4, 16, 10000, level="portable")
except BackendError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    assert b"refuses 10000 threads" in done.stdout


@pytest.mark.usefixtures("_has_address_space_limit")
def test_a_mixture_without_memory_for_its_rows_fails_and_the_next_step_runs():
    script = """
import resource
from msgspec.structs import replace
from pathlib import Path
from support.cpu import cpu_backend, greedy_request, run
from support.programs import PROGRAMS, random_tensors
from twostroke.core.errors import MemoryLimitError
from twostroke.core.step import Slice
from twostroke.core.draft_tree import ROOT, DraftBranch
program = replace(PROGRAMS["many experts"], context_length=8192)
with cpu_backend((program, random_tensors(program)), "portable", 400) as backend:
    request = greedy_request([i % 250 for i in range(6000)])
    request.pages = [list(range(400))]
    expected = run(backend, Slice(request, 0, 20, samples=True))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        run(backend, Slice(request, 0, 6000, samples=True))
    except MemoryLimitError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(run(backend, Slice(request, 0, 20, samples=True)) == expected)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    assert b"No memory for a step of 6000 tokens" in done.stdout
    assert b"True" in done.stdout


@pytest.mark.parametrize(
    ("token", "pages"), [(-1, [0, 1]), (10**6, [0, 1]), (5, [0, 8]), (5, [-1, 0])]
)
def test_tokens_and_pages_that_do_not_exist_never_reach_memory(model, token, pages):
    with cpu_backend(model, "portable", 8) as backend:
        request = greedy_request([*range(20), token])
        request.pages = [pages]
        with pytest.raises(BackendError, match="does not have"):
            run(backend, Slice(request, 0, 21, samples=True))
        Sequence(backend, TOKENS, list(range(8))).prefill(1000)  # and it goes on


@pytest.mark.parametrize("page", [-1, 8])
@pytest.mark.parametrize("is_copied", [True, False])
def test_branches_on_pages_that_do_not_exist_never_reach_memory(model, page, is_copied):
    with cpu_backend(model, "portable", 8) as backend:
        sequence = Sequence(backend, TOKENS[:20], [0, 1])
        sequence.prefill(1000)
        branch = DraftBranch(1, ROOT, 21, 1, ((page,),), 1, (0,), is_copied)
        with pytest.raises(BackendError, match="does not have"):
            run(backend, Slice(sequence.request, 20, 1, True, (5, 6), (branch,)))
        Sequence(backend, TOKENS, list(range(8))).prefill(1000)  # and it goes on
