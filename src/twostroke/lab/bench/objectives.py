"""Published latency objectives, by name."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import UsageError, nearest
from twostroke.lab.measure.requests import Objectives

# Limits in ms of TTFT and TPOT, from MLPerf Inference (MLCommons). `reading` is the
# speed at which a very fast reader follows a stream.
_LIMITS_MS: Final = {
    "llama-2-70b-server": (2000, 200),
    "llama-2-70b-interactive": (450, 40),
    "llama-3.1-8b-server": (2000, 100),
    "llama-3.1-8b-interactive": (500, 30),
    "llama-3.1-405b-server": (6000, 175),
    "llama-3.1-405b-interactive": (4500, 80),
    "mixtral-8x7b-server": (2000, 200),
    "deepseek-r1-server": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "gpt-oss-120b-server": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 20),
    "reading": (200, 120),
}
OBJECTIVE_NAMES: Final = tuple(_LIMITS_MS)


def named_objectives(name: str) -> Objectives:
    """Return published latency objectives; raise UsageError if the name is unknown."""
    limits_ms = _LIMITS_MS.get(name)
    if limits_ms is None:
        hint = nearest(name, OBJECTIVE_NAMES)
        reason = f"must be one of {', '.join(OBJECTIVE_NAMES)}, got '{{value}}'.{hint}"
        raise UsageError(reason, field="slo", value=name)
    ttft_ms, tpot_ms = limits_ms
    return Objectives(ttft_ms / 1e3, tpot_ms / 1e3)
