"""With several steps in flight, the gpu backend draws the same tokens as with one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.cpu import tiny_model  # noqa: E402
from support.programs import PROGRAMS, random_tensors  # noqa: E402
from support.schedules import Setting, fresh, random_requests, run_schedule  # noqa: E402
from support.tiny import Tiny, write_tiny_gguf  # noqa: E402
from twostroke.backends import recipe as recipe_module  # noqa: E402
from twostroke.backends.gpu import step_attention  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.backends.gpu.kernels import attention  # noqa: E402
from twostroke.core.constraint import Constraint  # noqa: E402
from twostroke.core.errors import MemoryLimitError  # noqa: E402
from twostroke.core.options import (  # noqa: E402
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.request import FinishReason, Request  # noqa: E402
from twostroke.core.sampling import SamplingParams  # noqa: E402
from twostroke.core.step import NO_TOKEN, Slice, StepPlan  # noqa: E402
from twostroke.engine.llm import LLM  # noqa: E402
from twostroke.engine.scheduler.policy import Continuous  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

_EXACT: dict[str, Any] = {"element": torch.float32, "kv_format": "f32", "piece": 32, "max_rows": 60}
_NUM_REQUESTS = 12


def gpu_backend(num_pages: int, windows: tuple[int | None, ...] = (), **options: Any) -> GpuBackend:
    program, tensors = tiny_model(num_layers=1, windows=windows)
    return GpuBackend(program, tensors, num_pages, 16, find_device(), **{**_EXACT, **options})


@pytest.mark.parametrize("windows", [(), (20,)])
def test_tokens_drawn_ahead_are_those_of_one_step_at_a_time(
    windows: tuple[int | None, ...],
) -> None:
    """Requests are preempted, chunked, cached and cancelled; some have penalties and scores."""
    requests = random_requests(random.Random(5), _NUM_REQUESTS, 280, longest=16, most_output=6)
    for request in requests[::3]:
        request.params = replace(request.params, max_tokens=36)
    plain = Setting(64, 60, 32, prefix_cache=True, policy=Continuous())
    right, _ = run_schedule(gpu_backend(64, windows), plain, [fresh(r) for r in requests], 100)
    ahead_setting = replace(plain, num_pages=5, draws_ahead=1, cancels=3)
    copies = [fresh(r) for r in requests]
    ours, num_preemptions = run_schedule(gpu_backend(5, windows), ahead_setting, copies, 100)
    assert num_preemptions or windows, "a window needs few pages"
    cancelled = {r.id for r in copies if r.finish_reason is FinishReason.CANCEL}
    assert 0 < len(cancelled) < _NUM_REQUESTS / 2
    for name, (tokens, reports) in ours.items():
        count = len(tokens)
        assert name in cancelled or count == len(right[name][0])
        assert tokens == right[name][0][:count]
        for report, expected_report in zip(reports, right[name][1], strict=name not in cancelled):
            assert (report is None) == (expected_report is None)
            if report is not None and expected_report is not None:
                assert report.logprob == pytest.approx(expected_report.logprob, abs=2e-3)


def test_tokens_drawn_on_the_device_stay_there() -> None:
    """The next step reads the drawn tokens in GPU memory."""
    requests = random_requests(random.Random(2), 6, vocab_size=280, longest=12, most_output=4)
    for request in requests:
        request.params = replace(request.params, repetition_penalty=1.0, top_p=1.0, max_tokens=4)
    plain = Setting(32, 60, 8, prefix_cache=False, policy=Continuous())
    right, _ = run_schedule(gpu_backend(32), plain, [fresh(r) for r in requests], 100)
    ours = gpu_backend(32, draws_on_host=False)
    ahead_setting = replace(plain, draws_ahead=1)
    answers, _ = run_schedule(ours, ahead_setting, [fresh(r) for r in requests], 100)
    assert {name: tokens for name, (tokens, _) in answers.items()} == {
        name: tokens for name, (tokens, _) in right.items()
    }


def test_a_step_may_draw_nothing() -> None:
    """The first chunks of a long prompt draw no token, also on the GPU."""
    expected, ours = gpu_backend(12), gpu_backend(12, draws_on_host=False)
    for backend in (expected, ours):
        request = alone(0)
        request.tokens = [*range(3, 13)]
        assert backend.run(StepPlan((Slice(request, 0, 6, samples=False),))).tokens == []
        (token,) = backend.run(StepPlan((Slice(request, 6, 4, samples=True),))).tokens
        request.tokens.append(token)
    next_result = expected.run(StepPlan((Slice(request, 6, 4, samples=True),)))
    assert next_result.tokens == [token]


def alone(number: int, num_pages: int = 1) -> Request:
    request = Request(f"q{number}", [5 + number, 7], 2, SamplingParams(temperature=0), seed=1)
    request.pages = [[number * num_pages + page for page in range(num_pages)]]
    return request


def test_a_step_for_which_there_is_no_memory_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step sends its page tables; without them, that step would use wrong pages."""
    failing, right = gpu_backend(12), gpu_backend(12)
    first, second, third = alone(0), alone(2), alone(2, 4)
    third.tokens = [*range(40)]
    both = Slice(second, 0, 2, samples=True), Slice(third, 0, 40, samples=True)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    for backend in (failing, right):
        backend.run(StepPlan((Slice(first, 0, 2, samples=True),)))
        if backend is failing:
            with monkeypatch.context() as patch:
                patch.setattr(backend._plan.input, "fill", fail)
                with pytest.raises(MemoryLimitError, match="no memory left for this step"):
                    backend.start(StepPlan(both))
        backend.run(StepPlan(both[:1]))
        backend.run(StepPlan(both[1:]))
    assert torch.equal(failing._pages.memory, right._pages.memory)


