"""What an answer achieved, beside what this machine could have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.core.hardware import Hardware
    from twostroke.engine.counters import Strokes
    from twostroke.engine.output import Timings, Usage


@dataclass(frozen=True, slots=True)
class Figures:
    """One answer's times and rates, for a person or, as JSON, for a script.

    `ttft_s` is the time from the engine's taking the request to its first token. Rates are tokens
    per second; `mfu` is prefill's share of the arithmetic peak and `mbu` decode's share of the
    memory bandwidth, from 0 to 1. None where there was nothing to measure (an answer that was
    stopped before its first token, or one of a single token) and where limits are unknown.
    """

    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    mfu: float | None
    mbu: float | None

    @classmethod
    def of(
        cls, usage: Usage, timings: Timings, strokes: Strokes, hardware: Hardware | None
    ) -> Figures:
        """Work out one choice's figures; `strokes` are those of its own steps."""
        if not usage.completion_tokens:
            return cls(None, None, None, None, None)
        computed = usage.prompt_tokens - usage.cached_tokens
        prefill_s = timings.first_token_s - timings.started_s
        decode_s = timings.last_token_s - timings.first_token_s
        more = usage.completion_tokens - 1
        return cls(
            ttft_s=timings.ttft_s,
            prefill_tokens_per_s=computed / prefill_s if prefill_s > 0 else None,
            decode_tokens_per_s=more / decode_s if more > 0 and decode_s > 0 else None,
            mfu=strokes.prefill.mfu(hardware) if hardware and strokes.prefill.steps else None,
            mbu=strokes.decode.mbu(hardware) if hardware and strokes.decode.steps else None,
        )

    def parts(self) -> list[str]:
        """Return the figures for a person, one part a figure."""
        parts = []
        if self.ttft_s is not None:
            shown = f"{self.ttft_s:.2f} s" if self.ttft_s >= 1 else f"{self.ttft_s * 1000:.0f} ms"
            parts.append(f"TTFT {shown}")
        for stroke, rate, share, limit in (
            ("prefill", self.prefill_tokens_per_s, self.mfu, "peak"),
            ("decode", self.decode_tokens_per_s, self.mbu, "bandwidth"),
        ):
            if rate is not None:
                of_limit = f", {share:.0%} of {limit}" if share is not None else ""
                parts.append(f"{stroke} {rate:,.0f} t/s{of_limit}")
        return parts


def describe(figures: Figures, usage: Usage, *, notes: tuple[str, ...] = (), width: int = 0) -> str:
    """Return the line under an answer; `notes` come last.

    It is folded between its parts where it is wider than `width` columns, if that is given.
    """
    parts = figures.parts()
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if usage.accepted_tokens or usage.rejected_tokens:
        tried = usage.accepted_tokens + usage.rejected_tokens
        parts.append(f"{usage.accepted_tokens} of {tried} guessed tokens right")
    parts += notes
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if width and lines[-1] and len(longer) > width:
            lines.append(part)
        else:
            lines[-1] = longer
    return "\n".join(lines)
