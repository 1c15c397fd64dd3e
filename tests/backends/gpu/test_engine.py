"""The engine on the gpu backend with interpreted kernels, with many requests at once."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.cpu import tiny_model  # noqa: E402
from support.programs import PROGRAMS, program_of_layers  # noqa: E402
from support.schedules import (  # noqa: E402
    Setting,
    fresh,
    random_requests,
    run_schedule,
)
from support.tiny import Tiny, tiny_of, write_tiny_gguf  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.backends.reference import ReferenceBackend  # noqa: E402
from twostroke.core.constraint import Constraint  # noqa: E402
from twostroke.core.errors import BackendError, MemoryLimitError  # noqa: E402
from twostroke.core.options import (  # noqa: E402
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import SamplingParams  # noqa: E402
from twostroke.engine.llm import LLM  # noqa: E402
from twostroke.engine.scheduler.policy import Continuous  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["hello world", "the world is the world", "a", "of the world to the world of the world"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "tiny.gguf", Tiny(seed=3, fmt="F16", num_layers=1)))


def gpu_backend(program: Any, tensors: Any, num_pages: int, **options: Any) -> GpuBackend:
    kwargs = {"element": torch.float32, "kv_format": "f32", "max_rows": 60, "piece": 32}
    return GpuBackend(program, tensors, num_pages, 16, find_device(), **kwargs, **options)


def engine(tiny: str, backend: str, num_tokens: int = 256, **options: Any) -> LLM:
    batch = BatchOptions(token_budget=options.pop("token_budget", 24), max_running=16)
    parts = {"speculation": SpeculationOptions(method="off"), **options}
    cache_options = CacheOptions(context_length=64, memory_bytes=num_tokens * 2 * 2 * 2 * 16)
    return LLM(tiny, options=EngineOptions(ComputeOptions(backend), cache_options, batch, **parts))


def test_greedy_answers_and_log_probabilities_are_the_cpu_backends(tiny: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    answers = []
    for backend in ("cpu", "gpu"):
        with engine(tiny, backend) as llm:
            answers.append([completion for (completion,) in llm.generate(PROMPTS, params)])
    for right, ours in zip(*answers, strict=True):
        assert ours.text == right.text
        for theirs, our_token in zip(right.logprobs, ours.logprobs, strict=True):
            assert our_token.logprob == pytest.approx(theirs.logprob, abs=0.02)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3-moe", {"num_layers": 1}),
        ("gemma4", {}),
        ("gemma4-experts", {}),
        ("deepseek-v2", {}),
        ("deepseek-v3", {}),
        ("granite", {}),
        ("minimax-m2", {"num_layers": 1}),
        ("muse-glimmer", {}),
        ("smollm3", {}),
        ("ernie4.5-experts", {}),
    ],
)
def test_families_answer_as_on_the_cpu(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of(family, fmt="Q8_0", **sizes))
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1)
    answers = []
    for backend in ("cpu", "gpu"):
        with engine(str(path), backend, 2048) as llm:
            answers.append([completion for (completion,) in llm.generate(PROMPTS[:1], params)])
    for right, ours in zip(*answers, strict=True):
        assert ours.text == right.text
        for theirs, our_token in zip(right.logprobs, ours.logprobs, strict=True):
            assert our_token.logprob == pytest.approx(theirs.logprob, abs=0.02)


def test_what_the_backend_cannot_do_is_said_in_a_sentence(
    tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from twostroke.backends.gpu import device

    with pytest.raises(BackendError, match="interpreted on the cpu, not on 'cuda:3'"):
        device.find_device("cuda:3")
    monkeypatch.setattr(device, "find_spec", lambda name: None if name == "triton" else name)
    with pytest.raises(BackendError, match=r"needs Triton: pip install '.+\[gpu\]'"):
        device.find_device()
    monkeypatch.undo()
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match="built without CUDA"):
        device.find_device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "none")
    with pytest.raises(BackendError, match="There is no NVIDIA driver here"):
        device.find_device()
    assert not device.may_exist()
    monkeypatch.setattr(device, "_DRIVER", tmp_path)

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found 11040). Update it")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(BackendError, match=r"cannot be used: The NVIDIA driver .* too old"):
        device.find_device()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("TWOSTROKE_CACHE", "/proc/nothing")
    with pytest.raises(BackendError, match="cannot be kept in /proc/nothing/triton"):
        device.find_device()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    with pytest.raises(
        BackendError, match=r"no device 'cuda:1' here\. Devices: auto, cuda, cuda:0"
    ):
        device.find_device("cuda:1")
    old = type("Properties", (), {"name": "T4", "major": 7, "minor": 5})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)
    with pytest.raises(BackendError, match="T4 is an sm_75; the gpu backend needs sm_80"):
        device.find_device()
    old.major, old.multi_processor_count = 9, 132  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendError, match="Triton cannot start here: libcuda"):
        device.find_device()
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setattr("triton.knobs.nvidia.libcuda_path", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BackendError, match=r"its C code does not compile.* install gcc and"):
        device.find_device()


@pytest.mark.parametrize("windows", [(None,), (20,)])
def test_requests_together_are_answered_as_each_alone(windows: tuple[int | None, ...]) -> None:
    """Requests are preempted, chunked and cached, with draft trees; the twin runs one by one."""
    model = tiny_model(num_layers=1, windows=windows)
    rng = random.Random(11)
    requests = random_requests(rng, 16, vocab_size=280, longest=16, most_output=70)
    crowded = Setting(
        num_pages=9,
        token_budget=60,
        max_running=16,
        prefix_cache=True,
        policy=Continuous(),
        draft_seed=3,
    )
    expected, _ = run_schedule(
        ReferenceBackend(*model, 64, 16), crowded.alone(64), [fresh(r) for r in requests], 100
    )
    ours = gpu_backend(*model, num_pages=9)
    copies = [fresh(request) for request in requests]
    answers, num_preemptions = run_schedule(ours, crowded, copies, 100, expected)
    assert num_preemptions
    assert sum(request.num_drafted for request in copies) > 50
    same = [name for name in expected if answers[name][0] == expected[name][0]]
    assert len(same) >= len(expected) - 1  # a tie may turn
    for name in same:
        for right, our_logprob in zip(expected[name][1], answers[name][1], strict=True):
            if right is not None:
                assert our_logprob.logprob == pytest.approx(right.logprob, abs=2e-3)


def test_tokens_are_drawn_on_the_device() -> None:
    """Requests have penalties, truncation, log-probabilities and prompt log-probabilities."""
    model = tiny_model(num_layers=1)
    requests = random_requests(random.Random(2), 6, vocab_size=280, longest=12, most_output=3)
    setting = Setting(32, 60, 8, prefix_cache=False, policy=Continuous())
    expected, _ = run_schedule(
        ReferenceBackend(*model, 32, 16), setting, [fresh(r) for r in requests], 100
    )
    ours = gpu_backend(*model, num_pages=32, draws_on_host=False)
    answers, _ = run_schedule(ours, setting, [fresh(r) for r in requests], 100)
    for name, (tokens, reports) in expected.items():
        assert answers[name][0] == tokens
        for right, our_report in zip(reports, answers[name][1], strict=True):
            assert (right is None) == (our_report is None)
            if right is not None:
                assert our_report.top_ids == right.top_ids
                assert our_report.logprob == pytest.approx(right.logprob, abs=2e-3)


def test_embeddings_scores_and_constraints_are_the_cpu_backends(tiny: str) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1)
    shape = SamplingParams(
        max_tokens=12, temperature=0, constraint=Constraint("regex", "(yes|no) [0-9]{3}")
    )
    results = []
    for backend in ("cpu", "gpu"):
        with engine(tiny, backend) as llm:
            vectors = np.array([embedding.vector for embedding in llm.embed(PROMPTS)])
            ((scored,),) = llm.generate(PROMPTS[1:2], params)
            ((formed,),) = llm.generate(PROMPTS[:1], shape)
            results.append((vectors, scored.prompt_logprobs, formed.text))
    (right, scores, text), (ours, own_scores, own_text) = results
    np.testing.assert_allclose(ours, right, atol=5e-3)
    assert own_text == text
    assert re.fullmatch("(yes|no) [0-9]{3}", own_text)
    for expected, our_token in zip(scores[1:], own_scores[1:], strict=True):
        assert our_token.logprob == pytest.approx(expected.logprob, abs=0.02)


def test_a_gpu_is_mentioned_and_used_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from twostroke.backends.create import check_backend
    from twostroke.backends.gpu import device

    messages: list[str] = []
    llama, wide = PROGRAMS["biases"], program_of_layers([None], head_dim=1024)
    on_gpu = EngineOptions(ComputeOptions("gpu"))
    check_backend(EngineOptions(), llama, messages.append)
    check_backend(on_gpu, llama, messages.append)
    assert not messages
    monkeypatch.setattr(device, "may_exist", lambda: True)
    check_backend(EngineOptions(), llama, messages.append)
    assert "--backend gpu" in messages[0]
    with pytest.raises(BackendError, match="heads of up to 512 values"):
        check_backend(on_gpu, wide, messages.append)


def test_too_little_memory_says_what_fits(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from twostroke.backends.gpu import device

    free = property(lambda _: 700_000_000)
    monkeypatch.setattr(device.GpuDevice, "memory_available", free)
    with pytest.raises(MemoryLimitError, match=r"needs .* weights.* would fit|no context"):
        LLM(tiny, options=EngineOptions(ComputeOptions("gpu")))


def test_a_gpus_limits_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`twostroke doctor` shows them, and utilization is a share of the GPU's limits."""
    from twostroke.backends.gpu import device
    from twostroke.cli import doctor
    from twostroke.engine.engine import _measure_limits

    hardware = _measure_limits(ComputeOptions("gpu"), 1000).hardware()
    assert hardware is not None
    assert hardware.name == "interpreted kernels"
    assert min(hardware.bandwidth, hardware.peak, hardware.memory_bytes) > 0
    monkeypatch.setattr(device, "has_driver", lambda: False)
    assert doctor.measure_gpu() is None
    monkeypatch.setattr(device, "has_driver", lambda: True)
    result = doctor.measure_gpu()
    assert result is not None
    assert "copying" in doctor.gpu_lines(result)["bandwidth"]
    assert "BF16" in doctor.gpu_lines(result)["peak"]

    def refuse() -> None:
        raise BackendError("T4 is an sm_75.")

    monkeypatch.setattr(device, "find_device", refuse)
    result = doctor.measure_gpu()
    assert result is not None
    assert doctor.gpu_lines(result) == {"not used": "T4 is an sm_75."}


