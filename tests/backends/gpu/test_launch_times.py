"""Kernel launches overlap only on GPUs where this was measured to be correct and not slower."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from twostroke.backends.gpu import launch_times  # noqa: E402
from twostroke.backends.gpu.device import GpuDevice  # noqa: E402
from twostroke.backends.gpu.launch_times import LaunchTimes, measure, overlapping  # noqa: E402

HOPPER = GpuDevice("none", torch.device("cuda:0"), 90, 132)


@pytest.mark.parametrize(
    ("device", "times", "overlaps"),
    [
        (HOPPER, LaunchTimes(2e-6, 1e-6), True),
        (HOPPER, LaunchTimes(1e-6, 1e-6), True),
        (HOPPER, LaunchTimes(1e-6, 2e-6), False),
        (HOPPER, LaunchTimes(2e-6, None), False),
        (HOPPER, None, False),
        (replace(HOPPER, may_overlap=False), LaunchTimes(2e-6, 1e-6), False),
    ],
)
def test_each_start_decides(
    monkeypatch: pytest.MonkeyPatch, device: GpuDevice, times: LaunchTimes | None, *, overlaps: bool
) -> None:
    monkeypatch.setattr(launch_times, "measure", lambda _: times)
    assert overlapping(device, device.gpu(torch.bfloat16)).overlaps is overlaps


@pytest.mark.parametrize("wrong", [0, 1])
def test_chains_with_unlike_results_do_not_overlap(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    class Chain:
        def __init__(self, gpu: Any) -> None:
            self.target = torch.full((4,), 2.0 + wrong * gpu.overlaps)

        def launch(self) -> None:
            pass

        def capture(self, _: object) -> None:
            pass

        def seconds(self) -> float:
            return 1e-6

    monkeypatch.setattr(launch_times, "_Chain", Chain)
    result = launch_times._measure(HOPPER)
    assert result == LaunchTimes(1e-6, None if wrong else 1e-6)


@pytest.mark.parametrize(
    "device", [replace(HOPPER, architecture=80), replace(HOPPER, torch_device=torch.device("cpu"))]
)
def test_elsewhere_nothing_is_measured(device: GpuDevice) -> None:
    assert measure(device) is None


def test_what_fails_is_left_to_the_engine() -> None:
    """PyTorch without CUDA: the engine reports the error itself."""
    assert measure(HOPPER) is None
