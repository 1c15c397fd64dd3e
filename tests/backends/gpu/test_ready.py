"""All kernels are compiled before the first launch, which finds them, as do later processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch and Triton: make test-gpu")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

ROOT = Path(__file__).parents[3]


def test_launches_find_the_kernels_that_were_compiled_together(tmp_path: Path) -> None:
    """With Triton's compiler and its caches, and a driver that launches nothing."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    command = [sys.executable, str(ROOT / "tests/gpu/ahead.py")]
    starts = []
    for _ in range(2):
        ran = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        starts.append(json.loads(ran.stdout))
    first, later = starts
    both = {"variants": 4, "launches": 10, "launching": {}}
    assert first == both | {"ahead": {"compiled": 4}}
    assert later == both | {"ahead": {"found": 4}}
