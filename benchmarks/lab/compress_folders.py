"""Compare folders of `quantize --to w4a16` with GPTQ, AWQ (LLM Compressor) and AutoRound.

Run it with `python -m benchmarks.lab.compress_folders`.

All folders are made from one off-grid twin in F32 and calibrated on the same tokens, as in
`compress.py`. Our backend scores all of them on the held-out text. Groups have 128 values, or 64
for SmolLM2, whose rows are not a multiple of 128. AWQ has zero points. Existing folders in
build/compress are used again.
"""

from __future__ import annotations

import argparse
import shutil
import time
from typing import TYPE_CHECKING

from benchmarks.common.goals import SMOLLM2
from benchmarks.common.report import caption, machine_facts, note, save, table
from benchmarks.lab.compress import FOLDER, twin_and_pieces
from benchmarks.peers.environments import python_of, run
from twostroke.core.json_io import write_json
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.lab.compress.folder import published_names, undo_rope_order
from twostroke.lab.compress.hf_files import config_of, write_tokenizer
from twostroke.lab.compress.quantize import quantize
from twostroke.lab.compress.report import bits_per_value
from twostroke.lab.measure.compare import ComparedModel, compare_models, held_out_text, pieces_of
from twostroke.model.loader import load
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.safetensors import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COLUMNS = ("file", "bits", "KL", "largest KL", "same top", "seconds", "ratio")
_WORKER = "benchmarks.peers.worker_llmcompressor"
_OURS = "twostroke"


def main() -> None:
    """Make the folders of each model, score them, and print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[SMOLLM2], metavar="MODEL")
    parser.add_argument("--makers", nargs="+", default=["gptq", "awq", "autoround", _OURS])
    parser.add_argument("--tokens", type=int, default=12288, help="of calibration text")
    args = parser.parse_args()
    facts, results, texts = machine_facts(), [], []
    for model in args.models:
        rows = _with_ratio(list(_measure(model, args.makers, args.tokens)))
        results.append(
            {"model": model, "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]}
        )
        texts.append(f"{table(_COLUMNS, rows)}\n\n{caption(facts, f'off-grid twin of {model}')}")
    save("compress-folders", {**facts, "models": results}, "\n\n".join(texts))


def _measure(model: str, makers: list[str], num_tokens: int) -> Iterator[tuple[str, ...]]:
    source, _ = twin_and_pieces(model, num_tokens)
    floats = FOLDER / model / "twin"
    if not (floats / "config.json").exists():
        _write_floats(source, floats)
    widths = {
        t.shape[1]
        for key, t in load(str(source)).tensors.items()
        if "blk." in key and len(t.shape) == 2
    }
    group = next(group for group in (128, 64, 32) if all(width % group == 0 for width in widths))
    seconds_by_path: dict[Path, float] = {}
    for maker in makers:
        out = FOLDER / model / f"{maker} {group} {num_tokens}"
        seconds = out.with_suffix(".seconds")
        if not seconds.exists():
            note(f"Making {out.name}")
            shutil.rmtree(out, ignore_errors=True)
            start_s = time.perf_counter()
            if maker == _OURS:
                quantize(str(source), "w4a16", out, None, num_tokens, note)
            else:
                tokens = FOLDER / model / f"{num_tokens} tokens.json"
                arguments = (maker, floats, tokens, out, group)
                run([str(python_of("llmcompressor")), "-m", _WORKER, *map(str, arguments)])
            seconds.write_text(str(time.perf_counter() - start_s))
        seconds_by_path[out] = float(seconds.read_text())
    compute = ComputeOptions(backend="cpu", activation_bits=15)
    right, *others = (
        ComparedModel(str(path), compute, CacheOptions()) for path in (source, *seconds_by_path)
    )
    result = compare_models(right, others, pieces_of(held_out_text(), [str(source)]), note)
    reports = (report for report in result if not report.generated)
    for (path, taken_s), report in zip(seconds_by_path.items(), reports, strict=True):
        layers = {
            k: t for k, t in load(str(path)).tensors.items() if "blk." in k and len(t.shape) == 2
        }
        score = report.comparison
        figures = f"{score.mean_kl:.4f}", f"{score.max_kl:.2f}", f"{score.top1_agreement:.1%}"
        yield path.name, f"{bits_per_value(layers):.2f}", *figures, f"{taken_s:.0f}"


def _with_ratio(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Add our KL over the best peer's."""
    peers = [float(row[2]) for row in rows if not row[0].startswith(_OURS)]
    return [
        (*row, f"{float(row[2]) / min(peers):.2f}" if row[0].startswith(_OURS) and peers else "–")
        for row in rows
    ]


def _write_floats(path: Path, folder: Path) -> None:
    """Write the twin as a folder that transformers loads, in float32."""
    source = load(str(path))
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(source, folder)
    names = published_names(source)
    tensors = {
        names[key]: undo_rope_order(
            source, key, QuantTensor.from_floats(t.dequantize(), FORMATS["F32"])
        )
        for key, t in source.tensors.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config_of(source) | {"torch_dtype": "float32"})


if __name__ == "__main__":
    main()
