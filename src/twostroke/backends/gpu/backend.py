"""The gpu backend: planned steps on one GPU, replayed as CUDA graphs."""

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
from twostroke.backends.gpu.drawing import Drawing
from twostroke.backends.gpu.graphs import LARGEST_BUCKET, Graphs, bucket_of, buckets_up_to
from twostroke.backends.gpu.launch import Kernels
from twostroke.backends.gpu.launch_times import overlapping
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.plan import GpuPlan
from twostroke.backends.gpu.sequence import trace
from twostroke.backends.gpu.step_input import LOGIT_ROWS, MOST_CHANGES, STEPS_AHEAD
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
from twostroke.core.step import StepPlan, StepResult
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.device import GpuDevice
    from twostroke.backends.gpu.drawing import Drawn
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.weights import Progress, Release
    from twostroke.backends.step_frame import StepFrame
    from twostroke.core.request import Request
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import QuantTensor

    Array = NDArray[np.float32]
    from collections.abc import Hashable

    Launching = Callable[[], None]


class _Step(Frozen, eq=False):
    """A step that was started: what `read` and the tensors bring is there after `mark`."""

    began_s: float
    read: Callable[[], Drawn]
    hidden: Tensor | None
    states: tuple[Tensor, ...]
    mark: DeviceEvent
    num_compiled: int


