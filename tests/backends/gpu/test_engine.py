"""The engine on the gpu backend with interpreted kernels: many requests, and those of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make test-gpu")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from support.tiny import Tiny, write_tiny_gguf  # noqa: E402
from twostroke.core.config import (  # noqa: E402
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.errors import BackendError  # noqa: E402
from twostroke.core.sampling import SamplingParams  # noqa: E402
from twostroke.engine.llm import LLM  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["hello world", "the world is the world", "a", "of the world to the world of the world"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "tiny.gguf", Tiny(seed=3, fmt="F16", num_layers=1)))


def engine(tiny: str, backend: str, num_tokens: int = 256, **options: Any) -> LLM:
    batch = BatchOptions(token_budget=options.pop("token_budget", 24), max_running=16)
    parts = {"speculation": SpeculationOptions(method="off"), **options}
    kept = CacheOptions(context_length=64, memory_bytes=num_tokens * 2 * 2 * 2 * 16)
    return LLM(tiny, options=EngineOptions(ComputeOptions(backend), kept, batch, **parts))


def test_greedy_answers_and_log_probabilities_are_the_cpu_backends(tiny: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    answers = []
    for backend in ("cpu", "gpu"):
        with engine(tiny, backend) as llm:
            answers.append([one for (one,) in llm.generate(PROMPTS, params)])
    for right, ours in zip(*answers, strict=True):
        assert ours.text == right.text
        for theirs, own in zip(right.logprobs, ours.logprobs, strict=True):
            assert own.logprob == pytest.approx(theirs.logprob, abs=0.02)


def test_what_the_backend_cannot_do_is_said_in_a_sentence(
    tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from twostroke.backends.gpu import device

    with pytest.raises(BackendError, match="interpreted on the cpu, not on 'cuda:3'"):
        device.find("cuda:3")
    monkeypatch.setattr(device, "find_spec", lambda name: None if name == "triton" else name)
    with pytest.raises(BackendError, match=r"needs Triton: pip install 'twostroke\[gpu\]'"):
        device.find()
    monkeypatch.undo()
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match="built without CUDA"):
        device.find()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "none")
    with pytest.raises(BackendError, match="There is no NVIDIA driver here"):
        device.find()
    assert not device.may_exist()
    monkeypatch.setattr(device, "_DRIVER", tmp_path)

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found 11040). Update it")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(BackendError, match=r"cannot be used: The NVIDIA driver .* too old"):
        device.find()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("TWOSTROKE_CACHE", "/proc/nothing")
    with pytest.raises(BackendError, match="cannot be kept in /proc/nothing/triton"):
        device.find()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    with pytest.raises(
        BackendError, match=r"no device 'cuda:1' here\. Devices: auto, cuda, cuda:0"
    ):
        device.find("cuda:1")
    old = type("Properties", (), {"name": "T4", "major": 7, "minor": 5})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)
    with pytest.raises(BackendError, match="T4 is an sm_75; the gpu backend needs sm_80"):
        device.find()
