"""Launches kernels: on a GPU, in Triton's interpreter, or only into a list, for a compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from twostroke.core.frozen import Frozen
from twostroke.core.hardware import num_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

_POINTERS: Final = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OLDEST_OVERLAPPING: Final = 90  # sm_90
_LARGEST_INT: Final = (1 << 31) - 1  # Triton passes larger numbers with 64 bits


class Launch(Frozen, eq=False):
    """One launch of a Triton kernel, with its arguments and options.

    - `arguments`: numbers, and contiguous tensors, which a kernel gets as pointers to the first
      value, 16-byte aligned. Strides that the kernel needs are passed as numbers or constants.
    - `constants`: values that are compiled into the kernel.
    - `may_contract`: whether multiplications and additions may be fused, with a single rounding.
    - `max_registers`: the limit for a thread; 0: the compiler chooses, possibly so few that
      registers spill.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    may_contract: bool = True
    max_registers: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Return the launch options that Triton itself understands."""
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.may_contract,
        }
        options |= {"maxnreg": self.max_registers} if self.max_registers else {}
        return options | ({"launch_pdl": True} if self.constants["OVERLAPS"] else {})

    @property
    def types(self) -> dict[str, str]:
        """Return Triton's type of each kernel argument, by name, for a compiler."""
        names = self.kernel.arg_names
        types = dict(zip(names, map(_type_of, self.arguments), strict=False))
        return {name: types.get(name, "constexpr") for name in names}


class Tape:
    """A record of kernel launches, to launch them again in the same order on the same memory."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._tensors: dict[
            int, Tensor
        ] = {}  # keeps alive the memory whose addresses are on the tape

    def add(self, call: Callable[[], object]) -> None:
        """Record a call of a library, such as cuBLAS, that launches kernels."""
        self._calls.append(call)

    def add_launch(self, launch: Launch, compiled: Any) -> None:
        """Record the launch of a compiled Triton kernel."""
        grid_x, grid_y, grid_z = (*launch.grid, 1, 1)[:3]
        names = launch.kernel.arg_names[len(launch.arguments) :]
        tensors = [x for x in launch.arguments if isinstance(x, torch.Tensor)]
        self._tensors |= {x.untyped_storage().data_ptr(): x for x in tensors}
        pointers_and_numbers = [
            x.data_ptr() if isinstance(x, torch.Tensor) else x for x in launch.arguments
        ]
        constants = [launch.constants[name] for name in names]
        self.add(partial(compiled[grid_x, grid_y, grid_z], *pointers_and_numbers, *constants))

    def replay(self) -> None:
        """Launch all recorded kernels on the current CUDA stream."""
        for call in self._calls:
            call()


class Kernels:
    """Launches Triton kernels, and counts how many variants Triton has compiled.

    With `only_notes`, variants are counted without a launch: interpreted kernels need no
    compilation.
    """

    def __init__(self, *, only_notes: bool = False) -> None:
        self.only_notes = only_notes
        self._variants: set[tuple[Any, ...]] = set()
        self._compiled_variants: set[tuple[Any, ...]] | None = None  # within `compile_only`
        self._tape: Tape | None = None
        self._changing: dict[int, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._variants)

    def start(self, launch: Launch) -> None:
        """Launch a kernel on the current CUDA stream.

        With `TRITON_INTERPRET` set, the kernel is interpreted now.
        """
        variant = self._variant(launch)
        variants = self._variants if self._compiled_variants is None else self._compiled_variants
        is_new = variant not in variants
        variants.add(variant)
        if self.only_notes:
            return
        if self._compiled_variants is None:
            compiled = start(launch)
            if self._tape is not None:
                self._tape.add_launch(launch, compiled)
        elif is_new:
            options = {**launch.constants, **launch.options}
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **options)

    def call(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call a library function that launches kernels on the current CUDA stream."""
        call = partial(function, *arguments, **options)
        call()
        if self._tape is not None:
            self._tape.add(call)

    @contextmanager
    def taped(self) -> Iterator[Tape]:
        """Yield a tape that records all kernel launches within the `with` block.

        Interpreted kernels are not recorded.
        """
        self._tape = Tape()
        try:
            yield self._tape
        finally:
            self._tape = None

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """Compile the kernels that are launched within the `with` block; launch nothing.

        The compiled kernels are in Triton's caches, in this process and on disk.
        """
        self._compiled_variants = set()
        executor = ThreadPoolExecutor(num_cores(), "twostroke-compile")
        try:
            with triton.AsyncCompileMode(executor):  # waits for all compilations at the end
                yield
        finally:
            self._compiled_variants = None
            executor.shutdown(wait=False, cancel_futures=True)  # if interrupted, some are queued

    def _variant(self, launch: Launch) -> tuple[Any, ...]:
        kernel = launch.kernel
        changing = self._changing.get(id(kernel))
        if changing is None:
            is_compiled = hasattr(kernel, "do_not_specialize")
            unspecialized = (
                kernel.do_not_specialize if is_compiled else kernel.kwargs["do_not_specialize"]
            )
            changing = self._changing[id(kernel)] = frozenset(unspecialized or ())
        traits = [
            _compile_key(argument, is_changing=name in changing)
            for name, argument in zip(kernel.arg_names, launch.arguments, strict=False)
        ]
        return id(kernel), *traits, *launch.constants.items(), *launch.options.items()


