"""How options divide a model over ranks, and which rank a launcher assigned to this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import num_cores
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
    return replace(mesh, kv_by_tokens=is_here)


# Rank and number of ranks, by launcher: torchrun and its like, Open MPI, MPICH and Intel, Slurm.
_NAMES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_SLURM_BATCH: Final = 0xFFFFFFF0  # steps from here on are not srun's
_DEFAULT_PORT: Final = 29500  # torchrun's
_MAX_PORT: Final = 65535


class LauncherEnv(Frozen):
    """A rank's number, and where rank 0 listens.

    `host` is None if the launcher does not tell it, as mpirun.
    """

    rank: int
    num_ranks: int
    host: str | None
    port: int


def launched() -> LauncherEnv | None:
    """Return this process's rank, or None if no launcher started it.

    Raises:
        UsageError: a variable of the launcher is missing or not a number.
    """
    found = env.launcher()
    step = found.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SLURM_BATCH:
        found.pop("SLURM_PROCID", None)  # a batch script has it, too, though srun did not start it
    for rank, size in _NAMES:
        if rank in found and size in found:
            port = _number(found, "MASTER_PORT", _DEFAULT_PORT, 1, _MAX_PORT)
            if "TORCHELASTIC_RUN_ID" in found:
                port += 1 if port < _MAX_PORT else -1  # torchrun itself listens at MASTER_PORT
            num_ranks = _number(found, size, 0, 1, 1 << 20)
            number = _number(found, rank, 0, 0, 1 << 20)
            if number >= num_ranks:
                raise UsageError(f"{rank} must be less than {size} ({num_ranks}), got {number}.")
            return LauncherEnv(number, num_ranks, found.get("MASTER_ADDR"), port)
    if "RANK" in found or "WORLD_SIZE" in found:
        missing = "WORLD_SIZE" if "RANK" in found else "RANK"
        raise UsageError(f"The launcher has not set {missing} (RANK and WORLD_SIZE are needed).")
    return None


def unwise(num_ranks: int) -> str | None:
    """Return a warning about a division into `num_ranks` that works, but is hardly meant so."""
    try:
        place = launched()
    except UsageError:  # of variables that nobody needs if there is one rank
        return None
    if place is None:
        cores = num_cores()
        if num_ranks <= max(4, 2 * cores):
            return None
        return f"{num_ranks} ranks share {cores} cores: expect it to be slow."
    if num_ranks > 1 or place.num_ranks == 1:
        return None
    return (
        f"The launcher has started {place.num_ranks} processes, and each runs the whole model by "
        f"itself: to divide it, add --tensor-parallel {place.num_ranks}, for example."
    )


def _number(found: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = found.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
        raise UsageError(f"{name} must be a number from {least} to {most}, got '{text}'.")
    return int(text)
