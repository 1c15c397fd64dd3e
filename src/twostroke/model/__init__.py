"""A model: its Program, families, number formats, weights and tokenizer, and its files.

`load` returns a `LoadedModel`, `pull` fetches its files, and `build_program` returns the `Program`
that backends run. The names below are imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as `typing` has it, whose import would take longer than ours

if TYPE_CHECKING:
    from twostroke.model.families import build_program as build_program
    from twostroke.model.loader import load as load
    from twostroke.model.loader import pull as pull
    from twostroke.model.program import Program as Program
    from twostroke.model.quant import QuantTensor as QuantTensor
    from twostroke.model.tokenizer import Tokenizer as Tokenizer
    from twostroke.model.weights import LoadedModel as LoadedModel

_HOMES = {
    "LoadedModel": "twostroke.model.weights",
    "Program": "twostroke.model.program",
    "QuantTensor": "twostroke.model.quant",
    "Tokenizer": "twostroke.model.tokenizer",
    "build_program": "twostroke.model.families",
    "load": "twostroke.model.loader",  # not a module `load`, which would hide the function
    "pull": "twostroke.model.loader",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name of this package when it is first used, to keep the start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'twostroke.model' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names of the package, imported or not."""
    return sorted(__all__)
