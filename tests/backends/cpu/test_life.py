"""The backend's life: packed weights, threads, forks, closing, refusals."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

from support.cpu import Sequence, cpu_backend, tiny_model
from support.native import native_dir
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.measure import measure_bandwidth, measure_peak
from twostroke.core.errors import BackendError, UsageError


@pytest.fixture(autouse=True)
def built(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))


@pytest.fixture(scope="module")
def model():
    return tiny_model(fmt="Q8_0", embedding_fmt="Q8_0")


TOKENS = list(range(60))


def test_tensors_are_released_one_by_one_and_progress_reaches_the_end(model):
    program, tensors = model
    released, progress = [], []
    backend = CpuBackend(
        program,
        tensors,
        4,
        16,
        2,
        level="portable",
        release=released.append,
        progress=lambda done, total: progress.append((done, total)),
    )
    backend.close()
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) == 2]
    assert {id(t) for t in released} == {id(t) for t in matrices}
    assert progress[-1][0] == progress[-1][1] == sum(t.num_bytes for t in matrices)


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


@pytest.mark.parametrize(("page_size", "threads"), [(8, 1), (24, 1), (16, 0)])
def test_sizes_that_make_no_sense_are_refused(model, page_size, threads):
    with pytest.raises(UsageError, match="must be"):
        CpuBackend(*model, 4, page_size, threads, level="portable")


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages_of_any_size_give_the_same_tokens(model, page_size):
    with cpu_backend(model, "portable", 32, page_size=page_size) as backend:
        sequence = Sequence(backend, TOKENS, list(range(8)))
        drawn = [sequence.prefill(50), *sequence.decode(10)]
    with cpu_backend(model, "portable", 32) as backend:
        sequence = Sequence(backend, TOKENS, list(range(8)))
        assert [sequence.prefill(1000), *sequence.decode(10)] == drawn


def test_times_are_told_by_kind_and_start_again(model):
    with cpu_backend(model, "portable", 8) as backend:
        sequence = Sequence(backend, TOKENS, list(range(8)))
        sequence.prefill(1000)
        times = backend.times()
        assert times["linear"][0] > 0
        assert all(0 <= waiting <= elapsed for elapsed, waiting in times.values())
        assert backend.times()["linear"] == (0, 0)


def test_limits_of_the_machine_are_measured():
    assert measure_bandwidth("portable", 2, 8 << 20) > 1e8
    peak, kind = measure_peak("portable", 1)
    assert peak > 1e8
    assert kind
