"""Backends run a Program: `create_backend` returns a `Backend`, which computes steps."""

from __future__ import annotations

TYPE_CHECKING = False  # importing `typing` would take longer than the modules below

if TYPE_CHECKING:
    from twostroke.backends.create import create_backend as create_backend
    from twostroke.backends.interface import Backend as Backend
    from twostroke.backends.interface import BackendFacts as BackendFacts
    from twostroke.backends.kv_size import size_kv_cache as size_kv_cache
    from twostroke.backends.machine_limits import MachineLimits as MachineLimits

_MODULES = {
    "Backend": "twostroke.backends.interface",
    "BackendFacts": "twostroke.backends.interface",
    "MachineLimits": "twostroke.backends.machine_limits",
    "create_backend": "twostroke.backends.create",
    "size_kv_cache": "twostroke.backends.kv_size",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import the package's public names on first use, to keep `import twostroke.backends` cheap."""
    if name not in _MODULES:
        raise AttributeError(f"module 'twostroke.backends' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the package's public names, whether they are imported yet or not."""
    return sorted(__all__)
