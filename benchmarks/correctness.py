"""`make correctness`: the cpu backend against the reference on held-out text, at every level here.

Exits with 1 when a level misses a limit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from quality import Quality, engine_quality, reference_logits
from report import caption, machine_facts, note, save, table
from texts import heldout_tokens, pieces
from twostroke.backends.cpu.library import level_reports
from twostroke.core.config import ComputeOptions
from twostroke.weights import load

MAX_MEAN_KL = 1e-3  # nats
MIN_AGREEMENT = 0.98
MAX_PERPLEXITY_CHANGE = 0.005
_PIECE = 512  # tokens


def main() -> int:
    """Measure, then print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", nargs="+", metavar="LEVEL", help="default: all that run here")
    given = parser.parse_args()
    reports = level_reports()
    levels = given.levels or [name for name, why in reports.items() if why.startswith("runs")]
    loaded = load(given.model)
    parts = pieces(heldout_tokens(loaded), _PIECE)
    note("Computing the reference's logits")
    right = reference_logits(loaded, parts)
    lines: list[Quality] = []
    for level in levels:
        note(f"Computing level {level}")
        lines += engine_quality(load(given.model), right, parts, ComputeOptions("cpu", level=level))
    num_tokens = sum(map(len, parts))
    limits = (
        f"Limits: mean KL below {MAX_MEAN_KL:g}, the same likeliest token at least"
        f" {MIN_AGREEMENT:.0%}, perplexity within {MAX_PERPLEXITY_CHANGE:.1%}."
    )
    facts = machine_facts()
    shown = [table(Quality.header(), [line.cells() for line in lines]), "", limits, ""]
    where = caption(facts, given.model, f"{num_tokens:,} tokens in pieces of {_PIECE}")
    result = {**facts, "model": given.model, "num_tokens": num_tokens}
    result["levels"] = [asdict(line) for line in lines]
    save("correctness", result, "\n".join(["## Correctness", "", *shown, where]))
    failed = [line.name for line in lines if not is_right(line)]
    if failed:
        note(f"Beyond the limits: {'; '.join(failed)}")
    return 1 if failed else 0


def is_right(line: Quality) -> bool:
    """Whether a line is within every limit."""
    it = line.comparison
    change = abs(it["perplexity"] / it["right_perplexity"] - 1)
    return bool(
        it["mean_kl"] < MAX_MEAN_KL
        and it["top1_agreement"] >= MIN_AGREEMENT
        and change <= MAX_PERPLEXITY_CHANGE
    )


if __name__ == "__main__":
    sys.exit(main())