def test_steps_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all buckets, with several passes and drawing on the GPU, are compiled before."""
    monkeypatch.setattr(step_attention, "_DECODED_ROWS", 2)
    backend = gpu_backend(200, max_rows=300, draws_on_host=False)
    params = [
        SamplingParams(),
        SamplingParams(logprobs=3, top_p=0.5, top_k=5),
        SamplingParams(temperature=0, repetition_penalty=1.5),
    ]
    num_passes = 0
    sizes = ((1, 0), (3, 5), (24, 20), (100, 0), (270, 1))
    for number, (num_rows, num_others) in enumerate(sizes):
        tokens = [i % 280 for i in range(num_rows)]
        long = Request("long", tokens, num_rows, params[number % 3], seed=1)
        long.pages = [[*range(100, 135)]]
        slices = [Slice(long, 0, num_rows, samples=True)]
        others = [alone(i) for i in range(num_others)]
        for other in others:
            other.tokens = [*range(100)]
            other.pages = [[*range(7)]]
            slices.append(Slice(other, 98, 2, samples=True))
        assert backend.run(StepPlan(tuple(slices))).num_compiled == 0
        num_passes += backend._plan.input.has_passes
        for request in (long, *others):
            backend.forget(request)
    assert num_passes
    monkeypatch.setattr(attention, "small_block", lambda _: 32)  # as a row would want
    assert backend.run(StepPlan((Slice(alone(0), 0, 2, samples=True),))).num_compiled > 0


@pytest.mark.parametrize(
    ("name", "same_tokens"),
    [
        (name, same_tokens)
        for name in ("biases", "many experts", "latent")
        for same_tokens in (False, True)
    ],
)
def test_no_size_of_a_step_has_kernels_that_were_not_prepared(
    name: str, *, same_tokens: bool
) -> None:
    program = PROGRAMS[name]
    kwargs = {"max_rows": 2048, "same_tokens": same_tokens}
    tensors = random_tensors(program, "F16", "F16")
    backend = GpuBackend(program, tensors, 8, 16, find_device(), **kwargs)
    kernels = backend._kernels
    prepared, kernels.only_notes = len(kernels), True
    for num_rows in range(64, 2049, 64):
        backend._plan.launch(num_rows)
        assert len(kernels) == prepared, num_rows


def test_a_row_of_a_token_that_could_not_be_drawn_harms_nobody() -> None:
    backend = gpu_backend(8)
    good, bad = alone(0), alone(1)
    backend.start(StepPlan((Slice(bad, 0, 2, samples=True), Slice(good, 0, 2, samples=True))))
    backend._plan.results[0, 0] = NO_TOKEN
    backend.start(StepPlan((Slice(good, 2, 1, samples=True), Slice(bad, 2, 1, samples=True))))
    drawn_tokens = [backend.finish().tokens[1], backend.finish().tokens[0]]
    right = gpu_backend(8)
    first_tokens = right.run(StepPlan((Slice(good, 0, 2, samples=True),))).tokens
    good.tokens += first_tokens
    assert (
        drawn_tokens
        == first_tokens + right.run(StepPlan((Slice(good, 2, 1, samples=True),))).tokens
    )


PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=10, seed=1, logprobs=2, n=3),
    SamplingParams(max_tokens=8, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(seed=2, max_tokens=9, constraint=Constraint("regex", "(yes|no) [0-9]{3}")),
    SamplingParams(max_tokens=4, seed=5, prompt_logprobs=1),
    SamplingParams(temperature=1.5, max_tokens=12, seed=4, stop=("e", "th", "wo")),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
]


def answers(tiny: str, monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[list[Any], int]:
    """Return all answers of an engine, and how many steps were started."""
    backends: list[GpuBackend] = []

    def make(*args: Any, **_: Any) -> GpuBackend:
        tensors, program, _, size = args
        sizes = size.num_pages, size.page_size
        backends.append(GpuBackend(program, tensors, *sizes, find_device(), **_EXACT))
        return backends[0]

    num_blind = 0
    find_blind = GpuBackend._resolve_blind_tokens

    def count(self: GpuBackend, plan: StepPlan, frame: Any) -> None:
        nonlocal num_blind
        num_blind += sum(slice_.is_blind for slice_ in plan.slices)
        find_blind(self, plan, frame)

    monkeypatch.setattr(recipe_module, "create_backend", make)
    monkeypatch.setattr(GpuBackend, "_resolve_blind_tokens", count)
    options = EngineOptions(
        ComputeOptions("gpu"),
        CacheOptions(context_length=64, memory_bytes=160 * 2 * 2 * 2 * 16),
        BatchOptions(token_budget=40, max_running=16),
        SpeculationOptions(method=method),
    )
    prompts = ["hello world", "the world is the world", "of the world to the world of the world"]
    with LLM(tiny, options=options) as llm:
        output = llm.generate([text for text in prompts for _ in PARAMS], PARAMS * len(prompts))
    return [
        (answer.text, answer.token_ids, answer.finish_reason)
        for answers in output
        for answer in answers
    ], num_blind


def test_engines_answer_alike_whether_they_draw_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests have grammars, stop strings, penalties and several choices."""
    tiny = str(write_tiny_gguf(tmp_path / "tiny.gguf", Tiny(seed=3, fmt="F16", num_layers=1)))
    right, none = answers(tiny, monkeypatch, "ngram")
    ours, num_blind = answers(tiny, monkeypatch, "auto")
    assert ours == right
    assert none == 0
    assert num_blind > 100
    reasons = {reason for _, _, reason in ours}
    assert {FinishReason.STOP, FinishReason.LENGTH} <= reasons
