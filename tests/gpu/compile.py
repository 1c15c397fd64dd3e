"""Compiles the gpu backend's kernels for several architectures, without a GPU or a driver.

Prints for each kernel what the compiler reports: registers, bytes of stack and of shared memory,
instructions, and those of the longest loop for each weight that it reads. Fails where registers
are spilled, where shared memory is more than an architecture has, where a tile of many rows does
not use the tensor cores' own instruction, where what must not be contracted is, and where a kernel
that overlaps the one before it accesses memory before it has waited.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import triton
from cases import CASES, Case
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.backends.gpu.launch import Launch

SHARED_BYTES: Final = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MANY_ROWS_INSTRUCTION: Final = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
CUOBJDUMP: Final = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# One H200 (docs/guide/planning.md): bytes and operations in a second.
BANDWIDTH, MATRIX_RATE = 4.3e12, 790e12


class Report(Frozen):
    """What became of a kernel."""

    case: str
    kernel: str
    architecture: int
    registers: int
    stack: int
    shared: int
    instructions: int
    in_loop: int
    per_weight: float
    floor_us: float
    faults: tuple[str, ...]


def main() -> int:
    """Compile, print a table, and return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--architectures", type=int, nargs="+", default=[*SHARED_BYTES])
    parser.add_argument("--cases", nargs="+", default=[], help="parts of names; left out: all")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    unknown = [part for part in options.cases if not any(part in name for name in CASES)]
    if unknown:
        parser.error(f"no case has {unknown[0]!r} in its name: {', '.join(CASES)}")
    case_rows = [
        (name, architecture)
        for name in CASES
        if not options.cases or any(part in name for part in options.cases)
        for architecture in options.architectures
    ]
    print(f"Triton {triton.__version__}")
    print(f"{'case':28} {'kernel':18}  sm  regs stack  shared  instr  loop  /weight  floor us")
    num_faults = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for reports in pool.map(compile_case, *zip(*case_rows, strict=True)):
            for report in reports:
                num_faults += len(report.faults)
                print(_line(report), *report.faults, sep="  <- ", flush=True)
    print(f"{num_faults} faults" if num_faults else "No faults")
    return num_faults > 0


def compile_case(name: str, architecture: int) -> Sequence[Report]:
    """Compile the kernels of a case."""
    case = CASES[name](architecture)
    return [_compiled(name, case, launch, architecture) for launch in case.launches]


def _compiled(name: str, case: Case, launch: Launch, architecture: int) -> Report:
    names = launch.kernel.arg_names
    types = launch.types
    source = ASTSource(
        fn=launch.kernel,
        signature=types,
        constexprs={(names.index(key),): value for key, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n][0] == "*"},
    )
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    in_loop = max(_loops(code), default=0)
    threads = 32 * launch.num_warps
    faults = [f"{stack} bytes of stack: registers are spilled"] if stack else []
    if compiled.metadata.shared > SHARED_BYTES[architecture]:
        faults.append(f"more shared memory than {SHARED_BYTES[architecture]}")
    needed = MANY_ROWS_INSTRUCTION.get(architecture, "mma.sync")
    is_matrix = case.is_matrix or launch.kernel.__name__ == "_product_fp8"
    if is_matrix and needed not in ptx:
        faults.append(f"no {needed}")
    if launch.constants["OVERLAPS"] and (early := _early(code)):
        faults.append(early)
    if not launch.may_contract and re.search(r"\bfma\.rn\.f32\b", ptx):
        faults.append("fma.rn.f32, though nothing may be contracted")
    return Report(
        name, launch.kernel.__name__, architecture, registers, stack, compiled.metadata.shared,
        len(code), in_loop, in_loop * threads / (case.weights_per_turn or float("inf")),
        1e6 * max(case.num_bytes / BANDWIDTH, case.num_operations / MATRIX_RATE), tuple(faults),
    )  # fmt: skip


# What may not be before the wait: accesses of memory that others write, and an end.
_EARLY: Final = re.compile(r"\b(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG|UTMA\w*|UBLK\w*|EXIT)\b")


def _early(code: Sequence[tuple[int, str]]) -> str | None:
    """Return what a kernel does with memory before it has waited for those before it, if any."""
    for _, text in code:
        if "ACQBULK" in text:
            return None
        if _EARLY.search(text):
            return f"{text} before it has waited for earlier kernels"
    return "does not wait for earlier kernels"


def _loops(code: Sequence[tuple[int, str]]) -> Iterator[int]:
    """Yield how many instructions each loop has, from where a jump leads to the jump."""
    for index, (at, text) in enumerate(code):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            yield sum(int(target[1], 16) <= other for other, _ in code[: index + 1])


def _cuobjdump(option: str, path: str) -> str:
    return subprocess.run(
        [CUOBJDUMP, option, path], check=True, capture_output=True, text=True
    ).stdout


def _line(report: Report) -> str:
    weight = f"{report.per_weight:8.2f}" if report.per_weight else " " * 8
    floor = f"{report.floor_us:9.1f}" if report.floor_us else ""
    return (
        f"{report.case:28} {report.kernel:18} {report.architecture:>3} {report.registers:5}"
        f" {report.stack:5} {report.shared:7} {report.instructions:6} {report.in_loop:5}"
        f" {weight} {floor}"
    )


if __name__ == "__main__":
    sys.exit(main())
