"""The native libraries: which instruction-set levels run here, and their C interface."""

from __future__ import annotations

import ctypes
import platform
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from itertools import takewhile
from pathlib import Path

from twostroke.backends.cpu.records import (
    RECORD_SIZES,
    LinkRecord,
    NodeRecord,
    PlanRecord,
    StepRecord,
)
from twostroke.backends.sampling.rows import COLUMNS_HASH
from twostroke.core import env
from twostroke.core.errors import BackendError, UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import DEFAULT_FORMAT

# As in native/c_interface.cpp. The sampler's columns need no new version: they have a hash.
INTERFACE_VERSION = 36

_IS_ARM = platform.machine().lower() in {"aarch64", "arm64"}
_ARM_LEVELS = {"neon_dotprod": (8, "Armv8.2-A with dot products (asimddp)")}
_X86_LEVELS = {
    "amx": (4, "AMX tiles (int8, bf16) with AVX-512"),
    "avx512": (2, "AVX-512 F, BW, DQ, VL and VNNI"),
    "avx_vnni": (32, "AVX-VNNI with AVX2, FMA and F16C"),
    "avx2": (1, "AVX2, FMA and F16C"),
}
# Best level first, with its bit in `ts_probe` and the instructions that it needs.
_LEVELS = (_ARM_LEVELS if _IS_ARM else _X86_LEVELS) | {"portable": (0, "nothing")}
# Chosen by name only: levels whose own instructions are emulated, for tests on machines without.
_X86_EMULATED = {
    "amx_emulated": (16, "AVX-512 F, BW, DQ, VL, VNNI and BF16"),
    "avx_vnni_emulated": (1, "AVX2, FMA and F16C"),
}
_EMULATED = {} if _IS_ARM else _X86_EMULATED

# Levels that multiply int16 numbers faster than float32.
_FAST_INT16_LEVELS = frozenset(_X86_LEVELS | _EMULATED)

_SIGNATURES = {
    "ts_interface_version": (c_int32, ()),
    "ts_level": (c_char_p, ()),
    "ts_one_arithmetic": (c_int32, ()),
    "ts_record_size": (c_int64, (c_int32,)),
    "ts_sample_columns_hash": (c_uint64, ()),
    "ts_probe": (c_int32, ()),
    "ts_linear_request_tiles": (c_int32, ()),
    "ts_linear_rows_together": (c_int32, ()),
    "ts_linear_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "ts_map_memory": (c_void_p, (c_int64,)),
    "ts_unmap_memory": (None, (c_void_p, c_int64)),
    "ts_pool_create": (c_void_p, (c_int32, POINTER(NodeRecord), c_int32)),
    "ts_pool_destroy": (None, (c_void_p,)),
    "ts_pool_num_active": (c_int32, (c_void_p,)),
    "ts_pool_fix_num_active": (None, (c_void_p, c_int32)),
    "ts_pack": (None, (c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p)),
    "ts_crowding": (None, (c_int32, c_int64, c_void_p, c_void_p, c_void_p)),
    "ts_plan_create": (c_void_p, (c_void_p, POINTER(PlanRecord))),
    "ts_plan_destroy": (None, (c_void_p,)),
    "ts_step": (c_int32, (c_void_p, POINTER(StepRecord))),
    "ts_plan_times": (None, (c_void_p, POINTER(c_double))),
    "ts_plan_copy_page": (None, (c_void_p, c_int32, c_int32)),
    "ts_plan_pages": (c_void_p, (c_void_p, POINTER(c_int64))),
    "ts_plan_states": (c_void_p, (c_void_p, POINTER(c_int64))),
    "ts_link_abort": (None, (c_void_p,)),
    "ts_link_is_aborted": (c_int32, (c_void_p,)),
    "ts_link_reset": (None, (c_void_p,)),
    "ts_link_measure": (
        c_int32,
        (POINTER(LinkRecord), c_int64, c_int64, c_int64, POINTER(c_double), POINTER(c_double)),
    ),
    "ts_round": (None, (c_void_p, c_void_p, c_int32)),
    "ts_measure_bandwidth": (c_double, (c_void_p, c_int64)),
    "ts_measure_peak": (c_double, (c_void_p,)),
    "ts_peak_kind": (c_char_p, ()),
    "ts_messages_create": (c_void_p, ()),
    "ts_messages_connect": (None, (c_void_p, c_void_p)),
    "ts_messages_abort": (None, (c_void_p,)),
    "ts_messages_progress": (c_int64, (c_void_p,)),
    "ts_messages_destroy": (None, (c_void_p,)),
}


