"""`make bench-start`: from starting a process to its first token, and the most memory it holds.

`twostroke generate` in turn with llama.cpp's own `llama-completion`, each time a fresh process with
the model's file in the page cache. Memory is that of an answer that fills a context.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environments
from footprint import generate_command
from goals import QWEN_15, SMOLLM2
from quiet import MAX_SHARE, Watch
from records import Entry, Record, keep
from report import Spread, caption, machine_facts, note, save, table
from twostroke.core.hardware import num_cores
from twostroke.engine.loading import build_tokenizer, load
from twostroke.fetch import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SENTENCE = "Why is the sky blue?"
_CONTEXT = 2048
_START = "start of the process to first token"
_MEMORY = f"peak memory, a context of {_CONTEXT:,} tokens filled"
_LIMIT_S = 300.0
_SPARSELY_S, _OFTEN_S = 0.05, 0.005  # between looks at a process: a look takes processor time


def main() -> None:
    """Measure, then print and keep the tables."""
    given = _arguments()
    programs = environments.llama_programs(given.llama_programs)
    results, texts = [], []
    for model in given.models:
        records = _measure(model, programs, given)
        for record in records:
            keep(record)
        texts.append(_text(model, records))
        results += [{"model": model, "row": r.row, "best": _medians(r)} for r in records]
    save("start", {**machine_facts(), "rows": results}, "\n\n".join(texts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, QWEN_15], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=10, help="fresh processes of each engine")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--llama-programs", type=Path, help="a folder with llama-completion")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return given


@dataclass(frozen=True, slots=True)
class Life:
    """One process: when its first byte came, and the most that it held in bytes.

    `resident` includes the pages of the model's file that it has mapped, `anonymous` does not.
    """

    first_s: float
    resident: int
    anonymous: int


def _measure(model: str, programs: Path, given: argparse.Namespace) -> list[Record]:
    """Run fresh processes in turn: short ones for the start, then one each for memory."""
    note(f"== {model}")
    path = resolve(model)
    path.read_bytes()  # into the page cache
    long = " ".join([_SENTENCE] * (_CONTEXT // 8))
    rest = _CONTEXT - len(build_tokenizer(load(model)).encode(long)) - 8  # for what templates add
    engines: dict[str, tuple[Callable[..., list[str]], tuple[Any, ...]]] = {
        "Twostroke": (_ours, (model,)),
        "llama.cpp": (_llama, (programs / "llama-completion", path)),
    }
    starts: dict[str, list[float]] = {name: [] for name in engines}
    peaks: dict[str, list[Life]] = {name: [] for name in engines}
    disturbed = 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for number in range(given.rounds + 1):
            note(f"Round {number} of {given.rounds}" if number else "Warming up")
            for name, (command, arguments) in engines.items():
                short = command(*arguments, _SENTENCE, 2, given.threads)
                life, alone = _live(short, log, _SPARSELY_S)
                if number:
                    starts[name].append(life.first_s)
                    disturbed += not alone
        for name, (command, arguments) in engines.items():
            life, _ = _live(command(*arguments, long, rest, given.threads), log, _OFTEN_S)
            peaks[name].append(life)
    resident = {name: [life.resident / 1e6 for life in lives] for name, lives in peaks.items()}
    anonymous = {name: lives[0].anonymous / 1e6 for name, lives in peaks.items()}
    return [
        _record(model, "start", starts, disturbed_runs=disturbed, num_runs=2 * given.rounds),
        _record(model, "memory", resident, num_runs=2, others={"anonymous_mb": anonymous}),
    ]


def _ours(model: str, prompt: str, num_tokens: int, threads: int) -> list[str]:
    sizes = ("--context-length", str(_CONTEXT), "--threads", str(threads))
    wanted = ("--ignore-eos", "--max-tokens", str(num_tokens))
    return generate_command(model, "--raw", *sizes, *wanted, "-p", prompt)


def _llama(program: Path, path: Path, prompt: str, num_tokens: int, threads: int) -> list[str]:
    sizes = ("-c", str(_CONTEXT), "-t", str(threads), "-tb", str(threads), "-fit", "off")
    manners = ("-no-cnv", "--no-display-prompt", "--no-warmup", "--simple-io", "--no-perf")
    wanted = ("--ignore-eos", "-n", str(num_tokens), "--temp", "0")
    return [str(program), "-m", str(path), *sizes, *manners, *wanted, "-p", prompt]


def _live(command: Sequence[str], log: Path, every_s: float) -> tuple[Life, bool]:
    """Run a process to its end, looking at it from time to time.

    Also return whether the machine was its own.

    Raises:
        SystemExit: it failed, wrote nothing, or took too long.
    """
    resident = anonymous = 0
    with log.open("wb") as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
        )
    limit = threading.Timer(_LIMIT_S, process.kill)
    limit.start()
    watch = Watch(process.pid)
    firsts: list[float] = []
    reader = threading.Thread(target=_drain, args=(process, began, firsts))
    reader.start()
    share = 0.0
    try:
        while process.poll() is None:
            now = _memory(process.pid)
            resident, anonymous = max(resident, now[0]), max(anonymous, now[1])
            share = watch.others_share() if now[0] else share
            time.sleep(every_s)
    finally:
        limit.cancel()
        reader.join()
    if process.returncode or not firsts:
        said = log.read_text(errors="replace")[-600:]
        raise SystemExit(f"{command[0]} ended with code {process.returncode}: {said}")
    return Life(firsts[0], resident, anonymous), share <= MAX_SHARE


def _environment() -> dict[str, str]:
    """Return our own, but that bytecode is kept: an installed package comes with its own."""
    return {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}


def _drain(process: subprocess.Popen[bytes], began: float, firsts: list[float]) -> None:
    """Note when the first byte comes, and take the rest."""
    assert process.stdout is not None
    if process.stdout.read(1):
        firsts.append(time.monotonic() - began)
    process.stdout.read()


def _memory(pid: int) -> tuple[int, int]:
    """Return a process's highest resident bytes so far and its anonymous ones now; 0 once gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return int(fields.get("VmHWM", 0)) * 1024, int(fields.get("RssAnon", 0)) * 1024


def _record(model: str, row: str, runs: dict[str, list[float]], **more: Any) -> Record:
    name, unit = {"start": (_START, "s"), "memory": (_MEMORY, "MB")}[row]
    return Record(
        row=row,
        name=name,
        model=model,
        unit=unit,
        entries=[Entry(engine, "", values) for engine, values in runs.items()],
        command=f'make bench-start BENCH_ARGS="--models {model}"',
        lower_is_better=True,
        **more,
    )


def _medians(record: Record) -> dict[str, float]:
    return {entry.engine: entry.median for entry in record.entries}


def _text(model: str, records: list[Record]) -> str:
    lines = []
    for record in records:
        digits = 2 if record.unit == "s" else 0
        cells = (Spread.of(e.runs).text(digits, f" {record.unit}") for e in record.entries)
        ratio = record.ratio("llama.cpp")
        disturbed = f"{record.disturbed_runs} of {record.num_runs}"
        lines.append((record.name, *cells, f"{ratio:.2f}" if ratio else "–", disturbed))
    header = ("median (lowest to highest)", "Twostroke", "llama.cpp", "times better", "disturbed")
    facts = caption(machine_facts(), model)
    return "\n".join([f"## {model}: start and memory", "", table(header, lines), "", facts])


if __name__ == "__main__":
    main()