class GpuBackend:
    """Runs a Program on one GPU.

    A step may be started while another one is in flight: all launches are on one stream, and
    rows whose token the step before draws read it on the device.
    """

    def __init__(  # noqa: PLR0913 - facts that only the builder knows
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
        """Load the weights, reserve all memory, compile the kernels and capture the graphs.

        Steps have at most `max_rows` rows, for which all memory is reserved, and return
        `tapped_value` for those that draw. `element` is the type of products' inputs, else that of
        the weights. With `same_tokens` rows depend on their request alone. Tokens are drawn on the
        device, unless its kernels are interpreted, which is slow: `draws_on_host` chooses.
        `release` and `progress` are those of `CpuBackend`.

        Raises:
            BackendError: there is no kernel for something, Triton cannot compile one, or one fails.
            MemoryLimitError: the GPU has too little memory.
        """
        chosen = element or (torch.float16 if device.is_interpreted else element_of(tensors))
        self._kernels = Kernels(only_notes=device.is_interpreted)
        self._gpu = overlapping(device, device.gpu(chosen, self._kernels, same_tokens=same_tokens))
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
        given = tensors, release, progress, balances(program, tensors, kv_format)
        try:
            self._weights = DeviceWeights(self._gpu, self._lowered, *given)
            self._pages = DevicePages(self._gpu, program, num_pages, page_size, kv_format)
            shape = self._max_rows, len(windows), table_width
            tables = torch.zeros(shape, dtype=torch.int32, device=self._gpu.device)
            memory = self._weights, self._pages, tables, self._max_rows
            self._plan = GpuPlan(self._gpu, self._lowered, *memory, piece=piece)
            self._drawing = Drawing(self._gpu, program.vocab_size, on_host=on_host)
            with on(self._gpu.device):
                prepare(self._graphs, self._kernels, self._plan, self._drawing)
        except (RuntimeError, TritonError) as error:
            if (reason := _reason(error, program, tensors, device, self._gpu)) is None:
                raise
            raise reason from error
        self._kernels.only_notes = False
        self._places: dict[Request, int] = {}  # of what the last step drew, among its results
        self._in_flight, self._finished_s = deque[_Step](), 0.0
        self.facts = BackendFacts(
            "gpu",
            self._detail(device, kv_format),
            *(1, num_pages, page_size, windows),
            weight_bytes=self._weights.num_bytes,
            cache_bytes=self._pages.memory.nbytes,
            level=f"sm_{device.architecture} {self._element}" + " same tokens" * same_tokens,
            precision=kv_format,
            draws_ahead=STEPS_AHEAD,
        )

    @property
    def pages(self) -> DevicePages:
        """The bytes of its pages."""
        return self._pages

    @property
    def step_bytes(self) -> int:
        """Bytes that steps need besides weights and pages."""
        return self._plan.num_bytes

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        """Launch a step while at most `facts.draws_ahead` others are in flight."""
        assert len(self._in_flight) <= STEPS_AHEAD, "the memory of its input is in use"
        try:
            with on(self._gpu.device), checked(self._gpu):
                self._in_flight.append(self._launch(plan))
        except BaseException:
            self._steps.tables.note_all()  # changes may have been lost, such as for lack of memory
            raise

    def finish(self) -> StepResult:
        """Wait for the earliest step in flight, and return its result."""
        step = self._in_flight.popleft()
        began_s = max(step.began_s, self._finished_s)
        with checked(self._gpu):
            step.mark.wait()
        kernel_s = time.perf_counter() - began_s
        tokens, logprobs, scores = step.read()
        hidden = None if step.hidden is None else step.hidden.numpy()
        states = [rows.numpy() for rows in step.states]
        self._finished_s = time.perf_counter()
        elapsed_s = self._finished_s - began_s
        given = tokens, logprobs, elapsed_s, kernel_s, hidden, scores, states
        return StepResult(*given, num_compiled=step.num_compiled)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits of a sequence; see `Backend.score`."""
        logits = self._program.ops[-1].output
        return self.trace(tokens, [logits], generated=generated)[logits]

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return values of the Program for a sequence; see `Backend.trace`."""
        del generated  # one arithmetic for all rows
        given = self._gpu, self._program, self._weights, self._pages
        with on(self._gpu.device):
            return trace(*given, tokens, values, piece=self._piece)

    @property
    def fused(self) -> tuple[tuple[Op, ...], ...]:
        """The Program's operations as a step launches them, those of one launch together."""
        return *filter(None, self._lowered.parts), (self._lowered.logits,)

    def times(self) -> list[MeasuredOpTime]:
        """Launch the last step again without its graph, and return the time of each of `fused`."""
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
        """Copy one page's keys and values to another; must not be called while a step runs."""
        pages = self._pages.memory.view(-1, self._pages.page_stride)
        pages[target] = pages[source]

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a finished request."""
        self._steps.forget(request)

    def close(self) -> None:
        """Give back the GPU's memory."""
        self._in_flight.clear()
        self._graphs.drop()
        for name in ("_plan", "_pages", "_weights"):
            if isinstance(held := self.__dict__.pop(name, None), DevicePages):
                held.close()  # others hold them, too
        if self._gpu.device.type == "cuda":
            torch.cuda.empty_cache()

    def _launch(self, plan: StepPlan) -> _Step:
        began_s, num_compiled = time.perf_counter(), self._num_compiled
        self._steps.fill(plan)
        frame = self._steps.frame
        self._find_blind(plan, frame)
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
        return _Step(began_s, read, hidden, states, DeviceEvent(self._gpu), num_compiled)

    def _find_blind(self, plan: StepPlan, frame: StepFrame) -> None:
        """Let blind rows read their token where the step before draws it; note what this draws."""
        row, num_results, drawn = 0, 0, {}
        for part in plan.slices:
            if part.is_blind:
                frame.tokens[row] = -1 - self._places[part.request]
            row += part.num_rows
            num_results += part.num_with_logits
            if part.samples:
                drawn[part.request] = num_results - part.num_drawn
        self._places = drawn

    def _send(self, frame: StepFrame) -> int:
        """Send a step to the device; return the rows of its bucket."""
        num_rows = bucket_of(len(frame.tokens))
        assert num_rows <= self._max_rows, "a step has no more rows than were planned for"
        changes = self._steps.tables.take_changes()
        while len(changes) > MOST_CHANGES:
            self._plan.change_tables(changes[:MOST_CHANGES])
            changes = changes[MOST_CHANGES:]
        self._plan.input.fill(frame, changes, num_rows)
        return num_rows

    def _draw(self, plan: StepPlan, count: int) -> Callable[[], Drawn]:
        """Draw a step's tokens; return what reads them."""
        self._drawing.begin(self._steps.samples)
        for chunk, taken in _chunks(count):
            bucket = bucket_of(taken)
            launch = partial(self._plan.launch_logits, chunk, bucket)
            self._graphs.run((chunk, bucket), launch)
            logits, first = self._plan.logits[:taken], chunk * LOGIT_ROWS
            self._drawing.draw(logits, first, self._plan.results)
        return self._drawing.finish(plan, self._plan.results)

    @property
    def _num_compiled(self) -> int:
        """How many kernels were compiled and graphs captured."""
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
        parts += [f"{fmt} as {element} ({count} weights)" for fmt, count in converted.items()]
        return ", ".join(parts)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each chunk of rows that get logits, and how many it has."""
    for chunk, first in enumerate(range(0, count, LOGIT_ROWS)):
        yield chunk, min(LOGIT_ROWS, count - first)


def _reason(
    error: RuntimeError | TritonError,
    program: Program,
    tensors: Mapping[str, QuantTensor],
    device: GpuDevice,
    gpu: Gpu,
) -> TwostrokeError | None:
    """Return why a backend cannot be built, if that can be said in a sentence."""
    if isinstance(error, TritonError):
        return _not_compiled(error, device)
    if is_out_of_memory(error):
        return _too_little(program.name, tensors.values(), device)
    return lost(gpu, error)


def _not_compiled(error: TritonError, device: GpuDevice) -> BackendError:
    reason = next(iter(str(error).split("\n")), "").rstrip(".") or type(error).__name__
    message = f"Triton cannot compile the kernels for {device.name}, an sm_{device.architecture}"
    return BackendError(f"{message}: {reason}. A newer Triton and PyTorch may know it.")


def _too_little(name: str, tensors: Iterable[QuantTensor], device: GpuDevice) -> MemoryLimitError:
    needed_gb = sum(tensor.num_bytes for tensor in tensors) / 1e9
    message = f"{name} has {needed_gb:.1f} GB of weights, which with its pages is more than"
    message = f"{message} {device.name} has free"
    return MemoryLimitError(f"{message}: take a smaller model or --kv-memory.")


def prepare(graphs: Graphs, kernels: Kernels, plan: GpuPlan, drawing: Drawing) -> None:
    """Launch each bucket of steps, without rows.

    Larger steps have no graphs but tapes, and kernels like the smallest one of them or the next
    power of two, at which products change. The largest one brings the libraries' memory.
    """
    plan.input.clear()
    captured: dict[Hashable, Launching] = {}
    taped: dict[Hashable, Launching] = {}
    for num_rows in buckets_up_to(plan.max_rows):
        captured[num_rows] = partial(plan.launch, num_rows)
    for bucket in buckets_up_to(min(plan.max_rows, LOGIT_ROWS)):
        captured[0, bucket] = partial(plan.launch_logits, 0, bucket)
    larger = [bucket_of(LARGEST_BUCKET + 1), *(LARGEST_BUCKET << i for i in range(1, 20))]
    sizes = {*(rows for rows in larger if rows < plan.max_rows), plan.max_rows}
    for num_rows in sorted(size for size in sizes if size > LARGEST_BUCKET):
        taped[num_rows] = partial(plan.launch, num_rows)
    draw: Launching = partial(drawing.prepare, plan.logits, plan.results)
    with kernels.ahead():
        for launch in (*captured.values(), *taped.values(), draw):
            launch()
    for key, launch in captured.items():
        graphs.capture(key, launch)
    for key, launch in taped.items():
        graphs.run(key, launch)
    draw()
    if plan.input.device.device.type == "cuda":
        torch.cuda.synchronize()
