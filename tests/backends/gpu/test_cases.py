"""Whatever `make gpu-compile` compiles can be listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch and Triton: make test-gpu")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

from cases import CASES


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_each_kernel_of_each_case_is_given_all_that_it_takes(architecture: int) -> None:
    for name, case in CASES.items():
        for launch in case(architecture).launches:
            assert len(launch.types) == len(launch.arguments) + len(launch.constants), name
