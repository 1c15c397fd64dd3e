"""The native libraries for tests: their folder, and the levels that this machine can run."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from twostroke.core import env

if TYPE_CHECKING:
    from collections.abc import Callable

# Lets what is printed be seen at once; tests/conftest.py sets it to pytest's own.
uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext

ROOT = Path(__file__).parents[2]
IS_ARM = platform.machine() == "aarch64"
_X86_NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni_emulated": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"},
    "amx_emulated": {"avx512_vnni", "avx512_bf16"},
    "amx": {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}
_ARM_NEEDS = {"neon_dotprod": {"atomics", "asimdrdm", "asimddp"}}
_ARM_BITS = {"atomics": 8, "asimdrdm": 12, "asimddp": 20}  # of AT_HWCAP, in Linux
# The levels of this kind of processor; those that round alike, the best of them last.
NEEDS: dict[str, set[str]] = {"portable": set(), **(_ARM_NEEDS if IS_ARM else _X86_NEEDS)}
VECTOR_LEVELS = ("portable", "neon_dotprod") if IS_ARM else ("avx2", "avx_vnni_emulated", "avx512")


@cache
def native_dir() -> Path:
    """Return the folder of native libraries; by default one with every runnable level."""
    if (folder := env.native_dir()) is not None:
        return folder
    folder = ROOT / "build" / "strict"
    runnable = [level for level in NEEDS if processor_flags() >= NEEDS[level]]
    if not all((folder / f"libtwostroke_{level}.so").exists() for level in runnable):
        search = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        cmake, ninja = (shutil.which(tool, path=search) for tool in ("cmake", "ninja"))
        if cmake is None or ninja is None:
            pytest.skip("cmake and ninja are needed to build the native libraries")
        with uncaptured():
            print(f"\nCompiling the kernels into {folder}: a few minutes.", file=sys.stderr)
        make = [cmake, "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja"]
        options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DTS_LEVELS=runnable"]
        subprocess.run([*make, *options], check=True)
        subprocess.run([ninja, "-C", str(folder)], check=True)
    return folder


@cache
def processor_flags() -> frozenset[str]:
    """Return the instruction sets that the system reports, and those that libraries emulate."""
    if IS_ARM:  # an emulator's /proc/cpuinfo is that of its host
        word = ctypes.CDLL(None).getauxval(ctypes.c_ulong(16))
        return frozenset(name for name, bit in _ARM_BITS.items() if word >> bit & 1)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = frozenset(f for line in lines if line.startswith("flags") for f in line.split())
    brought = NEEDS["avx512"] | NEEDS["amx_emulated"] if _is_avx512_emulated() else set()
    return flags | brought


def _is_avx512_emulated() -> bool:
    """Whether the libraries emulate AVX-512 (`make long SUITE=avx512`)."""
    if (folder := env.native_dir()) is None:
        return False
    path = folder / "libtwostroke_portable.so"
    return path.exists() and hasattr(ctypes.CDLL(str(path)), "ts_emulates_avx512")


@cache
def load_level(level: str) -> ctypes.CDLL:
    """Return one level's library; skip the test if the machine cannot run it."""
    if level not in NEEDS and level in _X86_NEEDS | _ARM_NEEDS:
        pytest.skip(f"no processor of this kind has {level}")
    if not processor_flags() >= NEEDS[level]:
        pytest.skip(f"this processor lacks {level}")
    path = native_dir() / f"libtwostroke_{level}.so"
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    return ctypes.CDLL(str(path))


def address(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array's values for C; the array must outlive the call."""
    return ctypes.c_void_p(array.ctypes.data)


def floats(values: object) -> np.ndarray:
    """Return values as the kernels take them: contiguous float32."""
    return np.ascontiguousarray(values, np.float32)
