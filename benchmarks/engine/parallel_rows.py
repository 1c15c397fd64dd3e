"""The rows of `make bench WHAT=parallel`: models, jobs and the engines to compare."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from msgspec import field

from benchmarks.common.experts import write_experts
from benchmarks.common.goals import QWEN_15, SMOLLM2
from benchmarks.common.pipe import Worker
from benchmarks.common.records import OURS
from benchmarks.peers import environments
from benchmarks.peers.sides import LLAMA, Side
from twostroke.core.frozen import Frozen
from twostroke.model.hub import resolve

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

EXPERTS = "experts-64"  # a random mixture, written at first use
_THREADS = 2  # of one process, or of all ranks together
_EVERY_LAYER = 999


class Case(Frozen):
    """A model's job in a row, and the least ratio of the divided side to the base.

    `degrees` are fields of `ParallelOptions`.
    """

    title: str
    model: str
    work: str
    at_least: float
    degrees: dict[str, Any] = field(default_factory=dict)


class Row(Frozen):
    """Cases, and the sides that run them."""

    about: str
    cases: tuple[Case, ...]
    sides: Callable[[str, Case, argparse.Namespace, Path], Iterator[Side]]


def path_of(model: str) -> str:
    """Return where a model is."""
    if model == EXPERTS:
        return str(write_experts(environments.FOLDER / f"{EXPERTS}.gguf"))
    return str(resolve(model))


def _on_one_host(path: str, case: Case, args: argparse.Namespace, folder: Path) -> Iterator[Side]:
    del args
    yield _one_process(path, folder)
    yield _ours(case.title, path, folder, case.degrees)


def _beside_heads(path: str, case: Case, args: argparse.Namespace, folder: Path) -> Iterator[Side]:
    """The same ranks, by heads and by places."""
    del args
    by_heads = case.degrees | {"kv_shares": "heads"}
    yield _ours(f"{case.title} by heads", path, folder, by_heads)
    yield _ours(f"{case.title} by places", path, folder, by_heads | {"kv_shares": "places"})


def _over_network(path: str, case: Case, args: argparse.Namespace, folder: Path) -> Iterator[Side]:
    del args
    yield _one_process(path, folder)
    launcher = (sys.executable, "-m", "benchmarks.engine.two_hosts")
    yield _ours(case.title, path, folder, case.degrees, launcher)


def _beside_llama(path: str, case: Case, args: argparse.Namespace, folder: Path) -> Iterator[Side]:
    """Ours whole and divided, llama.cpp whole, and with its layers in another process."""
    yield from _on_one_host(path, case, args, folder)
    python = environments.python_of(LLAMA, args.llama_env, "rpc")
    flash = {f"flash attention {'on' if on else 'off'}": on for on in (False, True)}
    ways = {way: {"flash_attention": on} for way, on in flash.items()}
    for name, layers in ((LLAMA, 0), (f"{LLAMA}, rpc-server", _EVERY_LAYER)):
        command = [str(python), "-m", "benchmarks.peers.worker_llama", path]
        command += ["--threads", str(_THREADS), "--rpc-layers", str(layers)]
        yield Side(name, Worker(name, command, folder / f"{name}.log"), ways)


def _before_and_after(
    path: str, case: Case, args: argparse.Namespace, folder: Path
) -> Iterator[Side]:
    del case
    if args.before is None:
        raise SystemExit("The row before needs --before CHECKOUT.")
    python = args.before / ".venv" / "bin" / "python"
    name = f"{OURS}, before"
    command = ["env", "--chdir", str(args.before), str(python)]
    command += ["-m", "benchmarks.peers.worker_twostroke", path, "--threads", str(_THREADS)]
    yield Side(name, Worker(name, command, folder / f"{name}.log"))
    yield _one_process(path, folder)


def _one_process(path: str, folder: Path) -> Side:
    return _ours("one process", path, folder, {})


def _ours(
    title: str, path: str, folder: Path, degrees: dict[str, Any], launcher: Sequence[str] = ()
) -> Side:
    name = f"{OURS}, {title}"
    command = [*launcher, sys.executable, "-m", "benchmarks.peers.worker_twostroke", path]
    command += ["--threads", str(_THREADS), "--parallel", json.dumps(degrees)]
    return Side(name, Worker(name, command, folder / f"{name}.log"))


def _cases(
    title: str, degrees: dict[str, Any], *cases: tuple[str, tuple[str, ...], float]
) -> tuple[Case, ...]:
    return tuple(
        Case(title, model, work, min_degree, degrees)
        for model, works, min_degree in cases
        for work in works
    )


_USUAL = ("decode-1", "decode-16", "prefill-512")
_TENSOR: dict[str, Any] = {"tensor": 2}
ROWS = {
    "tensor2": Row(
        "two parts of every layer, on one host",
        _cases("tensor 2", _TENSOR, (SMOLLM2, _USUAL, 0.90), (QWEN_15, _USUAL, 0.95)),
        _on_one_host,
    ),
    "network": Row(
        "the same between two network namespaces, over TCP",
        _cases("tensor 2 over TCP", _TENSOR, (QWEN_15, _USUAL, 0.85)),
        _over_network,
    ),
    "llama-rpc": Row(
        "what two parts leave of the speed, beside what llama.cpp's rpc-server leaves",
        _cases("tensor 2", _TENSOR, (SMOLLM2, _USUAL, 1.0), (QWEN_15, _USUAL, 1.0)),
        _beside_llama,
    ),
    "pipeline2": Row(
        "two groups of layers, 16 streams",
        _cases("pipeline 2", {"pipeline": 2}, (SMOLLM2, ("decode-16",), 0.90),
               (QWEN_15, ("decode-16",), 0.90)),
        _on_one_host,
    ),
    "context2": Row(
        "the rows of a long prompt in two parts",
        _cases("context 2", {"context": 2}, (SMOLLM2, ("prefill-4096",), 0.90),
               (QWEN_15, ("prefill-4096",), 0.90)),
        _on_one_host,
    ),
    "tensor2-places": Row(
        "tensor 2 with keys and values divided by places, beside by heads",
        _cases("tensor 2", _TENSOR, (SMOLLM2, (*_USUAL, "prefill-4096"), 0.95)),
        _beside_heads,
    ),
    "context2-places": Row(
        "context 2 with keys and values divided by places, beside all on both",
        _cases("context 2", {"context": 2}, (SMOLLM2, ("decode-1", "prefill-4096"), 0.95)),
        _beside_heads,
    ),
    "expert2": Row(
        "64 experts in two parts, 16 streams",
        _cases("expert 2", {"expert": 2}, (EXPERTS, ("decode-16",), 0.90)),
        _on_one_host,
    ),
    "before": Row(
        "one process of this checkout and of another",
        _cases("one process", {}, (SMOLLM2, _USUAL, 1.0), (QWEN_15, _USUAL, 1.0)),
        _before_and_after,
    ),
}  # fmt: skip