class LevelChoice(Frozen):
    """The chosen instruction-set level of the kernels, and the reason for the choice."""

    level: str
    reason: str


def choose_level(requested: str | None) -> LevelChoice:
    """Return the instruction-set level of the kernels to use on this machine.

    It is the requested level, else the level in the environment variable, else the best that runs
    here.

    Raises:
        UsageError: the level does not exist.
        BackendError: the level is not built, or cannot run on this machine.
    """
    level_name, knob = requested, "--level"
    if level_name is None:
        level_name, knob = env.cpu_level(), "TWOSTROKE_CPU_LEVEL"
    if level_name is None:
        level = next((name for name in _LEVELS if _obstacle(name) is None), "portable")
        load_library(level)  # raises if not even this library exists
        obstacles_of_better = [
            f"{name}: {_obstacle(name)}" for name in takewhile(level.__ne__, _LEVELS)
        ]
        return LevelChoice(level, "; ".join(["the best that runs here", *obstacles_of_better]))
    usable = ", ".join(name for name in _LEVELS if _obstacle(name) is None)
    if level_name not in _LEVELS | _EMULATED:
        hint = nearest(level_name, _LEVELS)
        raise UsageError(
            f"There is no instruction-set level '{level_name}' ({knob}). Usable here: {usable}."
            f"{hint}"
        )
    if obstacle := _obstacle(level_name):
        message = (
            f"Level '{level_name}' ({knob}) cannot be used: {obstacle}. Usable here: {usable}."
        )
        raise BackendError(message)
    return LevelChoice(level_name, knob)


def usual_kv_format(level: str) -> str:
    """Return the fastest KV cache format on an instruction-set level, a name in `FORMATS`."""
    return "int16" if level in _FAST_INT16_LEVELS else DEFAULT_FORMAT


def level_reports() -> dict[str, str]:
    """Return, for each instruction-set level, a text that it runs here, or why it does not."""
    return {name: _obstacle(name) or f"runs (needs {need})" for name, (_, need) in _LEVELS.items()}


@cache
def load_library(level: str) -> ctypes.CDLL:
    """Load the native kernels of an instruction-set level, with the types of their functions.

    Raises:
        BackendError: the library is missing, cannot be opened, or is of another version.
    """
    path = _find(level)
    if path is None:
        folders = ", ".join(str(folder) for folder in _folders())
        message = f"The native library of level '{level}' is in none of: {folders}."
        knob = "unset TWOSTROKE_NATIVE_DIR" if env.native_dir() else "run `make native`"
        raise BackendError(f"{message} To fix this, {knob}, or reinstall twostroke.")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        message = f"{path} cannot be used: {error}. Run `make native`, or reinstall twostroke."
        raise BackendError(message) from None
    sizes = tuple(library.ts_record_size(i) for i in range(len(RECORD_SIZES)))
    is_current = library.ts_interface_version() == INTERFACE_VERSION and sizes == RECORD_SIZES
    if not is_current or library.ts_sample_columns_hash() != COLUMNS_HASH:
        message = f"{path} was built for another version of twostroke. Run `make native`."
        raise BackendError(message)
    return library


@cache
def _obstacle(level: str) -> str | None:
    """Return why an instruction-set level cannot be used on this machine; None if it can."""
    bit, need = (_LEVELS | _EMULATED)[level]
    if bit and _find("portable") and not load_library("portable").ts_probe() & bit:
        return f"the processor or the operating system lacks {need}"
    if _find(level) is None:
        return "not built; `make build` compiles all levels"
    if level == "amx" and not load_library(level).ts_linear_request_tiles():
        return "the operating system refuses the use of tiles"
    return None


def _find(level: str) -> Path | None:
    paths = (folder / f"libtwostroke_{level}.so" for folder in _folders())
    return next((path for path in paths if path.is_file()), None)


def _folders() -> list[Path]:
    """Return the folders to search for native libraries.

    `TWOSTROKE_NATIVE_DIR` alone if it is set, else the package's folder and the build folder.
    """
    if (forced := env.native_dir()) is not None:
        return [forced]
    package_folder = Path(__file__).resolve().parent
    return [package_folder / "lib", package_folder.parents[3] / "build" / "native"]
