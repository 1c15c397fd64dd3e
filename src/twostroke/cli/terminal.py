"""What the commands show on the terminal: bars while something is made ready, figures after."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.core.hardware import Hardware
    from twostroke.engine.meter import Strokes
    from twostroke.engine.output import Timings, Usage


@dataclass(frozen=True, slots=True)
class Figures:
    """What an answer achieved, for a person or, as JSON, for a script.

    Rates are tokens per second; `mfu` is prefill's share of the arithmetic peak and `mbu`
    decode's share of the memory bandwidth, from 0 to 1; None where nothing was measured.
    """

    ttft_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    mfu: float | None
    mbu: float | None

    @classmethod
    def of(cls, usage: Usage, timings: Timings, strokes: Strokes, hardware: Hardware) -> Figures:
        """Work out one choice's figures; `strokes` are those of its own steps."""
        computed = usage.prompt_tokens - usage.cached_tokens
        prefill_s = timings.first_token_s - timings.started_s
        decode_s = timings.last_token_s - timings.first_token_s
        more = usage.completion_tokens - 1
        return cls(
            ttft_s=timings.ttft_s,
            prefill_tokens_per_s=computed / prefill_s if prefill_s > 0 else None,
            decode_tokens_per_s=more / decode_s if more > 0 and decode_s > 0 else None,
            mfu=strokes.prefill.mfu(hardware) if strokes.prefill.steps else None,
            mbu=strokes.decode.mbu(hardware) if strokes.decode.steps else None,
        )

    def line(self, usage: Usage) -> str:
        """Return the figures as one line for a person."""
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        parts = [
            f"first token {self.ttft_s * 1000:.0f} ms",
            f"prefill {usage.prompt_tokens} tokens{cached}"
            + _rate(self.prefill_tokens_per_s, self.mfu, "of the arithmetic peak"),
            f"decode {usage.completion_tokens} tokens"
            + _rate(self.decode_tokens_per_s, self.mbu, "of the memory bandwidth"),
        ]
        return " · ".join(parts)


def _rate(tokens_per_s: float | None, share: float | None, of: str) -> str:
    if tokens_per_s is None:
        return ""
    return f" at {tokens_per_s:,.0f}/s" + (f", {share:.0%} {of}" if share is not None else "")


@contextmanager
def loading_bar(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes on standard error while the block runs; none when nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
