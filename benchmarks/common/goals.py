"""The goals that BENCHMARKS.md compares measurements with."""

from __future__ import annotations

from dataclasses import dataclass

SMOLLM2 = "smollm2"
QWEN_05 = "qwen2.5-coder-0.5b"
QWEN_15 = "qwen2.5-coder-1.5b"
LLAMA_3B = "llama-3b"  # random weights of this shape: benchmarks/common/shapes.py
LLAMA_8B = "llama-8b"


@dataclass(frozen=True, slots=True)
class Goal:
    """A row of one model, and how many times better than its best peer it is meant to be.

    `mbu` and `mfu` are shares of the most bandwidth and arithmetic ever measured on the machine,
    `bare` is a share of what the engine does without its server, `limit` an absolute figure in the
    row's unit.
    """

    row: str
    model: str
    ratio: float | None = None
    mbu: float | None = None
    mfu: float | None = None
    bare: float | None = None
    limit: float | None = None

    @property
    def command(self) -> str:
        """What measures it."""
        kind, _, rest = self.row.partition("-")
        arguments = {
            "start": ("start", f"--models {self.model}"),
            "memory": ("start", f"--models {self.model}"),
            "serve": ("serving", f"--model {self.model} --clients {rest}"),
            "overhead": ("overhead", f"--model {self.model} --streams {rest}"),
        }
        usual = ("peers", f"--models {self.model} --only {self.row}")
        target, options = arguments.get(kind, usual)
        return f'make bench WHAT={target} ARGS="{options}"'

    def text(self) -> str:
        """Return it in words."""
        shares = ((self.mbu, "bandwidth"), (self.mfu, "peak"), (self.bare, "bare engine"))
        words = [f"{self.ratio:g} x"] if self.ratio is not None else []
        words += [f"{share:.0%} of the {name}" for share, name in shares if share]
        words += [f"at most {self.limit:g} ms"] if self.limit is not None else []
        return ", ".join(words)


GOALS = (
    Goal("decode-1", SMOLLM2, 1.5),
    Goal("decode-8", SMOLLM2, 3),
    Goal("decode-32", SMOLLM2, 3),
    Goal("prefill-512", SMOLLM2, 3),
    Goal("prefill-2048", SMOLLM2, 3),
    Goal("decode-1-behind-8000", SMOLLM2, 1.5),
    Goal("decode-8-behind-8000", SMOLLM2, 1.5),
    Goal("decode-16", QWEN_05, 3),
    Goal("decode-1", QWEN_15, 1.4, mbu=0.85),
    Goal("prefill-512", QWEN_15, 5, mfu=0.5),
    Goal("prefill-2048", QWEN_15, 5, mfu=0.5),
    Goal("decode-1", LLAMA_3B, 1.3, mbu=0.85),
    Goal("decode-8", LLAMA_3B, 2.5),
    Goal("prefill-512", LLAMA_3B, 1.4),
    Goal("decode-1", LLAMA_8B, 1.3, mbu=0.85),
    Goal("prefill-512", LLAMA_8B, 1.4),
    Goal("start", SMOLLM2, 1),
    Goal("start", QWEN_15, 1),
    Goal("memory", SMOLLM2, 1),
    Goal("memory", QWEN_15, 1),
    Goal("serve-16", SMOLLM2, 3, bare=0.9),
    Goal("overhead-256", SMOLLM2, limit=1.0),
)


def rows_of(model: str, known_rows: list[str]) -> list[str]:
    """Return the `known_rows` that a model has goals for; a usual few if it has no goals."""
    rows = [goal.row for goal in GOALS if goal.model == model and goal.row in known_rows]
    return rows or [row for row in ("decode-1", "decode-16", "prefill-512") if row in known_rows]
