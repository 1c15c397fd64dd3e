"""Twostroke: an LLM inference engine and server that knows its limits."""

from __future__ import annotations

TYPE_CHECKING = False  # as `typing` has it, whose import would take longer than all of ours

if TYPE_CHECKING:
    from twostroke.core.config import EngineOptions
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.embedding import Embedding
    from twostroke.engine.llm import LLM, AsyncLLM
    from twostroke.engine.output import Completion, Output

_HOMES = {
    "LLM": "twostroke.engine.llm",
    "AsyncLLM": "twostroke.engine.llm",
    "SamplingParams": "twostroke.core.sampling",
    "EngineOptions": "twostroke.core.config",
    "Completion": "twostroke.engine.output",
    "Output": "twostroke.engine.output",
    "Embedding": "twostroke.engine.embedding",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Embedding",
    "EngineOptions",
    "Output",
    "SamplingParams",
]


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that `import twostroke` costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'twostroke' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(home), name)
