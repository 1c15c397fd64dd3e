"""Compare files of `twostroke quantize` with llama.cpp's rounding with importances.

Run it with `make bench WHAT=compress`.

All files are made from one source, the model's off-grid twin in F32, and are calibrated on the
same text. One backend scores all of them on the held-out text, which is neither the calibration
text nor the validation text. llama.cpp's files are made by `ggml_quantize_chunk`, as
llama-quantize calls it, with mean squares of the twin's inputs, and by its own mixes. A number
as format stands for `quantize --bits`, which llama.cpp does not have: the last column is the
ratio of its KL to the KL of llama.cpp's best file with as many bits, or up to a tenth of a bit
more. `--tune MINUTES` adds files with tuned scales (extra [train]).

Existing files in build/compress are used again, so that a run can be stopped and continued.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.goals import SMOLLM2
from benchmarks.common.report import ROOT, caption, machine_facts, note, save, table
from benchmarks.lab import twin
from benchmarks.peers.llama_tokens import agreement, library_path
from twostroke.backends.activation_bits.choice import choosing_text
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.lab.compress.allocate import QuantizationGoal
from twostroke.lab.compress.calibrate import generated_pieces
from twostroke.lab.compress.mixes import MIXES, formats_of, is_rounded
from twostroke.lab.compress.quantize import quantize
from twostroke.lab.compress.report import bits_per_value
from twostroke.lab.compress.threads import own_threads
from twostroke.lab.compress.walk import CalibrationStream
from twostroke.lab.measure.compare import ComparedModel, compare_models, held_out_text, pieces_of
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.program import ops
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.gguf import read_gguf
from twostroke.model.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twostroke.lab.compress.mixes import FormatMix
    from twostroke.model.quant import Floats

    Rounder = Callable[[str, Floats, str], QuantTensor]  # name, weight and format of a product

FOLDER = ROOT / "build" / "compress"
_COLUMNS = ("file", "bits", "KL", "largest KL", "same top", "llama.cpp reads", "seconds", "ratio")
_MAKERS = ("plain", "llama.cpp", "twostroke")
_ROOM = 0.1  # bits that llama.cpp's file may have more


def main() -> None:
    """Make the files of each model, score them, and print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[SMOLLM2], metavar="MODEL")
    parser.add_argument("--formats", nargs="+", default=["iq4_nl", "q4_1", "q5_0", "q4_k_m", "4.5"])
    parser.add_argument("--makers", nargs="+", default=_MAKERS, choices=_MAKERS)
    parser.add_argument("--tokens", type=int, default=12288, help="of calibration text")
    parser.add_argument(
        "--tune", type=float, metavar="MINUTES", help="of files that are tuned, too"
    )
    args = parser.parse_args()
    facts, results, texts = machine_facts(), [], []
    for model in args.models:
        rows = _with_ratios(_measure(model, args))
        results.append(
            {"model": model, "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]}
        )
        texts.append(f"{table(_COLUMNS, rows)}\n\n{caption(facts, f'off-grid twin of {model}')}")
    save("compress", {**facts, "models": results}, "\n\n".join(texts))


def _measure(model: str, args: argparse.Namespace) -> list[tuple[str, ...]]:
    folder, num_tokens = FOLDER / model, args.tokens
    source, pieces = twin_and_pieces(model, num_tokens)
    llama = _Llama(source, pieces)
    seconds_by_path: dict[Path, float] = {}  # files, and the seconds that each took
    for name in args.formats:
        is_goal = name not in MIXES
        makers = [maker for maker in args.makers if maker == "twostroke" or not is_goal]
        if args.tune and "twostroke" in makers:
            makers.append("tuned")
        for maker in makers:
            start_s, out = time.perf_counter(), folder / f"{maker} {name} {num_tokens}.gguf"
            seconds = out.with_suffix(".seconds")
            if not seconds.exists():
                note(f"Making {out.name}")
                if maker in {"twostroke", "tuned"}:
                    target = QuantizationGoal(bits=float(name)) if is_goal else name
                    minutes = args.tune if maker == "tuned" else 0.0
                    quantize(
                        *(str(source), target, out, None, num_tokens, note), tuning_minutes=minutes
                    )
                else:
                    _write(source, out, MIXES[name], llama.rounded if maker != "plain" else _plain)
                seconds.write_text(str(time.perf_counter() - start_s))
            seconds_by_path[out] = float(seconds.read_text())
    return list(_scored(source, seconds_by_path))


def _with_ratios(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Add the KL of our files over that of llama.cpp's best one of as many bits."""
    results = []
    for row in rows:
        bits = float(row[1])
        peers = [
            float(other[2])
            for other in rows
            if other[0].startswith("llama.cpp") and bits - 0.005 <= float(other[1]) < bits + _ROOM
        ]
        is_ours = row[0].startswith(("twostroke", "tuned"))
        results.append((*row, f"{float(row[2]) / min(peers):.2f}" if is_ours and peers else "–"))
    return results


def twin_and_pieces(model: str, num_tokens: int) -> tuple[Path, list[list[int]]]:
    """Return a model's twin and its own answers, made once, to calibrate on."""
    folder = FOLDER / model
    folder.mkdir(parents=True, exist_ok=True)
    source, path = folder / "twin.gguf", folder / f"{num_tokens} tokens.json"
    if not source.exists():
        twin.main(model, str(source))
    loaded = load(str(source))
    if not path.exists():
        path.write_text(json.dumps(generated_pieces(loaded, num_tokens)))
    pieces: list[list[int]] = json.loads(path.read_text())
    text = "\n".join(map(build_tokenizer(loaded).decode, pieces))
    _check_differ(text, choosing_text(), held_out_text())
    return source, pieces


def _check_differ(*texts: str) -> None:
    """Check that no text has a longer part of another one."""
    for text in texts:
        for other in texts:
            parts = (other[i : i + 100] for i in range(0, len(other) - 100, 50))
            assert text is other or not any(part in text for part in parts), "the texts overlap"


def _write(source: Path, out: Path, mix: FormatMix, rounded: Rounder) -> None:
    """Write a model in the formats of a mix; what is no product is rounded plainly."""
    file = read_gguf(source)
    tensors = dict(file.tensors)
    program = build_program(load(str(source)).spec)
    for key, name in formats_of(program, file.tensors, mix).items():
        writer = rounded if is_rounded(key, name) else _plain
        tensors[key] = writer(key, file.tensors[key].dequantize(), name)
    metadata = {
        key: file.metadata.raw(key)  # type: ignore[attr-defined]
        for key in file.metadata
        if key != "general.alignment"
    }
    write_gguf(out, metadata, tensors)


def _products(source: Path) -> list[ops.Linear]:
    return [op for op in build_program(load(str(source)).spec).ops if isinstance(op, ops.Linear)]


def _plain(key: str, weight: Floats, name: str) -> QuantTensor:
    del key
    return QuantTensor.from_floats(weight, FORMATS[name])


class _Llama:
    """llama.cpp's rounding, with the mean squares of inputs for the calibration text."""

    def __init__(self, source: Path, pieces: list[list[int]]) -> None:
        self._quantize = ctypes.CDLL(str(library_path())).ggml_quantize_chunk
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._quantize.argtypes = (ctypes.c_int, pointer, pointer, count, count, count, pointer)
        self._quantize.restype = ctypes.c_size_t
        self._squares: dict[str, Floats] = {}
        self._source, self._pieces = source, pieces

    def rounded(self, key: str, weight: Floats, name: str) -> QuantTensor:
        """Return a weight (outputs, inputs) in the format `name`."""
        fmt = FORMATS[name]
        num_rows, width = weight.shape
        data = np.empty((num_rows, fmt.num_bytes(width)), np.uint8)
        where = (array.ctypes.data for array in (weight, data))
        self._squares = self._squares or _mean_squares(self._source, self._pieces)
        squares = self._squares[key].ctypes.data
        written = self._quantize(fmt.gguf_id, *where, 0, num_rows, width, squares)
        assert written == data.nbytes, f"ggml wrote {written} bytes of {name}"
        return QuantTensor(fmt, weight.shape, data)


def _mean_squares(source: Path, pieces: list[list[int]]) -> dict[str, Floats]:
    """Return the mean square of each input of each product."""
    loaded = load(str(source))
    program, mean_squares = build_program(loaded.spec), dict[str, "Floats"]()
    with own_threads() as pool:
        streams = [CalibrationStream(program, pieces[i::4]) for i in range(4)]
        for op in program.ops:
            if isinstance(op, ops.Logits):
                break
            if isinstance(op, ops.Linear):
                rows = np.concatenate([stream.values[op.x] for stream in streams])
                mean_squares[op.weight] = np.square(rows).mean(axis=0)
            weights = {w.name: loaded.tensors[w.name].dequantize() for w in op.weights}
            list(pool.map(partial(CalibrationStream.run, op=op, weights=weights), streams))
    return mean_squares


def _scored(source: Path, seconds_by_path: dict[Path, float]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each file; rows are kept beside the files."""
    rows = {path: path.with_suffix(".row") for path in seconds_by_path}
    missing = [path for path, row in rows.items() if not row.exists()]
    note(f"Scoring {len(missing)} files")
    right, *others = (
        ComparedModel(str(path), ComputeOptions(backend="cpu", activation_bits=15), CacheOptions())
        for path in (source, *missing)
    )
    pieces = pieces_of(held_out_text(), [str(source)])
    products = [op.weight for op in _products(source)]
    result = compare_models(right, others, pieces, lambda _: None)
    reports = (report for report in result if not report.generated)
    for path, report in zip(missing, reports, strict=True):
        tensors = read_gguf(path).tensors
        bits, score = bits_per_value({key: tensors[key] for key in products}), report.comparison
        figures = f"{score.mean_kl:.4f}", f"{score.max_kl:.2f}", f"{score.top1_agreement:.1%}"
        cells = (
            path.stem,
            f"{bits:.2f}",
            *figures,
            f"{agreement(path):.1%}",
            f"{seconds_by_path[path]:.0f}",
        )
        note("  ".join(cells))
        rows[path].write_text(json.dumps(cells))
    for row in rows.values():
        yield tuple(json.loads(row.read_text()))


if __name__ == "__main__":
    main()
