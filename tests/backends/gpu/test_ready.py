"""All kernels are compiled before the first launch, and later processes find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

ROOT = Path(__file__).parents[3]


def printed(script: str, cache: Path) -> Any:
    """Return the output of a script with Triton's compiler and a driver that launches nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    command = [sys.executable, str(ROOT / "tests/gpu" / script)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_launches_find_the_kernels_that_were_compiled_together(tmp_path: Path) -> None:
    first, later = printed("ahead.py", tmp_path), printed("ahead.py", tmp_path)
    both = {"variants": 4, "launches": 10, "launching": {}}
    assert first == both | {"ahead": {"compiled": 4}}
    assert later == both | {"ahead": {"found": 4}}


def test_engines_do_on_a_gpu_what_they_do_in_the_interpreter(tmp_path: Path) -> None:
    """Covers graphs, tapes, events, copies, steps in flight and times, with PyTorch's tensors."""
    engines = printed("engine.py", tmp_path)
    assert [engine["overlaps"] for engine in engines] == [True, True, True, False]
    for engine in engines:
        assert engine.pop("ahead") > 30
        assert engine.pop("launches") > 500
        # Nothing is compiled late; where launches may overlap, two chains were measured, too.
        chains = 2 if engine.pop("overlaps") else 0
        assert engine == {"captured": 26 + chains, "replays": 23 + 10 * chains}
