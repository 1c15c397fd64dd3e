"""Measure 16 streaming clients of our server, of the bare engine and of llama-server.

Run it with `make bench WHAT=serving`.

A closed loop in its own process sends each server in turn, round by round, the same fresh
prompts as token ids; the bare engine answers the same loop without HTTP, and so does vLLM with
`--vllm` (its wheel for CPUs starts no server). The clients share the cores with the server, so
their processor time is also reported.

With `--shared-tokens N` all prompts begin with the same N tokens, as with a system prompt. Every
server may then find them in its prefix cache, also in the warm-up round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.goals import SMOLLM2
from benchmarks.common.pipe import Worker, WorkerError
from benchmarks.common.quiet import MAX_SHARE, Watch, family_bytes, family_s
from benchmarks.common.records import Entry, Record, keep
from benchmarks.common.report import (
    caption,
    machine_facts,
    non_negative,
    note,
    positive,
    save,
    spread,
    table,
)
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from benchmarks.peers import environments
from twostroke.model.hub import resolve
from twostroke.model.loader import load

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS, _BARE, _LLAMA = "Twostroke", "bare engine", "llama-server"
_VLLM = "vLLM, without HTTP"
_ONE_PROCESS = f"{_OURS}, one process"
_TRIALS = 2  # rounds after which a way with
_MIN_RATE_RATIO = 0.85  # of the best rate of its server's ways, or less: left out
_STARTS = 5  # of each kind of our server, in turns


def main() -> None:
    """Measure, then print and keep the table."""
    args = _arguments()
    prompts = FreshPrompts(heldout_tokens(load(args.model)))
    shared_prompt = prompts.take(args.shared_tokens)
    num_fresh = args.prompt_tokens - args.shared_tokens
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        folder = Path(folder_name)
        clients = Worker(
            "clients",
            [sys.executable, "-m", "benchmarks.serving.load_clients"],
            folder / "load.log",
        )
        stack.callback(clients.close)
        starts = _time_starts(args, folder) if args.in_process else {}
        targets = list(_start(args, folder, clients, stack))
        for number in range(args.rounds + 1):
            note(f"Round {number} of {args.rounds}" if number else "Warming up")
            each = args.clients * (args.requests + 1)
            job = [[*shared_prompt, *prompts.take(num_fresh)] for _ in range(each)]
            for target in targets:
                if not _is_behind(target, targets):
                    target.run(job, args.clients, args.tokens, counts=number > 0)
        memory = {t.key: family_bytes(t.pid) for t in targets if t.name.startswith(_OURS)}
    result = {**machine_facts(), "model": args.model, "runs": {t.key: t.runs for t in targets}}
    keep(_record(args, targets))
    save(
        "serve",
        result | {"starts_s": starts, "bytes": memory},
        _text(args, targets, memory, starts),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2, help="a GGUF file or a catalogue name")
    for name, default, about in (
        ("clients", 16, ""),
        ("requests", 4, "of each client that count"),
        ("prompt-tokens", 100, ""),
        ("tokens", 64, "of each answer"),
        ("rounds", 5, ""),
        ("threads", 2, ""),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=about)
    parser.add_argument(
        "--shared-tokens", type=non_negative, default=0, metavar="N",
        help="first tokens of the prompt that all requests share",
    )  # fmt: skip
    parser.add_argument("--without-llama", action="store_true", help="our own server only")
    parser.add_argument("--in-process", action="store_true", help="our server in one process, too")
    parser.add_argument("--llama-programs", type=Path, help="a folder with llama-server")
    parser.add_argument("--vllm", action="store_true", help="vLLM's engine, too")
    parser.add_argument("--vllm-env", type=Path, help="a ready virtual environment with vLLM")
    args = parser.parse_args()
    if args.shared_tokens >= args.prompt_tokens:
        parser.error("--shared-tokens must be smaller than --prompt-tokens")
    return args


@dataclass
class Target:
    """Who answers: a process, asked by the clients at `port`, or itself where there is none."""

    name: str
    way: str
    clients: Worker
    pid: int
    port: int | None
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its name and way."""
        return f"{self.name}, {self.way}" if self.way else self.name

    def run(self, prompts: list[list[int]], num_clients: int, tokens: int, *, counts: bool) -> None:
        """Run one closed loop, and keep what it gave.

        Raises:
            SystemExit: a request failed.
        """
        before_s, watch = family_s(self.pid), Watch(self.pid, self.clients.pid)
        at = {} if self.port is None else {"port": self.port, "model": MODEL_NAME}
        try:
            answer = self.clients.call(
                "loop", prompts=prompts, num_clients=num_clients, num_tokens=tokens, **at
            )  # fmt: skip
        except WorkerError as error:
            raise SystemExit(f"{self.key}: the clients' process {error}") from None
        used_s = family_s(self.pid) - before_s
        if counts:
            self.runs.append({**answer, "server_s": used_s, "others_share": watch.others_share()})

    def values(self, name: str) -> list[float]:
        """Return one figure of all runs."""
        return [run[name] for run in self.runs]


