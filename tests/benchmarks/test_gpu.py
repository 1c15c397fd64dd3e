"""The GPU campaign's predictions, which need neither a GPU nor PyTorch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import gpu

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dry_run_predicts_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows" / "campaign.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(out)])
    gpu.main()
    found = json.loads(out.read_text())
    assert found["predicted_only"]
    assert list(found["rows"]) == list(gpu.ROWS)
    one, many = (found["rows"][f"{name}-8b-bf16"] for name in ("decode", "prefill"))
    assert 15e9 < one["bytes"] < 17e9  # 8.03 billion weights of two bytes, but for the table
    assert one["floor_ms"] == pytest.approx(1e3 * one["bytes"] / 4.3e12, abs=1e-3)
    assert many["floor_ms"] == pytest.approx(1e3 * many["flops"] / 790e12, abs=1e-3)
    assert one["predicted_ms"] > one["floor_ms"]
    assert "not measured" in capsys.readouterr().out
