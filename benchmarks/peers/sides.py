"""The engines of a comparison: how their processes start, and the ways in which they run a job."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.pipe import Worker, WorkerError
from benchmarks.common.records import OTHER_BITS, OURS, is_ours, ours_with
from benchmarks.common.report import note
from benchmarks.peers import environments
from twostroke.model.families import build_program
from twostroke.model.hub import resolve
from twostroke.model.program import FLOAT16

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from benchmarks.common.workload import Work
    from twostroke.model.weights import LoadedModel

LLAMA = "llama.cpp"
PEERS = ("llama.cpp", "ik_llama.cpp", "vllm", "openvino", "transformers")
_SPARE_TOKENS = 4096  # of the key-value pool, beside the contexts that rows keep


@dataclass
class Side:
    """An engine's process, and the ways in which it may run a job: the best one counts.

    `keeps` says that it can keep a context from round to round. What went wrong with it is in
    `failure`, and then it is asked nothing any more.
    """

    name: str
    worker: Worker
    ways: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    keeps: bool = True
    scores: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def call(self, command: str, **fields: object) -> dict[str, Any] | None:
        """Return its answer; None, and the failure noted, when it has none.

        Raises:
            SystemExit: it is ours, which may not fail.
        """
        try:
            return self.worker.call(command, **fields)
        except WorkerError as error:
            self.failure = str(error)
            note(f"{self.name} {error}")
            if is_ours(self.name):
                raise SystemExit(f"{self.name} {error}") from None
            return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say who takes part."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="auto", help="of Twostroke")
    parser.add_argument("--level", help="instruction-set level of Twostroke")
    parser.add_argument(
        "--llama-level", choices=list(environments.LLAMA_LEVELS), default="native",
        help="what llama.cpp is compiled for; each level is a build of its own",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=["llama.cpp"], metavar="PEER",
        help=f"who is measured beside: {', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--ik-llama-programs", type=Path, metavar="FOLDER",
        help="the folder of ik_llama.cpp's llama-batched-bench (it is not built here)",
    )  # fmt: skip
    for peer in ("llama", "vllm", "openvino", "transformers"):
        text = f"a ready virtual environment with {peer}, in place of our own"
        parser.add_argument(f"--{peer}-env", type=Path, help=text)


def start(
    args: argparse.Namespace, model: str, loaded: LoadedModel, works: list[Work], folder: Path
) -> list[Side]:
    """Start every engine, one after the other, and ask each what it is.

    `folder` takes their logs. A peer that cannot load the model stays, with its failure.
    """
    sides = []
    for side in _sides(args, model, loaded, works, folder):
        note(f"Starting {side.name}")
        side.about = side.call("about") or {}
        sides.append(side)
    return sides


def _kv_memory(loaded: LoadedModel, works: Iterable[Work]) -> int:
    """Return the bytes of keys and values that rows need which keep contexts; 0 without any."""
    num_kept = max((w.num_streams * w.prompt_length for w in works if w.kept_length), default=0)
    if not num_kept:
        return 0
    program = build_program(loaded.spec)
    token_bytes = sum(layer.bytes_per_token(FLOAT16) for layer in program.cache_layers)
    return max(2 * num_kept + _SPARE_TOKENS, program.context_length) * token_bytes


def _sides(
    args: argparse.Namespace, model: str, loaded: LoadedModel, works: Iterable[Work], folder: Path
) -> Iterator[Side]:
    path, threads = str(resolve(model)), ["--threads", str(args.threads)]

    def worker(name: str, *command: str) -> Worker:
        return Worker(name, [*command, *threads], folder / f"{name}.log")

    ours = ["--backend", args.backend, *(("--level", args.level) if args.level else ())]
    if kv_memory := _kv_memory(loaded, works):
        ours += ["--kv-memory", str(kv_memory)]
    own_command = [sys.executable, *_script("twostroke"), model, *ours]
    yield Side(OURS, worker(OURS, *own_command))
    if args.backend in {"auto", "cpu"}:
        for bits in OTHER_BITS:
            name = ours_with(bits)
            yield Side(name, worker(name, *own_command, "--activation-bits", str(bits)))
    if LLAMA in args.peers:
        python = environments.python_of(LLAMA, args.llama_env, args.llama_level)
        flash = {f"flash attention {'on' if on else 'off'}": on for on in (False, True)}
        ways = {way: {"flash_attention": on} for way, on in flash.items()}
        llama = worker(LLAMA, str(python), *_script("llama"), path)
        yield Side(LLAMA, llama, ways, scores=True)
    if "ik_llama.cpp" in args.peers:
        programs = environments.ik_llama_programs(args.ik_llama_programs)
        repacks = {"as in the file": False, "repacked at the start": True}
        ways = {way: {"run_time_repack": repack} for way, repack in repacks.items()}
        options = (path, "--programs", str(programs))
        bench = worker("ik_llama.cpp", sys.executable, *_script("ik_llama"), *options)
        yield Side("ik_llama.cpp", bench, ways, keeps=False)
    if "openvino" in args.peers:
        python = environments.python_of("openvino", args.openvino_env)
        openvino = worker("OpenVINO GenAI", str(python), *_script("openvino"), path)
        yield Side("OpenVINO GenAI", openvino, keeps=False)
    if "vllm" in args.peers:
        python = environments.python_of("vllm", args.vllm_env)
        weights = environments.bf16_weights(path, python)
        vllm = worker("vLLM", str(python), *_script("vllm"), str(weights))
        yield Side("vLLM", vllm, {"bf16": {}})
    if "transformers" in args.peers:
        python = environments.python_of("transformers", args.transformers_env)
        weights = environments.bf16_weights(path, python)
        plain = worker("transformers", str(python), *_script("transformers"), str(weights))
        yield Side("transformers", plain, {"bf16": {}}, keeps=False, scores=True)


def _script(engine: str) -> tuple[str, str]:
    return "-m", f"benchmarks.peers.worker_{engine}"
