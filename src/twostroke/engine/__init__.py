"""The engine: turns prompts into tokens, in this process or in a separate process.

`LLM` and `AsyncLLM` are the Python interface. `build` starts an `Engine`, whose `Client` takes
requests of a `Caller` and yields `Output`s, or a whole `Completion`. A server talks to a
`ServedEngine`, which is an engine in its own process (`RemoteEngine`) or in the server's.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `twostroke/__init__.py`: `typing` takes long to import

if TYPE_CHECKING:
    from twostroke.engine.client import Caller as Caller
    from twostroke.engine.client import Client as Client
    from twostroke.engine.engine import Engine as Engine
    from twostroke.engine.engine import build as build
    from twostroke.engine.llm import LLM as LLM
    from twostroke.engine.llm import AsyncLLM as AsyncLLM
    from twostroke.engine.output import Completion as Completion
    from twostroke.engine.output import Output as Output
    from twostroke.engine.process.remote import RemoteEngine as RemoteEngine
    from twostroke.engine.process.served import ServedEngine as ServedEngine

# No public name is also a module's name: importing the module would replace the name.
_MODULES = {
    "build": "twostroke.engine.engine",
    "Engine": "twostroke.engine.engine",
    "Client": "twostroke.engine.client",
    "Caller": "twostroke.engine.client",
    "LLM": "twostroke.engine.llm",
    "AsyncLLM": "twostroke.engine.llm",
    "Output": "twostroke.engine.output",
    "Completion": "twostroke.engine.output",
    "ServedEngine": "twostroke.engine.process.served",
    "RemoteEngine": "twostroke.engine.process.remote",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name of this package when it is first used.

    Importing the package stays fast this way. An engine's child process needs few of the names.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'twostroke.engine' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return all public names of this package, whether they are imported yet or not."""
    return sorted(__all__)
