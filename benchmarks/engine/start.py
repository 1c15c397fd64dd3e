"""Measure the time from process start to the first token, and peak memory.

Run it with `make bench WHAT=start`.

`twostroke generate` runs in turn with llama.cpp's own `llama-completion`, each time as a new
process with the model's file in the page cache. Memory is the peak while an answer fills a
context. Models of real shapes, from `python -m benchmarks.common.shapes`, may be measured as well:
`make bench WHAT=start ARGS="--models FOLDER/llama-8b.gguf"`. Their weights are random.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.footprint import OFTEN_S, generate_command, live
from benchmarks.common.goals import QWEN_15, SMOLLM2
from benchmarks.common.quiet import MAX_SHARE
from benchmarks.common.records import Entry, Record, keep
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.peers import environments
from twostroke.core.hardware import num_cores
from twostroke.model.hub import resolve
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from collections.abc import Callable

_SENTENCE = "Why is the sky blue?"
_CONTEXT = 2048
_START = "start of the process to first token"
_MEMORY = f"peak memory, a context of {_CONTEXT:,} tokens filled"


def main() -> None:
    """Measure, then print and keep the tables."""
    args = _arguments()
    programs = environments.llama_programs(args.llama_programs)
    results, texts = [], []
    for model in args.models:
        records = _measure(model, programs, args)
        for record in records:
            keep(record)
        texts.append(_text(model, records))
        results += [
            {"model": model, "row": r.row, "best": {e.engine: e.median for e in r.entries}}
            for r in records
        ]
    save("start", {**machine_facts(), "rows": results}, "\n\n".join(texts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, QWEN_15], metavar="MODEL")
    parser.add_argument(
        "--rounds", type=positive, default=10, help="fresh processes of each engine"
    )
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--llama-programs", type=Path, help="a folder with llama-completion")
    return parser.parse_args()


def _measure(model: str, programs: Path, args: argparse.Namespace) -> list[Record]:
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
    disturbed = 0
    for number in range(args.rounds + 1):
        note(f"Round {number} of {args.rounds}" if number else "Warming up")
        for name, (command, arguments) in engines.items():
            life = live(command(*arguments, _SENTENCE, 2, args.threads))
            if number:
                starts[name].append(life.first_s)
                disturbed += life.others_share > MAX_SHARE
    peaks = {
        name: live(command(*arguments, long, rest, args.threads), OFTEN_S)
        for name, (command, arguments) in engines.items()
    }
    resident = {name: [life.resident / 1e6] for name, life in peaks.items()}
    anonymous = {name: life.anonymous / 1e6 for name, life in peaks.items()}
    return [
        _record(model, "start", starts, disturbed_runs=disturbed, num_runs=2 * args.rounds),
        _record(model, "memory", resident, num_runs=2, others={"anonymous_mb": anonymous}),
    ]


def _ours(model: str, prompt: str, num_tokens: int, threads: int) -> list[str]:
    sizes = ("--context-length", str(_CONTEXT), "--threads", str(threads))
    length_options = ("--ignore-eos", "--max-tokens", str(num_tokens))
    return generate_command(
        model, "--raw", "--accept-quality", *sizes, *length_options, "-p", prompt
    )


def _llama(program: Path, path: Path, prompt: str, num_tokens: int, threads: int) -> list[str]:
    sizes = ("-c", str(_CONTEXT), "-t", str(threads), "-tb", str(threads), "-fit", "off")
    options = ("-no-cnv", "--no-display-prompt", "--no-warmup", "--simple-io", "--no-perf")
    length_options = ("--ignore-eos", "-n", str(num_tokens), "--temp", "0")
    return [str(program), "-m", str(path), *sizes, *options, *length_options, "-p", prompt]


def _record(model: str, row: str, runs: dict[str, list[float]], **facts: Any) -> Record:
    name, unit = {"start": (_START, "s"), "memory": (_MEMORY, "MB")}[row]
    return Record(
        row=row,
        name=name,
        model=model,
        unit=unit,
        entries=[Entry(engine, "", values) for engine, values in runs.items()],
        command=f'make bench WHAT=start ARGS="--models {model}"',
        lower_is_better=True,
        **facts,
    )


def _text(model: str, records: list[Record]) -> str:
    lines = []
    for record in records:
        digits = 2 if record.unit == "s" else 0
        cells = (spread(e.runs, digits, f" {record.unit}") for e in record.entries)
        ratio = record.ratio("llama.cpp")
        disturbed = f"{record.disturbed_runs} of {record.num_runs}"
        lines.append((record.name, *cells, f"{ratio:.2f}" if ratio else "–", disturbed))
    header = ("median (lowest to highest)", "Twostroke", "llama.cpp", "times better", "disturbed")
    facts = caption(machine_facts(), model)
    return "\n".join([f"## {model}: start and memory", "", table(header, lines), "", facts])


if __name__ == "__main__":
    main()