def _compile_key(argument: Any, *, is_changing: bool) -> Any:
    """Return the property of a kernel argument for which Triton compiles separate variants."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument > _LARGEST_INT if is_changing else argument
    return type(argument)


class Gpu(Frozen, eq=False):
    """The device on which kernels are launched, with its properties and options.

    - `architecture`: 90 for sm_90. `num_units`: streaming multiprocessors.
    - `element`: the type of products' inputs.
    - `run`: launches a kernel, or records the launch. `call`: calls a library function.
    - `same_tokens`: a row is computed by the same kernels with the same tiles in every step.
    - `overlaps`: a kernel starts while the previous kernel ends.
    """

    device: torch.device
    architecture: int
    num_units: int
    element: torch.dtype
    run: Callable[[Launch], None]
    is_interpreted: bool = False
    same_tokens: bool = False
    overlaps: bool = False
    call: Callable[..., object] = lambda function, *args, **options: function(*args, **options)

    def programs(self, per_unit: int) -> int:
        """Return the number of Triton programs of a persistent kernel; equal for all step sizes.

        `per_unit`: programs for each multiprocessor.
        """
        return 2 if self.is_interpreted else per_unit * self.num_units

    @property
    def row_block(self) -> int:
        """Return how many rows a program of an elementwise kernel computes.

        1 on a GPU, 16 in Triton's interpreter.
        """
        return 16 if self.is_interpreted else 1

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *,
        num_warps: int = 4,
        num_stages: int = 2,
        may_contract: bool = True,
        max_registers: int = 0,
        **arguments: Any,
    ) -> None:
        """Launch a Triton kernel on a grid, with its arguments by name; options as in `Launch`.

        Names in capitals are compile-time constants. `OVERLAPS` is added here.
        """
        constants = {name: value for name, value in arguments.items() if name.isupper()}
        constants["OVERLAPS"] = self.overlaps
        names = kernel.arg_names[: len(arguments) + 1 - len(constants)]
        self.run(
            Launch(
                kernel,
                grid,
                arguments=tuple([arguments[name] for name in names]),
                constants=constants,
                num_warps=num_warps,
                num_stages=num_stages,
                may_contract=may_contract,
                max_registers=max_registers,
            )
        )


def start(launch: Launch) -> Any:
    """Launch a kernel with Triton; return the compiled kernel."""
    return launch.kernel[launch.grid](*launch.arguments, **launch.constants, **launch.options)


def interpreted(element: torch.dtype = torch.float16) -> Gpu:
    """Return a `Gpu` whose kernels are interpreted on the processor, as if on sm_90."""
    return Gpu(
        torch.device("cpu"),
        architecture=90,
        num_units=2,
        element=element,
        run=start,
        is_interpreted=True,
    )


def listing(
    launches: list[Launch], architecture: int, element: torch.dtype = torch.bfloat16
) -> Gpu:
    """Return a `Gpu` that only appends launches to a list; its tensors have no memory.

    Used to compile kernels for GPUs that the machine does not have.
    """
    return Gpu(
        torch.device("meta"),
        architecture=architecture,
        num_units=132,
        element=element,
        run=launches.append,
        overlaps=architecture >= OLDEST_OVERLAPPING,
        call=lambda *_, **__: None,
    )


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return _POINTERS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"