def _is_behind(target: Target, targets: list[Target]) -> bool:
    """Whether another way of the same server has proved to be clearly faster in two rounds."""
    if len(target.runs) < _TRIALS:
        return False
    rates = [median(t.values("tokens_per_s")) for t in targets if t.name == target.name]
    return median(target.values("tokens_per_s")) <= _MIN_RATE_RATIO * max(rates)


def _time_starts(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Start our server with an engine in a process of its own, and in one, in turns."""
    ours = our_command(args.model, args.threads)
    kinds = {_OURS: ours, _ONE_PROCESS: (*ours, "--in-process")}
    taken_s: dict[str, list[float]] = {key: [] for key in kinds}
    for _ in range(_STARTS):
        for key, command in kinds.items():
            with contextlib.ExitStack() as stack:
                taken_s[key].append(Server("a server", command, folder, stack).ready_s)
    return taken_s


def _start(
    args: argparse.Namespace, folder: Path, clients: Worker, stack: contextlib.ExitStack
) -> Iterator[Target]:
    """Start everyone who answers, one after the other."""
    threads = ("--threads", str(args.threads))
    bare = Worker(
        _BARE, [sys.executable, "-m", "benchmarks.peers.worker_twostroke", args.model, *threads],
        folder / "bare.log",
    )  # fmt: skip
    stack.callback(bare.close)
    bare.call("about")
    yield Target(_BARE, "", bare, bare.pid, None)
    ours = our_command(args.model, args.threads)
    server = Server(_OURS, ours, folder, stack)
    yield Target(_OURS, "", clients, server.pid, server.port)
    if args.in_process:
        server = Server(f"{_OURS}-one", (*ours, "--in-process"), folder, stack)
        yield Target(_ONE_PROCESS, "", clients, server.pid, server.port)
    if args.vllm:
        python = environments.python_of("vllm", args.vllm_env)
        weights = environments.bf16_weights(str(resolve(args.model)), python)
        command = [str(python), "-m", "benchmarks.peers.worker_vllm", str(weights), *threads]
        vllm = Worker(_VLLM, command, folder / "vllm.log")
        stack.callback(vllm.close)
        vllm.call("about")
        yield Target(_VLLM, "bf16", vllm, vllm.pid, None)
    if args.without_llama:
        return
    program = environments.llama_programs(args.llama_programs) / "llama-server"
    cells = 256 * -(-(args.prompt_tokens + args.tokens) // 256)  # it pads a stream's cache
    options = (
        *("-m", str(resolve(args.model)), "-np", str(args.clients)),
        *("-c", str(cells * args.clients), "-t", str(args.threads), "-tb", str(args.threads)),
        *("--alias", MODEL_NAME, "-fit", "off"),
        # Its cache of prompts in memory helps only prompts that share their beginnings.
        *(() if args.shared_tokens else ("--cache-ram", "0")),
    )
    for flash in ("off", "on"):
        name = f"{_LLAMA}-{flash}"
        server = Server(name, (str(program), *options, "-fa", flash), folder, stack)
        way = f"flash attention {flash}"
        yield Target(_LLAMA, way, clients, server.pid, server.port)


def _record(args: argparse.Namespace, targets: list[Target]) -> Record:
    runs = [run for target in targets for run in target.runs]
    figures = (
        *("ttft_p50_s", "ttft_p95_s", "ttft_p99_s"),
        *("itl_p50_s", "itl_p95_s", "client_s", "server_s"),
    )
    threads = f" --threads {args.threads}" if args.threads != 2 else ""
    row, shared, lengths = f"serve-{args.clients}", "", ""
    if args.shared_tokens:
        row += f"-shared-{args.shared_tokens}"
        shared = f" ({args.shared_tokens} shared)"
        lengths = (
            f" --prompt-tokens {args.prompt_tokens} --shared-tokens {args.shared_tokens}"
            f" --tokens {args.tokens}"
        )
    return Record(
        row=row,
        name=f"server, {args.clients} streaming clients, {args.prompt_tokens} tokens{shared} in,"
        f" {args.tokens} out",
        model=args.model,
        unit="tokens/s",
        entries=[
            Entry(t.name, t.way, t.values("tokens_per_s")) for t in targets if t.name != _BARE
        ],
        command=f'make bench WHAT=serving ARGS="--model {args.model}{threads}{lengths}"',
        setting=threads.strip(" -").replace("threads ", "threads: "),
        disturbed_runs=sum(run["others_share"] > MAX_SHARE for run in runs),
        num_runs=len(runs),
        others={
            "bare_tokens_per_s": targets[0].values("tokens_per_s"),
            "latency": {t.key: {f: median(t.values(f)) for f in figures} for t in targets},
        },
    )


def _text(
    args: argparse.Namespace,
    targets: list[Target],
    memory: dict[str, int],
    starts: dict[str, list[float]],
) -> str:
    header = (
        f"{args.clients} clients, {args.prompt_tokens} in, {args.tokens} out", "tokens/s",
        "TTFT p50", "TTFT p95", "TTFT p99", "ITL p50", "ITL p95",
        "clients' processor time", "disturbed runs",
    )  # fmt: skip
    lines = []
    for target in targets:
        times = ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "itl_p50_s", "itl_p95_s")
        cells = (f"{1000 * median(target.values(name)):,.1f} ms" for name in times)
        share = median(
            run["client_s"] / run["wall_s"] for run in target.runs
        )  # fmt: skip
        disturbed = sum(value > MAX_SHARE for value in target.values("others_share"))
        used = f"{share:.0%} of a core" if target.port is not None else "(with the engine's)"
        rate = spread(target.values("tokens_per_s"))
        lines.append((target.key, rate, *cells, used, f"{disturbed} of {len(target.runs)}"))
    rates = {t.key: median(t.values("tokens_per_s")) for t in targets}
    about = [f"The server gives {rates[_OURS] / rates[_BARE]:.1%} of the bare engine's tokens."]
    if best := max((rate for key, rate in rates.items() if key.startswith(_LLAMA)), default=0):
        about.append(f"It gives {rates[_OURS] / best:.2f} times those of llama-server.")
    about += [f"{key} takes {size / 1e6:,.0f} MB after this." for key, size in memory.items()]
    about += [
        f"{key} is ready after {spread(start_times, 2)} s." for key, start_times in starts.items()
    ]
    if _VLLM in "".join(rates):
        vllm = next(rate for key, rate in rates.items() if key.startswith(_VLLM))
        about.append(f"It gives {rates[_OURS] / vllm:.2f} times those of vLLM.")
    facts = caption(machine_facts(), args.model, f"{args.rounds} rounds")
    return "\n".join(["## Through the server", "", table(header, lines), "", *about, "", facts])


if __name__ == "__main__":
    main()
