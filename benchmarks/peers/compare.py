"""Compare speed and quality of Twostroke and its peers in one interleaved run.

Run it with `make bench WHAT=peers`.

All engines have the same weights, token ids and number of threads, decode greedily and ignore
end tokens. Each engine is a process that stays alive and rests while the others run. A round is
one run of each (A B A B); figures are medians over the rounds, and ratios are ratios of medians.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.common.goals import SMOLLM2, rows_of
from benchmarks.common.records import OTHER_BITS, OURS, Record, is_ours, keep, ours_with
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.common.texts import FreshPrompts, heldout_tokens, pieces
from benchmarks.common.workload import WORKS
from benchmarks.peers.interleaved import Row, measure
from benchmarks.peers.quality import (
    Quality,
    answered_prompts,
    answers_quality,
    engine_quality,
    reference_logits,
)
from benchmarks.peers.sides import Side, add_arguments, start
from twostroke.core.frozen import Frozen
from twostroke.core.options import ComputeOptions
from twostroke.lab.measure.divergence import compare
from twostroke.model.loader import load

if TYPE_CHECKING:
    from benchmarks.peers.quality import Logits
    from twostroke.model.weights import LoadedModel

_ASKED_TOGETHER = 32  # prompts


def main() -> None:
    """Measure each model, then print and keep its tables."""
    args = _arguments()
    texts, results = [], []
    for model in args.models:
        result, text = _measure_model(args, model)
        results.append(result)
        texts.append(text)
    save("peers", {**machine_facts(), "models": results}, "\n\n".join(texts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=[SMOLLM2], metavar="MODEL",
        help="GGUF files or catalogue names",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--no-quality", action="store_true", help="measure speed only")
    parser.add_argument(
        "--only", nargs="+", choices=list(WORKS), metavar="ROW",
        help=f"rows of the table, in place of those that a model has goals for: {', '.join(WORKS)}",
    )  # fmt: skip
    add_arguments(parser)
    return parser.parse_args()


def _measure_model(args: argparse.Namespace, model: str) -> tuple[dict[str, Any], str]:
    """Measure all rows of one model and keep each as it is done."""
    note(f"== {model}")
    loaded = load(model)
    tokens = heldout_tokens(loaded)
    names = args.only or rows_of(model, list(WORKS))
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        sides = start(args, model, loaded, [WORKS[name] for name in names], folder)
        try:
            limits = sides[0].call("limits") or {}
            quality = [] if args.no_quality else _quality(args, loaded, sides, tokens, folder)
            run = Run(args, model, sides, limits, quality)
            prompts = FreshPrompts(tokens)
            rows = []
            for name in names:
                row = measure(WORKS[name], sides, prompts, args.rounds)
                keep(_record(run, name, row))
                rows.append(row)
        finally:
            for side in sides:
                side.worker.close()
    result = {
        "model": model,
        "threads": args.threads,
        "rounds": args.rounds,
        "limits": limits,
        "engines": {side.name: side.about for side in sides},
        "speed": [row.as_json() for row in rows],
        "quality": [msgspec.to_builtins(line) for line in quality],
    }
    return result, _text(model, args, rows, sides, quality)


class Run(Frozen):
    """What all rows of a model have in common."""

    args: argparse.Namespace
    model: str
    sides: list[Side]
    limits: dict[str, Any]
    quality: list[Quality]


def _record(run: Run, name: str, row: Row) -> Record:
    args, model, limits = run.args, run.model, run.limits
    peers = "" if args.peers == ["llama.cpp"] else f" --peers {' '.join(args.peers)}"
    level = f" --level {args.level}" if args.level else ""
    level += f" --llama-level {args.llama_level}" if args.llama_level != "native" else ""
    threads = f" --threads {args.threads}" if args.threads != 2 else ""
    if Path(model).is_file():
        model = Path(model).name  # records name no folder of this machine
    options = f"--models {model} --only {name}{level}{threads}{peers}"
    return Record(
        row=name,
        name=row.work.name,
        model=model.removesuffix(".gguf"),
        unit="tokens/s",
        entries=row.entries(),
        command=f'make bench WHAT=peers ARGS="{options}"',
        setting=_setting(args),
        disturbed_runs=row.disturbed,
        num_runs=row.runs,
        failures=row.failures,
        engines={side.name: side.about.get("version", "") for side in run.sides},
        others={
            "threads": args.threads,
            "limits": limits,
            "mbu": row.share("bytes", limits.get("bandwidth")),
            "mfu": row.share("flops", limits.get("peak")),
            "with_bits": {
                str(bits): {
                    "mbu": row.share("bytes", limits.get("bandwidth"), ours_with(bits)),
                    "mfu": row.share("flops", limits.get("peak"), ours_with(bits)),
                }
                for bits in OTHER_BITS
            },
            "same_first_tokens": row.same_first_tokens,
            "quality": [msgspec.to_builtins(line) for line in run.quality],
        },
    )


def _setting(args: argparse.Namespace) -> str:
    """Return what is not usual about a run: levels and threads."""
    parts = [args.level] if args.level else []
    parts += [f"llama.cpp {args.llama_level}"] if args.llama_level != "native" else []
    parts += [f"{args.threads} threads"] if args.threads != 2 else []
    return ", ".join(parts)


def _quality(
    args: argparse.Namespace, loaded: LoadedModel, sides: list[Side], tokens: list[int],
    folder: Path,
) -> list[Quality]:  # fmt: skip
    """Compare every engine's logits on the held-out text with the reference's."""
    note("Comparing logits on the held-out text")
    parts = pieces(tokens, 512)
    right = reference_logits(loaded, parts)
    compute = ComputeOptions(args.backend, args.threads, args.level, activation_bits=15)
    lines = engine_quality(loaded, right, parts, compute)
    for bits in OTHER_BITS:
        if any(side.name == ours_with(bits) for side in sides):
            lines += engine_quality(loaded, right, parts, replace(compute, activation_bits=bits))
    for side in sides:
        if is_ours(side.name):
            continue
        if not side.scores:
            lines += _answers_quality(side, right, parts)
        for way, options in side.ways.items() if side.scores else ():
            paths = [folder / f"{i}.npy" for i in range(len(parts))]
            for part, path in zip(parts, paths, strict=True):
                if not side.failure:
                    known_options = options if side.name == "llama.cpp" else {}
                    side.call("score", tokens=part, path=str(path), **known_options)
            if side.failure:
                continue
            others = (np.load(path, allow_pickle=False) for path in paths)
            comparison = compare(list(zip(right, others, parts, strict=True)))
            lines.append(Quality(f"{side.name}, {way}", msgspec.to_builtins(comparison)))
    return lines


def _answers_quality(side: Side, right: Logits, parts: list[list[int]]) -> list[Quality]:
    """Compare what an engine without logits answers; nothing if it cannot."""
    answers: list[int] = []
    prompts = answered_prompts(parts)
    for i in range(0, len(prompts), _ASKED_TOGETHER):
        some = prompts[i : i + _ASKED_TOGETHER]
        timing = None if side.failure else side.call("run", prompts=some, num_tokens=1, num_kept=0)
        if timing is None:
            return []
        answers += timing["first_tokens"]
    return [answers_quality(side.name, right, parts, answers)]


def _text(
    model: str, args: argparse.Namespace, rows: list[Row], sides: list[Side],
    quality: list[Quality],
) -> str:  # fmt: skip
    """Return the report of one model."""
    peers = [side.name for side in sides if side.name != OURS]
    ratios = [f"ratio to {name}" for name in peers]
    header = ("tokens/s: median (lowest to highest)", OURS, *peers, *ratios, "disturbed runs")
    lines = []
    for row in rows:
        ours = row.best(OURS)[1]
        cells, shares = [], []
        for name in peers:
            way, rates = row.best(name)
            cells.append(f"{spread(rates)}, {way}".rstrip(", ") if rates else "–")
            ratio = median(ours) / median(rates) if rates else None
            shares.append(f"{ratio:.2f}" if ratio else "–")
        disturbed = f"{row.disturbed} of {row.runs}"
        lines.append((row.work.name, spread(ours), *cells, *shares, disturbed))
    parts = [f"## {model} beside {', '.join(peers) or 'nobody'}", "", table(header, lines), ""]
    if quality:
        parts += [table(Quality.header(), [line.cells() for line in quality]), ""]
    parts += [f"- {side.name} {side.about.get('version', '')} {side.failure}" for side in sides]
    facts = caption(machine_facts(), model, f"{args.rounds} rounds", _setting(args) or "as usual")
    return "\n".join([*parts, "", facts])


if __name__ == "__main__":
    main()
