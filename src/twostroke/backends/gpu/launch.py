"""How kernels are launched: on a GPU, in Triton's interpreter, or only listed for a compiler."""

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
_LARGEST_INT: Final = (1 << 31) - 1  # larger numbers have 64 bits


class Launch(Frozen, eq=False):
    """One launch of a kernel.

    `arguments` are tensors, which kernels see as pointers to their first value (16-byte aligned),
    and numbers; `constants` are compiled in. A tensor's values lie one after another: kernels get
    no strides that the constants or numbers do not say. With `may_contract` a product and the sum
    that it is added to may be rounded once. Threads have up to `max_registers`; with 0 the compiler
    may choose so few that it spills.
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
        """Triton's own options."""
        found = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.may_contract,
        }
        found |= {"maxnreg": self.max_registers} if self.max_registers else {}
        return found | ({"launch_pdl": True} if self.constants["OVERLAPS"] else {})

    @property
    def types(self) -> dict[str, str]:
        """Triton's type of each argument, by name, as a compiler needs them."""
        names = self.kernel.arg_names
        found = dict(zip(names, map(_type_of, self.arguments), strict=False))
        return {name: found.get(name, "constexpr") for name in names}


class Tape:
    """Launches that were prepared once, to be repeated: with the same memory, in the same order."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._used: dict[int, Tensor] = {}  # one of each memory that calls know by its address

    def add(self, call: Callable[[], object]) -> None:
        """Append what calls a library."""
        self._calls.append(call)

    def add_launch(self, launch: Launch, compiled: Any) -> None:
        """Append a launch of a kernel that Triton compiled."""
        one, two, three = (*launch.grid, 1, 1)[:3]
        names = launch.kernel.arg_names[len(launch.arguments) :]
        tensors = [x for x in launch.arguments if isinstance(x, torch.Tensor)]
        self._used |= {x.untyped_storage().data_ptr(): x for x in tensors}
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in launch.arguments]
        constants = [launch.constants[name] for name in names]
        self.add(partial(compiled[one, two, three], *given, *constants))

    def replay(self) -> None:
        """Launch all on the current stream."""
        for call in self._calls:
            call()


class Kernels:
    """Launches kernels, and knows which variants of them there were: Triton compiles each once.

    With `only_notes` nothing is launched: interpreted kernels need not be compiled.
    """

    def __init__(self, *, only_notes: bool = False) -> None:
        self.only_notes = only_notes
        self._variants: set[tuple[Any, ...]] = set()
        self._ahead: set[tuple[Any, ...]] | None = None  # what `ahead` has compiled
        self._tape: Tape | None = None
        self._changing: dict[int, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._variants)

    def start(self, launch: Launch) -> None:
        """Launch on the current stream, or interpret at once where `TRITON_INTERPRET` is set."""
        variant = self._variant(launch)
        known = self._variants if self._ahead is None else self._ahead
        is_new = variant not in known
        known.add(variant)
        if self.only_notes:
            return
        if self._ahead is None:
            compiled = start(launch)
            if self._tape is not None:
                self._tape.add_launch(launch, compiled)
        elif is_new:
            options = {**launch.constants, **launch.options}
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **options)

    def call(self, function: Callable[..., object], *given: Any, **options: Any) -> None:
        """Call a library's function on the current stream."""
        call = partial(function, *given, **options)
        call()
        if self._tape is not None:
            self._tape.add(call)

    @contextmanager
    def taped(self) -> Iterator[Tape]:
        """Let a tape, which is yielded, have what is launched; not what is interpreted."""
        self._tape = Tape()
        try:
            yield self._tape
        finally:
            self._tape = None

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Launch nothing, but compile what would be launched, as many kernels at once as cores.

        They are then in Triton's caches, of this process and on disk, where launches find them.
        """
        self._ahead = set()
        executor = ThreadPoolExecutor(num_cores(), "twostroke-compile")
        try:
            with triton.AsyncCompileMode(executor):  # waits for all of them
                yield
        finally:
            self._ahead = None
            executor.shutdown(wait=False, cancel_futures=True)  # some wait if it was interrupted

    def _variant(self, launch: Launch) -> tuple[Any, ...]:
        kernel = launch.kernel
        changing = self._changing.get(id(kernel))
        if changing is None:
            is_compiled = hasattr(kernel, "do_not_specialize")
            given = kernel.do_not_specialize if is_compiled else kernel.kwargs["do_not_specialize"]
            changing = self._changing[id(kernel)] = frozenset(given or ())
        traits = [
            _trait(argument, is_changing=name in changing)
            for name, argument in zip(kernel.arg_names, launch.arguments, strict=False)
        ]
        return id(kernel), *traits, *launch.constants.items(), *launch.options.items()


def _trait(argument: Any, *, is_changing: bool) -> Any:
    """Return what of an argument a compiled kernel depends on."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument > _LARGEST_INT if is_changing else argument
    return type(argument)


class Gpu(Frozen, eq=False):
    """A GPU as those see it who launch kernels; `run` does, or notes, what is to be launched.

    `architecture` is 90 for sm_90, and `num_units` counts the streaming multiprocessors. Values
    that go into products have the type `element`. With `same_tokens` a row is computed by the same
    kernels with the same tiles, whatever else is in its step. If it `overlaps`, each kernel begins
    while the one before it ends. `call` calls a library's function.
    """

    device: torch.device
    architecture: int
    num_units: int
    element: torch.dtype
    run: Callable[[Launch], None]
    is_interpreted: bool = False
    same_tokens: bool = False
    overlaps: bool = False
    call: Callable[..., object] = lambda function, *given, **options: function(*given, **options)

    def programs(self, per_unit: int) -> int:
        """Return how many programs share a step's work, of whatever size; one variant for all."""
        return 2 if self.is_interpreted else per_unit * self.num_units

    @property
    def row_block(self) -> int:
        """How many rows a program of a row's values takes; interpreted ones are slow to begin."""
        return 16 if self.is_interpreted else 1

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        num_warps: int = 4,
        num_stages: int = 2,
        may_contract: bool = True,
        max_registers: int = 0,
        **constants: Any,
    ) -> None:
        """Launch `kernel` on a grid; `constants` are its compile-time arguments by name."""
        constants["OVERLAPS"] = self.overlaps
        options = num_warps, num_stages, may_contract, max_registers
        self.run(Launch(kernel, grid, arguments, constants, *options))


def start(launch: Launch) -> Any:
    """Launch without a note; return what was compiled."""
    return launch.kernel[launch.grid](*launch.arguments, **launch.constants, **launch.options)


def interpreted(element: torch.dtype = torch.float16) -> Gpu:
    """Return a GPU whose kernels are interpreted on the processor, with the constants of sm_90."""
    return Gpu(torch.device("cpu"), 90, 2, element, start, is_interpreted=True)


def listing(
    launches: list[Launch], architecture: int, element: torch.dtype = torch.bfloat16
) -> Gpu:
    """Return a GPU that does nothing but append what is launched; its tensors have no memory."""
    given = torch.device("meta"), architecture, 132, element, launches.append
    overlaps = architecture >= OLDEST_OVERLAPPING
    return Gpu(*given, overlaps=overlaps, call=lambda *_, **__: None)


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return _POINTERS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"
