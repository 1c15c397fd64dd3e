"""How options divide a model over ranks, and which rank a launcher assigned to this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import num_cores
from twostroke.core.message_text import counted_noun
from twostroke.model.program.mesh import mesh_of, stores_twice

if TYPE_CHECKING:
    from twostroke.core.options import EngineOptions
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh


def mesh_for(options: EngineOptions, program: Program) -> Mesh:
    """Return the mesh of ranks that engine options ask for, over which a model is divided.

    If `kv_shares` is "auto", keys and values are divided by heads or by tokens. A division by
    tokens is chosen if a division by heads would store some heads twice, and if all ranks are on
    this machine; between machines it can cost too much.

    Raises:
        UsageError: the Program cannot be divided into that many parts.
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
    starts_ranks_here = parallel.launcher == "auto" and read_launcher_env() is None
    return replace(mesh, kv_by_tokens=starts_ranks_here)


# Variables of the rank and the number of ranks: torchrun, Open MPI, MPICH and Intel MPI, Slurm.
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
    """The rank that a launcher such as torchrun gave this process, and the address of rank 0.

    `host` is None if the launcher does not set it (mpirun does not).
    """

    rank: int
    num_ranks: int
    host: str | None
    port: int


def read_launcher_env() -> LauncherEnv | None:
    """Read this process's rank from a launcher's environment variables; None if they are not set.

    Raises:
        UsageError: a variable of the launcher is missing or not a number.
    """
    variables = env.launcher_variables()
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SLURM_BATCH:
        variables.pop("SLURM_PROCID", None)  # also set for a batch script, which is not a rank
    for rank, size in _NAMES:
        if rank in variables and size in variables:
            port = _number(variables, "MASTER_PORT", _DEFAULT_PORT, 1, _MAX_PORT)
            if "TORCHELASTIC_RUN_ID" in variables:
                port += 1 if port < _MAX_PORT else -1  # torchrun itself listens at MASTER_PORT
            num_ranks = _number(variables, size, 0, 1, 1 << 20)
            number = _number(variables, rank, 0, 0, 1 << 20)
            if number >= num_ranks:
                raise UsageError(f"{rank} must be less than {size} ({num_ranks}), got {number}.")
            return LauncherEnv(number, num_ranks, variables.get("MASTER_ADDR"), port)
    if "RANK" in variables or "WORLD_SIZE" in variables:
        missing = "WORLD_SIZE" if "RANK" in variables else "RANK"
        raise UsageError(f"The launcher has not set {missing} (RANK and WORLD_SIZE are needed).")
    return None


def division_warning(num_ranks: int) -> str | None:
    """Return a warning if the number of ranks is probably a mistake, else None.

    Examples are far more ranks than cores, or a launcher whose processes each run the whole model.
    """
    try:
        launcher_env = read_launcher_env()
    except UsageError:  # a single rank does not need the launcher's variables
        return None
    if launcher_env is None:
        cores = num_cores()
        if num_ranks <= max(4, 2 * cores):
            return None
        ranks_share = counted_noun(num_ranks, "rank shares", "ranks share")
        return f"{ranks_share} {counted_noun(cores, 'core')}: expect it to be slow."
    if num_ranks > 1 or launcher_env.num_ranks == 1:
        return None
    return (
        f"The launcher has started {counted_noun(launcher_env.num_ranks, 'process')}, and each "
        "runs the whole model by itself: to divide it, add --tensor-parallel "
        f"{launcher_env.num_ranks}, for example."
    )


def _number(variables: dict[str, str], name: str, default: int, minimum: int, maximum: int) -> int:
    text = variables.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or not minimum <= int(text) <= maximum:
        raise UsageError(f"{name} must be a number from {minimum} to {maximum}, got '{text}'.")
    return int(text)
