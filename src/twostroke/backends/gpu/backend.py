"""The gpu backend: runs steps on one GPU, with Triton kernels in CUDA graphs."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from triton.runtime.errors import TritonError

from twostroke.backends.cpu.keys import balances
from twostroke.backends.cpu.plan import MeasuredOpTime
from twostroke.backends.cpu.steps import StepArrays
from twostroke.backends.gpu.cache import DevicePages
from twostroke.backends.gpu.graphs import LARGEST_BUCKET, Graphs, bucket_of, buckets_up_to
from twostroke.backends.gpu.launch import Kernels
from twostroke.backends.gpu.launch_times import overlapping
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.plan import GpuPlan
from twostroke.backends.gpu.sequence import trace
from twostroke.backends.gpu.step_input import LOGIT_ROWS, MAX_CHANGES, STEPS_AHEAD
from twostroke.backends.gpu.step_sampler import StepSampler
from twostroke.backends.gpu.timeline import seconds_of
from twostroke.backends.gpu.transfers import (
    DeviceEvent,
    checked,
    is_out_of_memory,
    lost,
    on,
    to_host,
)
from twostroke.backends.gpu.weights import DeviceWeights, element_of
from twostroke.backends.interface import BackendFacts
from twostroke.backends.spans import pooled_rows
from twostroke.core.errors import BackendError, MemoryLimitError, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.step import StepPlan, StepResult
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.device import GpuDevice
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.step_sampler import DrawnTokens
    from twostroke.backends.gpu.weights import Progress, Release
    from twostroke.backends.step_frame import StepFrame
    from twostroke.core.request import Request
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import QuantTensor

    Array = NDArray[np.float32]
    from collections.abc import Hashable

    LaunchFunction = Callable[[], None]


class _Step(Frozen, eq=False):
    """A step in flight on the GPU: its results are valid once the event `mark` is reached."""

    start_s: float
    read: Callable[[], DrawnTokens]
    hidden: Tensor | None
    states: tuple[Tensor, ...]
    mark: DeviceEvent
    num_compiled: int


class GpuBackend:
    """Runs a model on one GPU with Triton kernels.

    A step may be started while another one is in flight: all launches are on one stream, and rows
    whose input token is drawn by the previous step read the token on the device.
    """

    def __init__(  # noqa: PLR0913 - each is a fact that only the caller knows
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        device: GpuDevice,
        *,
        kv_format: str = "f16",
        max_rows: int = 256,
        tapped_value: str | None = None,
        element: torch.dtype | None = None,
        piece: int | None = None,
        draws_on_host: bool | None = None,
        same_tokens: bool = False,
        release: Release = lambda _: None,
        progress: Progress = lambda *_: None,
    ) -> None:
        """Load the weights, reserve all GPU memory, compile the kernels and capture CUDA graphs.

        Args:
            program: the model.
            tensors: its weights, by name.
            num_pages: KV pages.
            page_size: tokens of a page.
            device: the GPU.
            kv_format: the number format of keys and values.
            max_rows: the largest number of rows of a step, for which memory is reserved.
            tapped_value: the value of the Program that steps return for the rows that draw tokens.
            element: the type of products' inputs; None: chosen by the weights' formats.
            piece: into how short pieces a context may be divided, in tokens; only set by tests.
            draws_on_host: whether tokens are drawn on the processor; None: only if kernels are
                interpreted, in which drawing is slow.
            same_tokens: a row's result depends on its request alone, not on the other rows.
            release: as for `CpuBackend`.
            progress: as for `CpuBackend`.

        Raises:
            BackendError: a kernel is missing, does not compile, or fails.
            MemoryLimitError: the GPU has too little memory.
        """
        element_type = element or (torch.float16 if device.is_interpreted else element_of(tensors))
        self._kernels = Kernels(only_notes=device.is_interpreted)
        self._gpu = overlapping(
            device, device.gpu(element_type, self._kernels, same_tokens=same_tokens)
        )
        self._program, self._tapped_value = program, tapped_value
        self._lowered = lower(program, [] if tapped_value is None else [tapped_value])
        windows = tuple(group.window for group in program.cache_groups)
        longest = PageGroups(page_size, windows).max_tokens(num_pages, program.context_length)
        table_width = -(-longest // page_size // 4) * 4 + 4
        self._max_rows, self._piece = bucket_of(max_rows), piece
        self._steps = StepArrays(len(windows), page_size, table_width, one_arithmetic=True)
        self._steps.tables.limit(self._max_rows)
        self._steps.tables.note_changes()
        self._graphs = Graphs(self._gpu, self._kernels)
        on_host = device.is_interpreted if draws_on_host is None else draws_on_host
        try:
            self._weights = DeviceWeights(
                self._gpu,
                self._lowered,
                tensors,
                release=release,
                progress=progress,
                balances=balances(program, tensors, kv_format),
            )
            self._pages = DevicePages(self._gpu, program, num_pages, page_size, kv_format)
            self._plan_steps(table_width, on_host=on_host)
        except (RuntimeError, TritonError) as error:
            if (reason := _user_error(error, program, tensors, device, self._gpu)) is None:
                raise
            raise reason from error
        self._kernels.only_notes = False
        self._result_rows: dict[Request, int] = {}  # of tokens that the last step drew
        self._in_flight, self._finished_s = deque[_Step](), 0.0
        self.facts = self._facts_of(device, num_pages)

    def _plan_steps(self, table_width: int, *, on_host: bool) -> None:
        """Reserve the GPU memory of steps, compile the kernels and capture CUDA graphs."""
        shape = self._max_rows, len(self._program.cache_groups), table_width
        self._plan = GpuPlan(
            self._gpu,
            self._lowered,
            weights=self._weights,
            cache=self._pages,
            tables=torch.zeros(shape, dtype=torch.int32, device=self._gpu.device),
            max_rows=self._max_rows,
            piece=self._piece,
        )
        self._sampler = StepSampler(self._gpu, self._program.vocab_size, on_host=on_host)
        with on(self._gpu.device):
            prepare(self._graphs, self._kernels, self._plan, self._sampler)

    def _facts_of(self, device: GpuDevice, num_pages: int) -> BackendFacts:
        kv_format, same_tokens = self._pages.kv_format, self._gpu.same_tokens
        return BackendFacts(
            name="gpu",
            detail=self._detail(device, kv_format),
            num_threads=1,
            num_pages=num_pages,
            page_size=self._pages.page_size,
            windows=tuple(group.window for group in self._program.cache_groups),
            weight_bytes=self._weights.num_bytes,
            cache_bytes=self._pages.memory.nbytes,
            level=f"sm_{device.architecture} {self._element}" + " same tokens" * same_tokens,
            precision=kv_format,
            draws_ahead=STEPS_AHEAD,
        )

    @property
    def state_memory(self) -> None:
        """Return None: slots for recurrent states cannot be accessed from outside."""

    @property
    def pages(self) -> DevicePages:
        """Return access to the bytes of the KV pages in GPU memory."""
        return self._pages

    @property
    def step_bytes(self) -> int:
        """Return the bytes of GPU memory that steps need in addition to weights and KV pages."""
        return self._plan.num_bytes

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and draw a token for each slice that samples."""
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        """Launch a step on the GPU; at most `facts.draws_ahead` other steps may be in flight."""
        assert len(self._in_flight) <= STEPS_AHEAD, "the memory of the step's input is in use"
        try:
            with on(self._gpu.device), checked(self._gpu):
                self._in_flight.append(self._launch(plan))
        except BaseException:  # also after Ctrl-C: the step may have lost changes of the tables
            self._steps.tables.note_all()
            raise

    def finish(self) -> StepResult:
        """Wait for the oldest step in flight on the GPU, and return its result."""
        step = self._in_flight.popleft()
        start_s = max(step.start_s, self._finished_s)
        with checked(self._gpu):
            step.mark.wait()
        kernel_s = time.perf_counter() - start_s
        tokens, logprobs, scores = step.read()
        hidden = None if step.hidden is None else step.hidden.numpy()
        states = [rows.numpy() for rows in step.states]
        self._finished_s = time.perf_counter()
        elapsed_s = self._finished_s - start_s
        return StepResult(
            tokens,
            logprobs,
            elapsed_s=elapsed_s,
            kernel_s=kernel_s,
            hidden=hidden,
            scores=scores,
            states=states,
            num_compiled=step.num_compiled,
        )

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits (len(tokens), vocab_size) of a token sequence; see `Backend.score`.

        `generated` is ignored, because this backend computes all rows in the same way.
        """
        logits = self._program.ops[-1].output
        return self.trace(tokens, [logits], generated=generated)[logits]

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return the intermediate values named `values`, each (len(tokens), width), by name.

        The token sequence is computed as by `score`; see `Backend.trace`.
        """
        del generated  # all rows are computed in the same way
        with on(self._gpu.device):
            return trace(
                self._gpu,
                self._program,
                weights=self._weights,
                pages_like=self._pages,
                tokens=tokens,
                values=values,
                piece=self._piece,
            )

    @property
    def fused(self) -> tuple[tuple[Op, ...], ...]:
        """Return the Program's operations in groups: one or a few launches compute each group."""
        return *filter(None, self._lowered.parts), (self._lowered.logits,)

    def times(self) -> list[MeasuredOpTime]:
        """Measure the last step's time on the GPU for each operation group of `fused`.

        The step is launched again, without its CUDA graph.
        """
        frame = self._steps.frame

        def launch(mark: Callable[[], None]) -> None:
            self._plan.launch(bucket_of(len(frame.tokens)), mark)
            mark()
            for chunk, count in _chunks(len(frame.sampled_rows)):
                self._plan.launch_logits(chunk, bucket_of(count))
            mark()

        with on(self._gpu.device), checked(self._gpu):
            return [MeasuredOpTime(elapsed_s, 0.0) for elapsed_s in seconds_of(self._gpu, launch)]

    def copy_page(self, source: int, target: int) -> None:
        """Copy a KV page to another page; must not be called while a step runs."""
        pages = self._pages.memory.view(-1, self._pages.page_stride)
        pages[target] = pages[source]

    def forget(self, request: Request) -> None:
        """Drop the backend's state of a finished request, such as its row of the page tables."""
        self._steps.forget(request)

    def close(self) -> None:
        """Free the backend's GPU memory."""
        self._in_flight.clear()
        self._graphs.drop()
        for name in ("_plan", "_pages", "_weights"):
            if isinstance(part := self.__dict__.pop(name, None), DevicePages):
                part.close()  # other objects refer to the pages, too
        if self._gpu.device.type == "cuda":
            torch.cuda.empty_cache()

    def _launch(self, plan: StepPlan) -> _Step:
        start_s, num_compiled = time.perf_counter(), self._num_compiled
        self._steps.fill(plan)
        frame = self._steps.frame
        self._resolve_blind_tokens(plan, frame)
        num_rows = self._send(frame)
        if frame.external is not None:
            self._plan.take_external(frame.external)
        if self._plan.input.has_passes:
            self._plan.launch(num_rows)
        else:
            self._graphs.run(num_rows, partial(self._plan.launch, num_rows))
        read = self._draw(plan, len(frame.sampled_rows))
        hidden = None
        if self._tapped_value is not None:
            rows = frame.sampled_rows[plan.draws].astype(np.int64)
            hidden = to_host(self._plan.tap(self._tapped_value, num_rows)[rows])
        last = self._plan.last_states(num_rows)
        states = tuple([to_host(last[part].float()) for part in pooled_rows(plan.slices)])
        num_compiled = self._num_compiled - num_compiled
        return _Step(
            start_s=start_s,
            read=read,
            hidden=hidden,
            states=states,
            mark=DeviceEvent(self._gpu),
            num_compiled=num_compiled,
        )

    def _resolve_blind_tokens(self, plan: StepPlan, frame: StepFrame) -> None:
        """Let rows whose input token is not known yet read it from the previous step's results.

        A step that is still in flight draws the token. Such a row gets the token -1 - i, which
        stands for the token in row i of that step's results. For the next step, this method also
        stores which result row each request has in this step.
        """
        row, num_results, result_rows = 0, 0, {}
        for slice_ in plan.slices:
            if slice_.is_blind:
                frame.tokens[row] = -1 - self._result_rows[slice_.request]
            row += slice_.num_rows
            num_results += slice_.num_with_logits
            if slice_.samples:
                result_rows[slice_.request] = num_results - slice_.num_drawn
        self._result_rows = result_rows

    def _send(self, frame: StepFrame) -> int:
        """Copy a step's input to the GPU.

        Returns the padded number of rows with which the step is launched.
        """
        num_rows = bucket_of(len(frame.tokens))
        assert num_rows <= self._max_rows, "a step has no more rows than were planned for"
        changes = self._steps.tables.take_changes()
        while len(changes) > MAX_CHANGES:
            self._plan.change_tables(changes[:MAX_CHANGES])
            changes = changes[MAX_CHANGES:]
        self._plan.input.fill(frame, changes, num_rows)
        return num_rows

    def _draw(self, plan: StepPlan, count: int) -> Callable[[], DrawnTokens]:
        """Launch the drawing of a step's tokens; return a function that reads the drawn tokens.

        `count`: the number of rows with logits.
        """
        self._sampler.begin(self._steps.samples)
        for chunk, num_rows in _chunks(count):
            bucket = bucket_of(num_rows)
            launch = partial(self._plan.launch_logits, chunk, bucket)
            self._graphs.run((chunk, bucket), launch)
            logits, first = self._plan.logits[:num_rows], chunk * LOGIT_ROWS
            self._sampler.draw(logits, first, self._plan.results)
        return self._sampler.finish(plan, self._plan.results)

    @property
    def _num_compiled(self) -> int:
        """Return how many kernels were compiled and CUDA graphs captured so far."""
        return len(self._kernels) + self._graphs.num_captured

    @property
    def _element(self) -> str:
        return {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[
            self._gpu.element
        ]

    def _detail(self, device: GpuDevice, kv_format: str) -> str:
        element = self._element
        parts = [device.name, element, f"{kv_format} keys and values"]
        parts += ["same tokens"] if self._gpu.same_tokens else []
        parts += ["overlapping launches"] if self._gpu.overlaps else []
        converted = self._weights.converted
        parts += [
            f"{fmt} as {element} ({counted_noun(count, 'weight')})"
            for fmt, count in converted.items()
        ]
        return ", ".join(parts)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    """Split a step's rows with logits into chunks; yield each chunk's index and number of rows.

    Logits are computed chunk by chunk to save memory.
    """
    for chunk, first in enumerate(range(0, count, LOGIT_ROWS)):
        yield chunk, min(LOGIT_ROWS, count - first)


def _user_error(
    error: RuntimeError | TritonError,
    program: Program,
    tensors: Mapping[str, QuantTensor],
    device: GpuDevice,
    gpu: Gpu,
) -> TwostrokeError | None:
    """Return the error that tells the user why a GPU backend could not be built.

    None if `error` is unexpected: then it should be raised itself.
    """
    if isinstance(error, TritonError):
        return _not_compiled(error, device)
    if is_out_of_memory(error):
        return _out_of_memory(program.name, tensors.values(), device)
    return lost(gpu, error)


def _not_compiled(error: TritonError, device: GpuDevice) -> BackendError:
    reason = next(iter(str(error).split("\n")), "").rstrip(".") or type(error).__name__
    message = f"Triton cannot compile the kernels for {device.name}, an sm_{device.architecture}"
    return BackendError(f"{message}: {reason}. A newer Triton and PyTorch may support this GPU.")


def _out_of_memory(
    name: str, tensors: Iterable[QuantTensor], device: GpuDevice
) -> MemoryLimitError:
    needed_gb = sum(tensor.num_bytes for tensor in tensors) / 1e9
    message = f"{name} has {needed_gb:.1f} GB of weights, which with its pages is more than"
    message = f"{message} {device.name} has free"
    return MemoryLimitError(f"{message}: take a smaller model or --kv-memory.")


def prepare(graphs: Graphs, kernels: Kernels, plan: GpuPlan, drawing: StepSampler) -> None:
    """Compile the kernels for all step sizes, and capture CUDA graphs, before the first step.

    Steps without rows are launched for this. Steps larger than the largest bucket with a CUDA graph
    are launched from tapes of recorded launches. Their kernels change only at powers of two, so
    only these sizes are compiled, and the largest size, for which libraries allocate their memory.
    """
    plan.input.clear()
    captured: dict[Hashable, LaunchFunction] = {}
    taped: dict[Hashable, LaunchFunction] = {}
    for num_rows in buckets_up_to(plan.max_rows):
        captured[num_rows] = partial(plan.launch, num_rows)
    for bucket in buckets_up_to(min(plan.max_rows, LOGIT_ROWS)):
        captured[0, bucket] = partial(plan.launch_logits, 0, bucket)
    larger = [bucket_of(LARGEST_BUCKET + 1), *(LARGEST_BUCKET << i for i in range(1, 20))]
    sizes = {*(rows for rows in larger if rows < plan.max_rows), plan.max_rows}
    for num_rows in sorted(size for size in sizes if size > LARGEST_BUCKET):
        taped[num_rows] = partial(plan.launch, num_rows)
    draw: LaunchFunction = partial(drawing.prepare, plan.logits, plan.results)
    with kernels.compile_only():
        for launch in (*captured.values(), *taped.values(), draw):
            launch()
    for key, launch in captured.items():
        graphs.capture(key, launch)
    for key, launch in taped.items():
        graphs.run(key, launch)
    draw()
    if plan.input.device.device.type == "cuda":
        torch.cuda.synchronize()
