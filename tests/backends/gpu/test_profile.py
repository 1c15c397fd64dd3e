"""Profiles of the gpu backend have a row for each launch, and no waits for the processor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from click.testing import CliRunner  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from support.tiny import Tiny, write_tiny_gguf  # noqa: E402
from twostroke.backends.gpu import timeline  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402
from twostroke.cli.profile import command  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_each_launch_stands_beside_its_bytes_and_its_floor(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", Tiny(seed=3, fmt="Q8_0", num_layers=1))
    arguments = ["--backend", "gpu", "--streams", "1", "--context", "5", "--steps", "1", "--json"]
    ran = CliRunner().invoke(command, [str(path), *arguments])
    assert ran.exit_code == 0, ran.output
    body = json.loads(ran.stdout)
    assert "interpreted kernels" in body["backend"]
    (step,) = body["steps"]
    rows = {row["name"]: row for row in step["operations"]}
    assert list(rows) == [
        "embed", "norm", "attn_q,k,v", "rope rope", "attention", "attn_output", "add norm",
        "ffn_gate,up", "silu", "ffn_down", "logits",
    ]  # fmt: skip
    assert rows["add norm"]["calls"] == 2
    assert min(row["time_s"] for row in rows.values()) > 0
    down = rows["ffn_down"]
    weights = 2 * down["flops"] // 2  # 128 inputs take a tile of 256
    assert down["bytes"] == weights * 34 // 32  # Q8_0: 34 bytes for 32 weights
    for row in rows.values():
        floors = (
            row["bytes"] / body["machine"]["bandwidth"],
            row["flops"] / body["machine"]["peak"],
        )
        assert row["floor_s"] >= max(floors) * 0.999
    for figure in ("bytes", "flops", "floor_s"):
        assert step["whole"][figure] == pytest.approx(sum(row[figure] for row in rows.values()))
    assert "say nothing about a GPU" in step["mend_next"]


class Clock:
    """A simulated GPU with a queue, and a processor that takes `launch_s` for each launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launch_s: float) -> None:
        self.gpu_s = self.processor_s = 0.0
        self.launch_s, self.waits = launch_s, list[int]()
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))

    def run(self, seconds: float) -> None:
        self.processor_s += self.launch_s
        self.gpu_s = max(self.gpu_s, self.processor_s) + seconds

    def sleep(self, cycles: int) -> None:
        self.waits.append(cycles)
        self.run(cycles * 1e-9)


class Event:
    """A point in the queue of a `Clock`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at_s = max(self.clock.gpu_s, self.clock.processor_s)

    def query(self) -> bool:
        return self.at_s <= self.clock.processor_s

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


@pytest.mark.parametrize("launch_s", [1e-5, 1e-3])
def test_times_are_the_gpus_however_long_the_processor_takes_to_launch(
    monkeypatch: pytest.MonkeyPatch, launch_s: float
) -> None:
    clock = Clock(monkeypatch, launch_s)
    parts = [(1 + part % 5) * 1e-6 for part in range(150)]

    def launch(mark: Callable[[], Any]) -> None:
        for seconds in parts:
            mark()
            clock.run(seconds)
        mark()

    gpu = replace(interpreted(), device=torch.device("cuda"))
    assert timeline.seconds_of(gpu, launch) == pytest.approx(parts)
    assert (len(set(clock.waits)) > 1) == (launch_s == 1e-3)  # waits too short were tried first
    assert len(parts) / clock.waits.count(clock.waits[-1]) <= 64
