"""The speed of an answer, and the shares of the machine's limits that it reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from twostroke.core.hardware import Hardware
    from twostroke.engine.counters import PrefillDecodeTotals
    from twostroke.engine.output import Timings, Usage


_DOT = " · "


class AnswerFigures(Frozen):
    """The speed of one answer: its times, its rates, and its shares of the machine's limits.

    A figure is None if there were too few tokens for it, or if a limit of the machine is unknown.

    Attributes:
        ttft_s: seconds from the arrival of the request to the first token.
        prefill_tokens_per_s: prompt tokens per second, without cached tokens.
        decode_tokens_per_s: tokens per second after the first token.
        mfu: prefill's share of the machine's arithmetic peak, from 0 to 1.
        mbu: decode's share of the machine's memory bandwidth, from 0 to 1.
    """

    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    mfu: float | None
    mbu: float | None

    @classmethod
    def of(
        cls,
        usage: Usage,
        timings: Timings,
        phase_totals: PrefillDecodeTotals,
        hardware: Hardware | None,
    ) -> AnswerFigures:
        """Compute the times and rates of one answer from its token counts and timings.

        `phase_totals` counts the engine's steps during the answer, prefill and decode apart;
        `hardware` has the machine's limits, None if they are not measured.
        """
        if not usage.completion_tokens:
            return cls(None, None, None, None, None)
        computed = usage.prompt_tokens - usage.cached_tokens
        prefill_s = timings.first_token_s - timings.started_s
        decode_s = timings.last_token_s - timings.first_token_s
        num_decoded = usage.completion_tokens - 1
        return cls(
            ttft_s=timings.ttft_s,
            prefill_tokens_per_s=computed / prefill_s if prefill_s > 0 else None,
            decode_tokens_per_s=num_decoded / decode_s
            if num_decoded > 0 and decode_s > 0
            else None,
            mfu=phase_totals.prefill.mfu(hardware)
            if hardware and phase_totals.prefill.steps
            else None,
            mbu=phase_totals.decode.mbu(hardware)
            if hardware and phase_totals.decode.steps
            else None,
        )


def describe(
    figures: AnswerFigures, usage: Usage, *, notes: tuple[str, ...] = (), width: int = 0
) -> str:
    """Return the line that is printed below an answer: its times and rates, then `notes`.

    A line that is wider than `width` columns is folded; 0 means no limit.
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
        parts.append(
            f"{usage.cached_tokens} of {counted_noun(usage.prompt_tokens, 'prompt token')} cached"
        )
    if tried := usage.accepted_tokens + usage.rejected_tokens:
        parts.append(f"{usage.accepted_tokens} of {counted_noun(tried, 'draft token')} accepted")
    lines: list[str] = []
    for part in (*parts, *notes):
        if lines and not 0 < width < len(lines[-1]) + len(part) + len(_DOT):
            lines[-1] += _DOT + part
        else:
            lines.append(part)
    return "\n".join(lines)
