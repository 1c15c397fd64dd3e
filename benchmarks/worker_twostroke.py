"""Twostroke's side of a comparison: a process that answers jobs (see pipe.py)."""

from __future__ import annotations

import argparse
from typing import Any

from ours import run_job
from pipe import serve
from twostroke.core.config import ComputeOptions, EngineOptions
from twostroke.engine.build import build


def main() -> None:
    """Load the model, then answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--backend", default="auto")
    given = parser.parse_args()
    compute = ComputeOptions(backend=given.backend, num_threads=given.threads)
    with build(given.model, EngineOptions(compute)) as engine:

        def run(prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
            return run_job(engine.client, prompts, num_tokens).as_json()

        serve({"about": lambda: {"detail": engine.facts.detail}, "run": run})


if __name__ == "__main__":
    main()
