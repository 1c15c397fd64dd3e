"""Failures on a GPU end in one clear error message each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.cpu import tiny_model  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.core.errors import BackendError, MemoryLimitError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_an_interrupt_while_a_graph_is_captured_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's complaint about the unfinished capture is hidden."""
    from contextlib import contextmanager
    from functools import partial

    from twostroke.backends.gpu.graphs import Graphs
    from twostroke.backends.gpu.launch import Kernels, interpreted

    @contextmanager
    def graph(_: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation would make the stream wait")

    def launch() -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(True)

    interrupts: list[bool] = []
    kernels = Kernels()
    graphs = Graphs(interpreted(), kernels)
    graphs.is_used = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(KeyboardInterrupt):
        graphs.capture(1, partial(kernels.call, launch))
    with pytest.raises(RuntimeError, match="would make the stream wait"):
        graphs.capture(1, lambda: None)


def test_what_fails_while_an_engine_is_built_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kernel cannot be compiled by Triton, another fails in its first launch."""
    from triton.runtime.errors import OutOfResources

    from twostroke.backends.gpu import backend, transfers
    from twostroke.core.errors import DeviceLostError

    def failing(error: Exception) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(backend, "prepare", fail)

    model = tiny_model(num_layers=1)
    failing(OutOfResources(120_000, 101_376, "shared memory"))
    with pytest.raises(BackendError, match=r"interpreted kernels, an sm_90: out of resource: sha"):
        GpuBackend(*model, 4, 16, find_device())
    failing(RuntimeError("CUDA error: an illegal instruction was encountered\nmore"))
    with pytest.raises(RuntimeError, match="illegal instruction"):
        GpuBackend(*model, 4, 16, find_device())
    monkeypatch.setattr(
        backend, "lost", lambda gpu, error: transfers.DeviceLostError(f"The GPU failed: {error}")
    )
    with pytest.raises(DeviceLostError, match="The GPU failed"):
        GpuBackend(*model, 4, 16, find_device())


def test_a_kernel_fault_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from msgspec.structs import replace

    from twostroke.backends.gpu.launch import interpreted
    from twostroke.backends.gpu.transfers import checked
    from twostroke.core.errors import DeviceLostError

    gpu = replace(interpreted(), device=torch.device("cuda"))

    def lost(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for synchronize, kind in ((lost, DeviceLostError), (lambda _: None, RuntimeError)):
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        with pytest.raises(kind) as caught, checked(gpu):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        assert type(caught.value) is kind
    with pytest.raises(MemoryLimitError, match="no memory left"), checked(gpu):
        raise torch.OutOfMemoryError
