"""The server: HTTP for one engine or several, with batches, keys, metrics and a web UI.

`serve` runs a server until a signal stops it, as `twostroke serve` does. `create_app`
returns an ASGI application for another ASGI server.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `twostroke/__init__.py`: `typing` takes long to import

if TYPE_CHECKING:
    from twostroke.server.middleware import create_app as create_app
    from twostroke.server.options import ServeOptions as ServeOptions
    from twostroke.server.run import serve as serve

# No public name is also a module's name: importing the module would replace the name.
_MODULES = {
    "ServeOptions": "twostroke.server.options",
    "create_app": "twostroke.server.middleware",
    "serve": "twostroke.server.run",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name of this package when it is first used.

    Importing all of them takes long, and most users of the package need only some.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'twostroke.server' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names of this package, imported or not."""
    return sorted(__all__)
