"""The GPU campaign's predictions, which need neither a GPU nor PyTorch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu import campaign as gpu

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dry_run_predicts_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows" / "campaign.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(out)])
    gpu.main()
    body = json.loads(out.read_text())
    assert body["predicted_only"]
    assert list(body["rows"]) == list(gpu.ROWS)
    decode_row, many = (body["rows"][f"{name}-8b-bf16"] for name in ("decode", "prefill"))
    assert 15e9 < decode_row["bytes"] < 17e9  # 8.03 billion weights of two bytes, but for the table
    assert decode_row["floor_ms"] == pytest.approx(1e3 * decode_row["bytes"] / 4.3e12, abs=1e-3)
    assert many["floor_ms"] == pytest.approx(1e3 * many["flops"] / 790e12, abs=1e-3)
    assert decode_row["predicted_ms"] > decode_row["floor_ms"]
    assert "not measured" in capsys.readouterr().out
    ladder = [body["rows"][name] for name in gpu.ROWS if name.startswith("ladder-")]
    speeds = [row["predicted_tokens_s"] for row in ladder]
    assert speeds == sorted(speeds)
    read = body["rows"]["attention-decode-32k"]["bytes"]
    assert read == pytest.approx((32_768 - 256) * 32 * 8 * 2 * 128 * 2, rel=1e-3)  # float16
    block = body["rows"]["attention-prefill-8k"]["flops"]  # the second half of the first half
    assert block == pytest.approx(4 * 4096**2 * 32 * 32 * 128, rel=2e-3)
    fast = body["rows"]["prefill-8b-fp8"]
    assert many["floor_ms"] / 2 < fast["floor_ms"] < many["floor_ms"] / 1.7  # attention is BF16
