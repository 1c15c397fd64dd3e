"""All cases that `make long SUITE=gpu-compile` compiles can be listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

from cases import CASES
from compile import _early


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_each_kernel_of_each_case_is_given_all_that_it_takes(architecture: int) -> None:
    for name, case in CASES.items():
        for launch in case(architecture).launches:
            assert len(launch.types) == len(launch.arguments) + len(launch.constants), name


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (["CCTL.E.PF2 [R2]", "PREEXIT", "ACQBULK", "LDG.E R2", "EXIT"], None),
        (["LDG.E R2, desc[UR4][R2.64]", "PREEXIT", "ACQBULK"], "LDG.E R2"),
        (["@P0 EXIT", "PREEXIT", "ACQBULK"], "@P0 EXIT"),
        (["PREEXIT", "ST.E [R2], R4", "ACQBULK"], "ST.E"),
        (["PREEXIT", "EXIT"], "EXIT"),
        (["PREEXIT"], "does not wait"),
    ],
)
def test_a_kernel_waits_before_it_accesses_memory_or_ends(
    code: list[str], fault: str | None
) -> None:
    result = _early([(16 * i, text) for i, text in enumerate(code)])
    assert result is None if fault is None else fault in str(result)