def test_a_full_gpu_has_no_limits_and_the_rest_goes_on(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from twostroke.backends.gpu import device, limits
    from twostroke.cli import doctor

    def failing(text: str) -> None:
        def fail(*_: object) -> float:
            raise RuntimeError(text)

        monkeypatch.setattr(limits, "_seconds", fail)

    monkeypatch.setattr(device, "has_driver", lambda: True)
    for text in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        failing(text)
        result = doctor.measure_gpu()
        assert result is not None
        assert result["copy_bytes_per_s"] is None
        lines = doctor.gpu_lines(result)
        assert "has too little free memory to measure" in lines["limits"]
        assert set(lines) == {"device", "memory", "limits"}
    with caplog.at_level("INFO", "twostroke.engine"), engine(tiny, "gpu") as llm:
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0))[0][0].text
    assert "There is no MBU and no MFU without them." in caplog.text
    failing("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        limits.measure(device.find_device())


def test_a_gpu_without_room_for_cuda_has_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from twostroke.backends.gpu.device import GpuDevice

    def refuse(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    assert GpuDevice("H200", torch.device("cuda"), 90, 132).memory_available == 0


def test_variants_of_compiled_kernels_are_counted_once() -> None:
    """Numbers that a kernel declares as changing make no new variant; others do."""
    from triton.runtime.jit import JITFunction

    from twostroke.backends.gpu.kernels import pages, pointwise
    from twostroke.backends.gpu.launch import Kernels, Launch

    plain, changing = JITFunction(pages._change.fn), JITFunction(pointwise._combine.fn, None, ["b"])
    for kernel, count in ((plain, 2), (changing, 1)):
        kernels = Kernels(only_notes=True)
        for number in (1, 2, 2):
            arguments = (torch.zeros(4),) * 4 + (number,)
            kernels.start(Launch(kernel, (1,), arguments, {"OVERLAPS": False}))
        assert len(kernels) == count
