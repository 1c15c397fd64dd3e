"""The GPU campaign runs with interpreted kernels; only its times mean nothing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from benchmarks.gpu import campaign as gpu  # noqa: E402
from benchmarks.gpu import measure as gpu_measure  # noqa: E402
from benchmarks.gpu import models as gpu_models  # noqa: E402
from benchmarks.gpu import predict as gpu_predict  # noqa: E402
from benchmarks.gpu import products as gpu_products  # noqa: E402
from benchmarks.gpu import rows as gpu_rows  # noqa: E402
from benchmarks.gpu.rows import Row  # noqa: E402
from twostroke.backends.gpu import backend as module  # noqa: E402
from twostroke.core.errors import DeviceLostError, MemoryLimitError  # noqa: E402
from twostroke.lab.measure.single_step import StepShape  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

FEW, MANY = StepShape.decode(1, 20), StepShape.decode(3, 20)
ROWS = {
    "few": Row("tiny", "F16", FEW),
    "eager": Row("tiny", "F16", FEW, has_graphs=False),
    "drafts": Row("tiny", "F16", FEW, drafts=2, accepted=0.5),
    "attention": Row("tiny", "F16", MANY, less="few"),
    "other": Row("tiny", "F16", StepShape.prefill(24), kv="bf16"),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measure, "MEASURED_S", 0.0)
    monkeypatch.setattr(gpu_measure, "_PROFILES", 1)
    monkeypatch.setattr(gpu_measure, "_MOST_STEPS", 1)
    monkeypatch.setattr(gpu_rows, "_LEAST_ROWS", 24)
    monkeypatch.setitem(gpu_models._SHAPES, "tiny", (64, 1, 1, 1, 64, 256))
    for campaign_module in (gpu, gpu_predict):
        monkeypatch.setattr(campaign_module, "ROWS", ROWS)
    monkeypatch.setattr(gpu, "ORDER", ("right", *ROWS))
    monkeypatch.setattr(gpu, "CHECKS", {"right": lambda: {"differ": 0}})


class Started:
    """Records which engines are started; the first `num_refused` find too little memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_refused: int = 0) -> None:
        self.rooms: list[int] = []
        backend_class, num_left = module.GpuBackend, [num_refused]

        def make(*args: Any, **options: Any) -> Any:
            self.rooms.append(args[2])
            num_left[0] -= 1
            if num_left[0] >= 0:
                raise MemoryLimitError("too little")
            return backend_class(*args, **options)

        monkeypatch.setattr(module, "GpuBackend", make)


@pytest.fixture
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"ms": 2.0, "gpu_ms": 1.0, "detail": ""}
    monkeypatch.setattr(gpu_measure.Engines, "measured", lambda *_: {**results})


def test_ways_to_multiply_are_right() -> None:
    result = gpu_products.products(("Q4_K",), ((256, 512),), (20, 70))
    assert set(result["Q4_K 256 x 512, 70 rows"]) >= {"128 by 256, 1 parts", "written out"}
    assert not [way for ways in result.values() for way in ways if "wrong" in way]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out), *options])
    gpu.main()
    body: dict[str, Any] = json.loads(out.read_text())
    return body


def test_rows_share_an_engine_and_each_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch)
    result = run(monkeypatch, tmp_path / "out.json")["rows"]
    assert list(result) == ["right", *ROWS]
    assert len(started.rooms) == 2
    assert [name for name in ROWS if "ready_s" in result[name]] == ["few", "other"]
    for name in ("few", "eager", "drafts", "other"):
        row = result[name]
        assert row["ms"] > 0
        assert row["compiled_late"] == 0
        kernels = row["kernels"]
        assert kernels["add norm"]["calls"] == 2
        assert row["gpu_ms"] == pytest.approx(
            sum(k["us"] for k in kernels.values()) / 1e3, rel=0.01
        )
    drafts, tokens = result["drafts"], 1 + 0.5 + 0.5**2
    assert drafts["tokens_s"] == pytest.approx(1e3 * tokens / drafts["ms"], abs=0.06)
    assert result["attention"]["step"].endswith(": attention")
    assert "ms" in result["attention"]
    printed = capsys.readouterr().out
    assert '| right | {"differ": 0' in printed
    assert "Predictions are" in printed


def test_too_little_memory_for_all_rows_is_enough_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch, num_refused=1)
    result = run(monkeypatch, tmp_path / "out.json", "--row", "few")["rows"]
    assert result["few"]["ms"]
    assert started.rooms[1] < started.rooms[0]
    Started(monkeypatch, num_refused=9)
    result = run(monkeypatch, tmp_path / "out.json", "--row", "other")["rows"]
    assert result["other"]["refused"] == "too little"


@pytest.mark.usefixtures("_nothing_is_measured")
def test_what_there_is_no_time_for_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert run(monkeypatch, out, "--minutes", "0.1")["rows"] == {}
    assert "6 parts are left, from right on: go on with --continue." in capsys.readouterr().out
    monkeypatch.setattr(gpu, "_CHECK_S", 0.0)
    assert list(run(monkeypatch, out, "--minutes", "0.1")["rows"]) == ["right"]
    result = run(monkeypatch, out, "--continue", "--row", "right", "--row", "few")["rows"]
    assert list(result) == ["right", "few"]


@pytest.mark.usefixtures("_nothing_is_measured")
def test_a_part_that_fails_does_not_end_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kernel's fault the campaign needs a new process, and does not repeat the part."""
    out, commands = tmp_path / "out.json", list[list[str]]()

    def fail(kind: type[Exception]) -> None:
        def check() -> dict[str, Any]:
            raise kind("The GPU failed: illegal address.")

        monkeypatch.setattr(gpu, "CHECKS", {"right": check})

    closed: list[bool] = []
    monkeypatch.setattr(gpu_measure.Engines, "close", lambda _: closed.append(True))
    fail(ValueError)
    result = run(monkeypatch, out, "--row", "right", "--row", "few")["rows"]
    assert result["right"]["failed"] == "ValueError: The GPU failed: illegal address."
    assert result["few"]["ms"]
    assert closed
    fail(DeviceLostError)
    monkeypatch.setattr(gpu, "_is_alive", lambda: False)

    def replaced(_: str, words: list[str]) -> None:
        commands.append(words)
        raise SystemExit

    monkeypatch.setattr(gpu.os, "execv", replaced)
    with pytest.raises(SystemExit):
        run(monkeypatch, out, "--row", "right", "--minutes", "5")
    assert commands[0][-1] == "--continue"
    assert 4 < float(commands[0][-2]) <= 5
    out.write_text(json.dumps({"rows": {}, "running": "few"}))
    result = run(monkeypatch, out, "--continue", "--row", "few")["rows"]
    assert result["few"] == {"failed": "It did not end."}
