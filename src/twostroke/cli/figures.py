"""How fast an answer came, and its shares of the machine's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.core.hardware import Hardware
    from twostroke.engine.counters import PrefillDecodeTotals
    from twostroke.engine.output import Timings, Usage


_DOT = " · "


class Figures(Frozen):
    """One answer's times and rates.

    `ttft_s` counts from the arrival of the request. Rates are tokens per second; `mfu` is prefill's
    share of the arithmetic peak and `mbu` decode's share of the memory bandwidth, from 0 to 1.
    Figures are None where there were too few tokens to measure, or limits are unknown.
    """

    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    mfu: float | None
    mbu: float | None

    @classmethod
    def of(
        cls, usage: Usage, timings: Timings, strokes: PrefillDecodeTotals, hardware: Hardware | None
    ) -> Figures:
        """Return the figures of one choice; `strokes` are those of its own steps."""
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


def describe(figures: Figures, usage: Usage, *, notes: tuple[str, ...] = (), width: int = 0) -> str:
    """Return the line under an answer; `notes` come last.

    It is folded between its parts if it is wider than `width` columns; 0 for no limit.
    """
    parts = []
    if figures.ttft_s is not None:
        ttft_s = figures.ttft_s
        parts.append(f"TTFT {f'{ttft_s:.2f} s' if ttft_s >= 1 else f'{ttft_s * 1000:.0f} ms'}")
    for stroke, rate, share, limit in (
        ("prefill", figures.prefill_tokens_per_s, figures.mfu, "peak"),
        ("decode", figures.decode_tokens_per_s, figures.mbu, "bandwidth"),
    ):
        if rate is not None:
            of_limit = f", {share:.0%} of {limit}" if share is not None else ""
            parts.append(f"{stroke} {rate:,.0f} t/s{of_limit}")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if tried := usage.accepted_tokens + usage.rejected_tokens:
        parts.append(f"{usage.accepted_tokens} of {tried} guessed tokens right")
    lines: list[str] = []
    for part in (*parts, *notes):
        if lines and not 0 < width < len(lines[-1]) + len(part) + len(_DOT):
            lines[-1] += _DOT + part
        else:
            lines.append(part)
    return "\n".join(lines)
