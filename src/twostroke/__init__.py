"""Twostroke: an LLM inference engine and server that knows its limits."""

from __future__ import annotations

TYPE_CHECKING = False  # as `typing` has it, whose import would take longer than all of ours

if TYPE_CHECKING:
    from twostroke.core.config import BatchOptions as BatchOptions
    from twostroke.core.config import CacheOptions as CacheOptions
    from twostroke.core.config import ComputeOptions as ComputeOptions
    from twostroke.core.config import EngineOptions as EngineOptions
    from twostroke.core.config import GenerationOptions as GenerationOptions
    from twostroke.core.config import ParallelOptions as ParallelOptions
    from twostroke.core.config import SpeculationOptions as SpeculationOptions
    from twostroke.core.constraint import Constraint as Constraint
    from twostroke.core.sampling import SamplingParams as SamplingParams
    from twostroke.engine.embedding import Embedding as Embedding
    from twostroke.engine.llm import LLM as LLM
    from twostroke.engine.llm import AsyncLLM as AsyncLLM
    from twostroke.engine.output import Completion as Completion
    from twostroke.engine.output import Output as Output

_HOMES = {
    "LLM": "twostroke.engine.llm",
    "AsyncLLM": "twostroke.engine.llm",
    "SamplingParams": "twostroke.core.sampling",
    "Constraint": "twostroke.core.constraint",
    "EngineOptions": "twostroke.core.config",
    "ComputeOptions": "twostroke.core.config",
    "CacheOptions": "twostroke.core.config",
    "BatchOptions": "twostroke.core.config",
    "GenerationOptions": "twostroke.core.config",
    "ParallelOptions": "twostroke.core.config",
    "SpeculationOptions": "twostroke.core.config",
    "Completion": "twostroke.engine.output",
    "Output": "twostroke.engine.output",
    "Embedding": "twostroke.engine.embedding",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that `import twostroke` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'twostroke' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted(__all__)
