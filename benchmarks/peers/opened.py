"""Measure how often vLLM's most likely token on a folder of `quantize` is also ours.

Run it with `python -m benchmarks.peers.opened FOLDER`. The text is the held-out text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.common.pipe import Worker
from benchmarks.common.report import caption, machine_facts, save, table
from benchmarks.common.texts import heldout_tokens, pieces
from benchmarks.peers.environments import python_of
from benchmarks.peers.quality import engine_logits
from twostroke.core.options import AUTO_BITS, DEFAULT_ACTIVATION_BITS, ComputeOptions
from twostroke.model.loader import load

_THREADS = "2"
_PIECE = 512


def main() -> None:
    """Ask vLLM, then each of our precisions; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="as `quantize --to w4a16` writes it")
    parser.add_argument("--vllm-env", type=Path, help="a ready virtual environment with vLLM")
    args = parser.parse_args()
    loaded = load(args.folder)
    parts = pieces(heldout_tokens(loaded), _PIECE)
    python = python_of("vllm", args.vllm_env)
    with tempfile.TemporaryDirectory() as folder_name:
        command = [
            str(python),
            "-m",
            "benchmarks.peers.worker_vllm",
            args.folder,
            "--threads",
            _THREADS,
        ]
        worker = Worker("vLLM", command, Path(folder_name) / "vllm.log")
        try:
            theirs = [worker.call("likeliest", tokens=part)["tokens"] for part in parts]
            about = worker.call("about")["version"]
        finally:
            worker.close()
    rows = []
    for bits in (DEFAULT_ACTIVATION_BITS, AUTO_BITS):
        logits = engine_logits(loaded, parts, ComputeOptions(activation_bits=bits))
        same = [
            bool(row)
            for tokens, ours in zip(theirs, logits, strict=True)
            for row in ours.argmax(axis=1) == tokens
        ]
        rows.append((f"activations: {bits}", f"{mean(same):.2%}", str(len(same))))
    facts = machine_facts()
    text = table((f"same likeliest token as vLLM {about}", "share", "places"), rows)
    save("opened", {**facts, "rows": rows}, f"{text}\n\n{caption(facts, loaded.name)}")


if __name__ == "__main__":
    main()
