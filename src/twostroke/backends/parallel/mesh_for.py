"""How the options of an engine divide its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.parallel.launched import launched
from twostroke.model.program.mesh import mesh_of, stores_twice

if TYPE_CHECKING:
    from twostroke.core.options import EngineOptions
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh


def mesh_for(options: EngineOptions, program: Program) -> Mesh:
    """Return the mesh of an engine.

    Where `kv_shares` is "auto", keys and values are divided by places if heads would have some of
    them stored twice, and all ranks are on this machine: between machines it can cost too much.

    Raises:
        UsageError: the Program cannot be divided so.
    """
    parallel = options.parallel
    mesh = mesh_of(parallel, program)
    can_choose = (
        parallel.kv_shares == "auto"
        and not parallel.attention_shares
        and options.cache.page_size is None
        and options.compute.backend != "torch"
    )
    if not can_choose or not stores_twice(mesh, program):
        return mesh
    is_here = parallel.launcher == "auto" and launched() is None
    return replace(mesh, by_places=is_here)
