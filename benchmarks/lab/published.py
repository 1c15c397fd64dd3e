"""Compare published speeds with the planner's limits, without calibration.

Used by plan.py, also for times of answers and of a large fleet. `published.csv` has the speeds
with their sources. Predictions use only the devices' data sheets.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.common.report import table
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan
from twostroke.lab.planner.fleet import make_fleet
from twostroke.lab.planner.fleet_file import FleetModel, FleetQuestion

_POINTS = Path(__file__).with_name("published.csv")
_KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "intermediate_size", "vocab_size",
)  # fmt: skip
_SIZES = {
    "Llama-2-7B": (4096, 32, 32, 32, 11008, 32000),
    "Llama-2-13B": (5120, 40, 40, 40, 13824, 32000),
    "Llama-2-70B": (8192, 64, 8, 80, 28672, 32000),
    "Llama-3.1-8B": (4096, 32, 8, 32, 14336, 128256),
    "Llama-3.1-405B": (16384, 128, 8, 126, 53248, 128256),
    "Llama-3.3-70B": (8192, 64, 8, 80, 28672, 128256),
}
_HEADER = ("source", "model", "on", "prompt/answer", "published, tok/s", "limit, tok/s", "reached")
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
_ANSWERS = {"Llama-3.3-70B": ("H100-SXM", 4), "DeepSeek-V3": ("H200", 8)}
_RUNS = 5
_STOCK = {"A100-80GB": 150, "H100-SXM": 100, "L40S": 100, "L4": 100, "H200": 50}
_NUM_MODELS = 50


def published_points() -> tuple[str, list[dict[str, Any]]]:
    """Return the table of published points with the median error, and the figures."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [_point(row, Path(folder)) for row in csv.DictReader(_POINTS.open())]
    lines = [
        (
            row["source"],
            f"{row['model']} ({row['weights']})",
            f"{int(row['count']) * int(row['replicas'])} x {row['device']}",
            f"{row['prompt']}/{row['output']}",
            f"{row['published']:,.0f}",
            f"{row['limit']:,.0f}",
            f"{row['published'] / row['limit']:.0%}",
        )
        for row in rows
    ]
    error = median(abs(row["limit"] / row["published"] - 1) for row in rows)
    reached = median(row["published"] / row["limit"] for row in rows)
    text = (
        f"## Published points\n\n{table(_HEADER, lines)}\n\nMedian error of {len(rows)} points: "
        f"{error:.0%}, without calibration. Limits are not forecasts: engines reached "
        f"{reached:.0%} of them (median).\n"
    )
    return text, rows


def answer_times() -> tuple[str, dict[str, list[float]]]:
    """Return how long `twostroke plan` takes, from its start to its end, in fresh processes."""
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        deepseek = Path(folder, "DeepSeek-V3.json")
        deepseek.write_text(json.dumps(_DEEPSEEK_V3))
        for name, (device, count) in _ANSWERS.items():
            path = deepseek if name == deepseek.stem else _config(Path(folder), name)
            plan = ("plan", str(path), "--on", device, "--devices", str(count))
            command = (sys.executable, "-m", "twostroke", *plan)
            for _ in range(_RUNS):
                began_s = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                results.setdefault(name, []).append(time.perf_counter() - began_s)
    rows = [(name, f"{median(s):.2f}", f"{min(s):.2f}–{max(s):.2f}") for name, s in results.items()]
    return f"## Answers\n\n{table(('model', 'seconds', 'range'), rows)}\n", results


def fleet_time() -> tuple[str, dict[str, float]]:
    """Return how long a fleet of 50 models on 500 devices takes, and how good it is."""
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as folder:
        names = ["Llama-2-13B", "Llama-3.1-8B", "Llama-3.3-70B"]
        paths = [_config(Path(folder), name) for name in names]
        models = [
            FleetModel(
                model=str(paths[rng.integers(len(paths))]),
                name=f"model {number}",
                weights=("fp8", "w4a16"),
                requests_per_s=float(rng.uniform(0.05, 3)),
                prompt=int(rng.choice([512, 1024, 2048, 4096])),
                output=int(rng.choice([64, 256, 512])),
                ttft=float(rng.choice([1000, 2000])),
                tpot=float(rng.choice([40, 80])),
            )
            for number in range(_NUM_MODELS)
        ]
        began_s = time.perf_counter()
        fleet = make_fleet(FleetQuestion(models=tuple(models), stock=_STOCK, mfu=0.5, mbu=0.7))
        seconds = time.perf_counter() - began_s
    if fleet.verdict or fleet.least_usd is None:
        raise SystemExit(f"The fleet has no answer: {fleet.verdict}")
    gap = fleet.usd_per_hour / fleet.least_usd - 1
    text = (
        f"## A fleet\n\n{_NUM_MODELS} models on {sum(_STOCK.values())} devices: {seconds:.1f} s, "
        f"{fleet.usd_per_hour:,.2f} $ an hour, at most {gap:.1%} above the least.\n"
    )
    return text, {"seconds": seconds, "usd_per_hour": fleet.usd_per_hour, "gap": gap}


def _point(row: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return a point with the limit that the planner gives."""
    planned = load_planned_model(str(_config(folder, row["model"]))).with_weights(row["weights"])
    question = Question(
        prompt=int(row["prompt"]),
        output=int(row["output"]),
        count=int(row["count"]),
        kv_format=row["kv_format"],
        streams=int(row["streams"]) if row["streams"] else None,
    )
    device = find_device(row["device"])
    if question.streams is None:  # published runs take as many as fit
        streams = make_plan(planned, device, question).memory.most_streams
        question = replace(question, streams=streams or None)
    chosen_row = make_plan(planned, device, question).chosen_row
    if chosen_row is None:
        raise SystemExit(f"{row['model']} does not fit on {row['count']} x {row['device']}.")
    limit = chosen_row.streams / chosen_row.step_s if row["streams"] else chosen_row.tokens_per_s
    published = float(row["output_tokens_per_s"])
    return {**row, "published": published, "limit": limit * int(row["replicas"])}


def _config(folder: Path, name: str) -> Path:
    path = folder / f"{name}.json"
    sizes = dict(zip(_KEYS, _SIZES[name], strict=True))
    path.write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 1 << 17, **sizes})
    )
    return path
