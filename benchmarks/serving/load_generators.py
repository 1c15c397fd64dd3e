"""The load generators beside `twostroke bench`: how they are run, and the figures they report."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import note
from benchmarks.peers.environments import python_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LIMIT_S = 280
# Splits at spaces, since the server counts tokens; aiperf wants a tokenizer nevertheless.
_MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(sys.argv[1])
"""
_TOKENIZER = "words"  # a folder; aiperf takes a relative path only
_PERCENTILES = {"mean": "avg", "p50": "p50", "p90": "p90"}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The same traffic for all load generators: a closed loop over prompts.

    Attributes:
        url, model: the endpoint.
        num_clients: clients of the closed loop.
        prompts: a prompt for each request.
        num_output: tokens of each answer.
        folder: for files.
    """

    url: str
    model: str
    num_clients: int
    prompts: Sequence[str]
    num_output: int
    folder: Path


def run_aiperf(traffic: Traffic, environment: Path | None) -> dict[str, float]:
    """Return aiperf's figures, by the names of `lab/bench/definitions.py`, in seconds.

    aiperf's ITL is the TPOT, and its ICL the ITL.
    """
    python = python_of("aiperf", environment)
    folder = traffic.folder
    if not (folder / _TOKENIZER).exists():
        _run([str(python), "-c", _MAKE_TOKENIZER, _TOKENIZER], folder)
    lines = [json.dumps({"text": prompt}) for prompt in traffic.prompts]
    (folder / "aiperf.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        *(str(python.with_name("aiperf")), "profile", "--model", traffic.model),
        *("--url", traffic.url, "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", str(traffic.num_clients)),
        *("--request-count", str(len(traffic.prompts))),
        *("--input-file", "aiperf.jsonl", "--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential"),
        *("--use-server-token-count", "--tokenizer", _TOKENIZER, "--ui", "none"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--extra-inputs", f"max_tokens:{traffic.num_output}", "--artifact-dir", "aiperf"),
    ]
    _run(command, folder)
    body = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    metrics = {
        "ttft": "time_to_first_token",
        "tpot": "inter_token_latency",
        "itl": "inter_chunk_latency",
        "e2e": "request_latency",
    }
    figures = {
        f"{name}_{statistic}": body[metric][column] / 1e3
        for name, metric in metrics.items()
        for statistic, column in _PERCENTILES.items()
    }
    return figures | {
        "requests_per_s": body["request_throughput"]["avg"],
        "output_per_s": body["output_token_throughput"]["avg"],
    }


def run_guidellm(traffic: Traffic, environment: Path | None) -> dict[str, float]:
    """Return guidellm's figures, by the names of `lab/bench/definitions.py`, in seconds."""
    python = python_of("guidellm", environment)
    folder = traffic.folder
    lines = [json.dumps({"prompt": prompt}) for prompt in traffic.prompts]
    (folder / "guidellm.jsonl").write_text("\n".join(lines) + "\n")
    body: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    backend = {
        "kind": "openai_http",
        "target": traffic.url,
        "model": traffic.model,
        "max_tokens": traffic.num_output,
        "extras": {"body": body},
    }
    command = [
        *(str(python.with_name("guidellm")), "run", "--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={traffic.num_clients}"),
        *("--constraint", f"kind=max_requests,count={len(traffic.prompts)}"),
        *("--data", "kind=json_file,path=guidellm.jsonl", "--disable-console"),
        *("--output", "kind=json,path=guidellm.json"),
    ]
    _run(command, folder)
    report = json.loads((folder / "guidellm.json").read_text())
    metrics = report["benchmarks"][0]["metrics"]
    names = {
        "ttft": ("time_to_first_token_ms", 1e-3),
        "tpot": ("time_per_output_token_ms", 1e-3),
        "itl": ("inter_token_latency_ms", 1e-3),
        "e2e": ("request_latency", 1.0),
    }
    figures = {}
    for name, (metric, unit) in names.items():
        row = metrics[metric]["successful"]
        figures[f"{name}_mean"] = row["mean"] * unit
        for statistic in ("p50", "p90"):
            figures[f"{name}_{statistic}"] = row["percentiles"][statistic] * unit
    return figures | {
        "requests_per_s": metrics["requests_per_second"]["successful"]["mean"],
        "output_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


def _run(command: list[str], folder: Path) -> None:
    """Run a command in a folder; raise SystemExit with the end of its output if it fails."""
    note(f"Running {os.path.basename(command[0])}")  # noqa: PTH119 - a name, not a file
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    if result.returncode:
        raise SystemExit(f"{command[0]} failed:\n{(result.stdout + result.stderr)[-3000:]}")
