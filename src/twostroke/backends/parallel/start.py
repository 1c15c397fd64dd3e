"""What a process is if a launcher (torchrun, mpirun, srun ...) has started it: a rank."""

from __future__ import annotations

from twostroke.backends.parallel.launched import LauncherEnv, launched
from twostroke.backends.parallel.remote import RankArrival, RemoteRanks, serve_rank
from twostroke.core import env
from twostroke.core.errors import PortInUseError, UsageError
from twostroke.core.options import ParallelOptions


def place_among(num_ranks: int) -> LauncherEnv | None:
    """Return this process's place if a launcher started it, None if this process starts the others.

    Raises:
        UsageError: the launcher has started another number of processes, or does not say where
            rank 0 is.
    """
    place = launched()
    if place is None or place.num_ranks == 1:
        return None
    if place.num_ranks != num_ranks:
        raise UsageError(
            f"The launcher has started {place.num_ranks} processes, but the options divide the "
            f"model over {num_ranks}: make both numbers the same."
        )
    if place.host is None:
        reason = "Set MASTER_ADDR to an address of rank 0's machine: this launcher does not say it."
        raise UsageError(reason)
    return place


def wait_for_ranks(place: LauncherEnv, asked: str = "") -> RemoteRanks:
    """Return the launcher of ranks that come by themselves, on rank 0, which was `asked` for this.

    Raises:
        PortInUseError: the address is taken, or is not one of this machine.
    """
    assert place.host is not None
    try:
        return RemoteRanks(place.host, place.port, env.rank_secret(), place.num_ranks, asked)
    except PortInUseError as error:
        knob = "Set MASTER_ADDR to an address of this machine and MASTER_PORT to a free port."
        raise PortInUseError(f"{error} {knob}") from None


def asked_of(model: str, parallel: ParallelOptions) -> str:
    """Return in words what a command is to run, to compare it with that of other ranks."""
    plain = ParallelOptions()
    names = [name for name in plain.__struct_fields__ if name != "launcher"]
    given = {name: getattr(parallel, name) for name in names}
    words = [f"{name} {given[name]}" for name in names if given[name] != getattr(plain, name)]
    return ", ".join([model, *words])


def follow_if_launched(model: str, parallel: ParallelOptions) -> None:
    """Be another rank than 0 until rank 0 ends, and exit, if a launcher has made this process one.

    Raises:
        UsageError: see `place_among`.
        ChannelClosedError: rank 0 does not answer.
        SystemExit: rank 0 has ended.
    """
    place = place_among(parallel.num_ranks)
    if place is not None and place.rank != 0:
        assert place.host is not None
        arrival = RankArrival(place.rank, place.num_ranks, asked_of(model, parallel))
        serve_rank(place.host, place.port, env.rank_secret(), arrival)
        raise SystemExit(0)
