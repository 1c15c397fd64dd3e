"""Twostroke: an LLM inference engine and server that knows its limits."""

from __future__ import annotations

TYPE_CHECKING = False  # as `typing` has it, whose import would take longer than all of ours

if TYPE_CHECKING:
    from twostroke.core.constraint import Constraint as Constraint
    from twostroke.core.distributed_options import ParallelOptions as ParallelOptions
    from twostroke.core.errors import BackendError as BackendError
    from twostroke.core.errors import ContextLengthError as ContextLengthError
    from twostroke.core.errors import DeadlineError as DeadlineError
    from twostroke.core.errors import DownloadError as DownloadError
    from twostroke.core.errors import EngineStoppedError as EngineStoppedError
    from twostroke.core.errors import MemoryLimitError as MemoryLimitError
    from twostroke.core.errors import ModelFormatError as ModelFormatError
    from twostroke.core.errors import ModelNotFoundError as ModelNotFoundError
    from twostroke.core.errors import OverloadedError as OverloadedError
    from twostroke.core.errors import QualityError as QualityError
    from twostroke.core.errors import RequestError as RequestError
    from twostroke.core.errors import SchemaMissError as SchemaMissError
    from twostroke.core.errors import TwostrokeError as TwostrokeError
    from twostroke.core.errors import UsageError as UsageError
    from twostroke.core.options import BatchOptions as BatchOptions
    from twostroke.core.options import CacheOptions as CacheOptions
    from twostroke.core.options import ComputeOptions as ComputeOptions
    from twostroke.core.options import EngineOptions as EngineOptions
    from twostroke.core.options import GenerationOptions as GenerationOptions
    from twostroke.core.options import SpeculationOptions as SpeculationOptions
    from twostroke.core.sampling import SamplingParams as SamplingParams
    from twostroke.engine.embedding import Embedding as Embedding
    from twostroke.engine.llm import LLM as LLM
    from twostroke.engine.llm import AsyncLLM as AsyncLLM
    from twostroke.engine.output import AnswerCall as AnswerCall
    from twostroke.engine.output import AnswerChunk as AnswerChunk
    from twostroke.engine.output import Completion as Completion
    from twostroke.engine.output import Output as Output

    __version__: str

_HOMES = {
    "LLM": "twostroke.engine.llm",
    "AsyncLLM": "twostroke.engine.llm",
    "SamplingParams": "twostroke.core.sampling",
    "Constraint": "twostroke.core.constraint",
    "EngineOptions": "twostroke.core.options",
    "ComputeOptions": "twostroke.core.options",
    "CacheOptions": "twostroke.core.options",
    "BatchOptions": "twostroke.core.options",
    "GenerationOptions": "twostroke.core.options",
    "ParallelOptions": "twostroke.core.distributed_options",
    "SpeculationOptions": "twostroke.core.options",
    "Completion": "twostroke.engine.output",
    "AnswerChunk": "twostroke.engine.output",
    "Output": "twostroke.engine.output",
    "AnswerCall": "twostroke.engine.output",
    "Embedding": "twostroke.engine.embedding",
    "TwostrokeError": "twostroke.core.errors",
    "UsageError": "twostroke.core.errors",
    "ModelNotFoundError": "twostroke.core.errors",
    "ModelFormatError": "twostroke.core.errors",
    "QualityError": "twostroke.core.errors",
    "DownloadError": "twostroke.core.errors",
    "MemoryLimitError": "twostroke.core.errors",
    "BackendError": "twostroke.core.errors",
    "RequestError": "twostroke.core.errors",
    "ContextLengthError": "twostroke.core.errors",
    "OverloadedError": "twostroke.core.errors",
    "SchemaMissError": "twostroke.core.errors",
    "DeadlineError": "twostroke.core.errors",
    "EngineStoppedError": "twostroke.core.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that `import twostroke` costs nothing."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'twostroke' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def _version() -> str:
    """Return the version of the package that is installed; "0" for a folder on the path."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("twostroke")
    except PackageNotFoundError:
        return "0"


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted(__all__)
