"""Many servers behind one address: routing, the router, and servers on a Ray cluster.

`route` runs a router with `RouteOptions`. A `Manager` keeps the servers of a `FleetSpec` running.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `twostroke/__init__.py`: `typing` takes long to import

if TYPE_CHECKING:
    from twostroke.fleet.cluster.manager import Manager as Manager
    from twostroke.fleet.cluster.spec import FleetSpec as FleetSpec
    from twostroke.fleet.router.app import route as route
    from twostroke.fleet.router.options import RouteOptions as RouteOptions

# No public name is also a module's name: importing the module would replace the name.
_MODULES = {
    "RouteOptions": "twostroke.fleet.router.options",
    "route": "twostroke.fleet.router.app",
    "FleetSpec": "twostroke.fleet.cluster.spec",
    "Manager": "twostroke.fleet.cluster.manager",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that a fleet's manager imports no HTTP server."""
    if name not in _MODULES:
        raise AttributeError(f"module 'twostroke.fleet' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted(__all__)
